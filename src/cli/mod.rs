//! The command line: one file per subcommand.
//!
//! Stdout is data; progress, logs and hints go to stderr. A command gives back a status and
//! never exits by itself.

mod completions;
mod doctor;
mod executor;
mod explain;
mod failure;
mod history;
mod init;
mod logging;
mod output;
mod pipeline_args;
mod run;
mod schema;
mod shell;
mod simulate;
mod sql;
mod validate;
mod verify;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{ColorChoice, Parser, Subcommand, error::ErrorKind};

use self::failure::Failure;
use crate::{config::SiteConfig, remedy::Remedy, storage::Storage};

/// Rows in HDFS to learned embeddings, by one pipeline file.
#[derive(Debug, Parser)]
#[command(name = "emberflow", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    global: Global,
}

/// What every command understands.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Of every command")]
struct Global {
    /// Settings of the site [default: conf/emberflow.yaml, /etc/emberflow/emberflow.yaml].
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How logs are written.
    #[arg(long, global = true, value_enum, default_value = "text")]
    log_format: logging::LogFormat,
    /// No progress.
    #[arg(long, short, global = true)]
    quiet: bool,
    /// When to use colours.
    #[arg(long, global = true, value_enum, default_value = "auto")]
    color: ColorChoice,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write a starter project.
    Init(init::Args),
    /// Check pipeline files without touching data.
    Validate(validate::Args),
    /// Show what a run would do, from file footers alone.
    Explain(explain::Args),
    /// Train, embed and commit.
    Run(run::Args),
    /// Show that executors together come to what one alone comes to, by every strategy.
    Verify(verify::Args),
    /// Predict how fast fleets of any size would train, from a few seconds of measuring here.
    Simulate(simulate::Args),
    /// Query embeddings, sources and runs; interactive without a query.
    Sql(sql::Args),
    /// List runs.
    Runs(history::RunsArgs),
    /// Tell how a run went; the latest one unless named.
    Status(history::StatusArgs),
    /// List trained models.
    Models(history::ModelsArgs),
    /// Check this machine, Hadoop's configuration and HDFS.
    Doctor(doctor::Args),
    /// Work for a run elsewhere, as one of its executors.
    #[command(hide = true)]
    Executor(executor::Args),
    /// Print the JSON Schema of pipeline files.
    Schema,
    /// Print shell completions.
    Completions(completions::Args),
}

/// What a command works with.
struct Context {
    storage: Storage,
    config: SiteConfig,
    /// The settings file, if one was named.
    config_file: Option<PathBuf>,
    quiet: bool,
    color: bool,
}

/// Runs the command line and gives the exit code; nothing panics out of here.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    failure::report_panics();
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let color = failure::use_color(cli.global.color);
    let code = match dispatch(cli, color) {
        Ok(code) => code,
        Err(failure) => failure.report(color),
    };
    ExitCode::from(code)
}

/// Help and version are answers; anything else is a wrong command line.
fn usage(error: &clap::Error) -> ExitCode {
    // A reader that closed the pipe has seen enough.
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(Remedy::FixCommand.exit_code()),
    }
}

fn dispatch(cli: Cli, color: bool) -> Result<u8, Failure> {
    logging::start(cli.global.log_format, color)?;
    let config = SiteConfig::load(cli.global.config.as_deref())?;
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::bug)?;
    let context = Context {
        storage: Storage::new(&config),
        config,
        config_file: cli.global.config,
        quiet: cli.global.quiet,
        color,
    };
    let result = runtime.block_on(async {
        match cli.command {
            Command::Init(args) => init::run(&args),
            Command::Validate(args) => validate::run(&context, &args),
            Command::Explain(args) => explain::run(&context, &args).await,
            Command::Run(args) => Box::pin(run::run(&context, args)).await,
            Command::Verify(args) => Box::pin(verify::run(&context, args)).await,
            Command::Simulate(args) => Box::pin(simulate::run(&context, args)).await,
            Command::Sql(args) => sql::run(&context, args).await,
            Command::Runs(args) => history::runs(&context, &args).await,
            Command::Status(args) => history::status(&context, &args).await,
            Command::Models(args) => history::models(&context, &args).await,
            Command::Doctor(args) => doctor::run(&context, &args).await,
            Command::Executor(args) => executor::run(&context, args).await,
            Command::Schema => schema::run(),
            Command::Completions(args) => completions::run(&args),
        }
    });
    // A blocking call that still waits for a store must not hold the process.
    runtime.shutdown_background();
    result
}
