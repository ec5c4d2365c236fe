//! `emberflow verify`.

use super::{Context, Failure, output, pipeline_args::PipelineArgs, run};
use crate::{
    cluster::{self, Aside, Stop},
    ids::RunId,
    pipeline::spec::Choice,
    remedy::Remedy,
    telemetry::Events,
};

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pipeline: PipelineArgs,
    /// Executors that train together, instead of the file's; by default 2 at least.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    executors: Option<u32>,
    /// How executors are started, instead of how the file says.
    #[arg(long, value_enum)]
    launcher: Option<run::LauncherName>,
    /// Epochs of each training, instead of the file's.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    epochs: Option<u32>,
    /// How the result is printed; `json` is one line.
    #[arg(long, value_enum, default_value = "text")]
    output: run::OutputFormat,
}

/// Trains by every strategy and compares.
pub(super) async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let mut plan = args.pipeline.plan()?;
    let executors = args.executors.unwrap_or(plan.run.executors.max(2));
    plan.run = plan.run.started_with(Some(Choice::Fixed(executors)), args.launcher.map(Into::into));
    let run_id = RunId::new("verify").ok_or_else(|| Failure::bug("no name for a run"))?;
    let events = Events::new(run_id, run::progress(context));
    let stop = Stop::default();
    let _signals = run::Signals::listen(stop.clone())?;
    let aside = Aside {
        storage: &context.storage,
        plan: &plan,
        site: &context.config,
        site_file: context.config_file.clone(),
        events: &events,
        stop: &stop,
    };
    let verification = Box::pin(cluster::verify(&aside, args.epochs)).await?;
    output::result(args.output, &verification)?;
    Ok(if verification.passed() { 0 } else { Remedy::ReportBug.exit_code() })
}
