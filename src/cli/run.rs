//! `emberflow run`.

use std::{
    io::{self, IsTerminal},
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::{
    Context, Failure, output,
    pipeline_args::{PipelineArgs, working_folder},
};
use crate::{
    cluster::{self, EmptyInput, Outcome, Run, RunOptions, RunOutcome, Stop},
    ids::RunId,
    limits,
    pipeline::{
        PipelinePlan,
        spec::{Choice, Launcher},
    },
    remedy::Remedy,
    runs::RunRecord,
    storage::Location,
    telemetry::{self, Events, Listener},
};

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pipeline: PipelineArgs,
    /// Name of the run; the same name is the same run, finished, resumed or refused
    /// [default: made from the file's meaning and its input].
    #[arg(long, value_name = "ID", value_parser = run_id)]
    run_id: Option<RunId>,
    /// Executors, instead of the file's; `auto` for as many as a short measurement finds fastest.
    #[arg(long, value_name = "N", value_parser = executors)]
    executors: Option<Choice<u32>>,
    /// How executors are started, instead of how the file says: as threads, as child processes,
    /// or by others, who join the address of the site's setting `listen`.
    #[arg(long, value_enum)]
    launcher: Option<LauncherName>,
    /// Add events as JSON lines to a file, or write them to stdout by `-`.
    #[arg(long, value_name = "FILE")]
    events: Option<PathBuf>,
    /// How the result is printed; `json` is one line, the last of stdout.
    #[arg(long, value_enum, default_value = "text")]
    output: OutputFormat,
    /// Write the result as JSON to a file too.
    #[arg(long, value_name = "FILE")]
    result_file: Option<PathBuf>,
    /// What happens if there are no rows: fail, end with code 99, or succeed.
    #[arg(long, value_enum, default_value = "error")]
    empty: Empty,
    /// Only show what the run would do, as `explain` does.
    #[arg(long)]
    dry_run: bool,
    /// Forget what an earlier attempt left, and begin anew.
    #[arg(long)]
    fresh: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum OutputFormat {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Empty {
    Error,
    Skip,
    Ok,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum LauncherName {
    #[value(name = "in_process")]
    InProcess,
    Local,
    Static,
}

impl From<LauncherName> for Launcher {
    fn from(name: LauncherName) -> Self {
        match name {
            LauncherName::InProcess => Self::InProcess,
            LauncherName::Local => Self::Local,
            LauncherName::Static => Self::Static,
        }
    }
}

impl Args {
    /// The file's plan, with what this start changes.
    fn plan(&self) -> Result<PipelinePlan, Failure> {
        let mut plan = self.pipeline.plan()?;
        plan.run = plan.run.started_with(self.executors, self.launcher.map(Into::into));
        Ok(plan)
    }
}

fn executors(text: &str) -> Result<Choice<u32>, String> {
    if text == "auto" {
        return Ok(Choice::Auto);
    }
    let number = text.parse().ok().filter(|number| (1..=1024).contains(number));
    number.map(Choice::Fixed).ok_or_else(|| "expected a number from 1 to 1024, or `auto`".to_owned())
}

fn run_id(text: &str) -> Result<RunId, String> {
    RunId::new(text).ok_or_else(|| "at most 128 letters, digits and . _ + : -, not starting with a dot".to_owned())
}

/// Runs a pipeline to its end.
pub(super) async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    if args.dry_run {
        return dry_run(context, &args).await;
    }
    let (stop, mut run_id) = (Stop::default(), args.run_id.clone());
    match Box::pin(execute(context, &args, &stop, &mut run_id)).await {
        Ok((plan, outcome)) => tell(context, &args, &plan, &outcome).await,
        Err(failure) => {
            failure.report(context.color);
            let result = failed(&failure, stop.exit_code(failure.remedy()), run_id.as_ref());
            if let Some(file) = &args.result_file
                && let Err(failure) = write_result(context, file, &result).await
            {
                failure.report(context.color);
            }
            if args.output == OutputFormat::Json {
                output::print(&format!("{result}\n"))?;
            }
            Ok(stop.exit_code(failure.remedy()))
        }
    }
}

async fn dry_run(context: &Context, args: &Args) -> Result<u8, Failure> {
    let plan = args.plan()?;
    let explanation = cluster::explain(&context.storage, &plan).await?;
    output::result(args.output, &explanation)?;
    Ok(0)
}

/// Does the work; `run_id` is set once the run has a name.
async fn execute(
    context: &Context,
    args: &Args,
    stop: &Stop,
    run_id: &mut Option<RunId>,
) -> Result<(PipelinePlan, RunOutcome), Failure> {
    let plan = args.plan()?;
    let options = RunOptions {
        run_id: args.run_id.clone(),
        site: context.config.clone(),
        site_file: context.config_file.clone(),
        empty: match args.empty {
            Empty::Error => EmptyInput::Error,
            Empty::Skip => EmptyInput::Skip,
            Empty::Ok => EmptyInput::Ok,
        },
        fresh: args.fresh,
    };
    let run = Run::open(&context.storage, &plan, options).await?;
    *run_id = Some(run.id().clone());
    let events = Events::new(run.id().clone(), listeners(context, args)?);
    let _signals = Signals::listen(stop.clone())?;
    let outcome = Box::pin(run.execute(&events, stop)).await?;
    Ok((plan, outcome))
}

/// Tells how a run ended that did not fail.
async fn tell(context: &Context, args: &Args, plan: &PipelinePlan, outcome: &RunOutcome) -> Result<u8, Failure> {
    let result = result(outcome);
    if let Some(file) = &args.result_file {
        write_result(context, file, &result).await?;
    }
    let events_on_stdout = args.events.as_ref().is_some_and(|file| file.as_os_str() == "-");
    match args.output {
        OutputFormat::Json => output::print(&format!("{result}\n"))?,
        // Stdout is then for events alone.
        OutputFormat::Text if events_on_stdout => output::hint(summary(plan, outcome).trim_end()),
        OutputFormat::Text => output::print(&summary(plan, outcome))?,
    }
    Ok(if outcome.status == Outcome::Skipped { Remedy::NothingToDo.exit_code() } else { 0 })
}

fn listeners(context: &Context, args: &Args) -> Result<Vec<Listener>, Failure> {
    let mut listeners = Vec::new();
    match &args.events {
        Some(file) if file.as_os_str() == "-" => listeners.push(telemetry::json_lines(io::stdout())),
        Some(file) => {
            let what = format!("{}: events cannot be written", file.display());
            let sink = telemetry::open_event_file(file).map_err(|error| Failure::target(what, &error))?;
            listeners.push(telemetry::json_lines(sink));
        }
        None => {}
    }
    listeners.extend(progress(context));
    Ok(listeners)
}

/// Progress on stderr, unless it is not wanted.
pub(super) fn progress(context: &Context) -> Vec<Listener> {
    let printer = || if io::stderr().is_terminal() { telemetry::bars() } else { telemetry::lines() };
    if context.quiet { Vec::new() } else { vec![printer()] }
}

/// SIGTERM and SIGINT ask the run to stop; a second one, or too long a stop, ends the process.
pub(super) struct Signals {
    listener: tokio::task::JoinHandle<()>,
}

impl Signals {
    pub(super) fn listen(stop: Stop) -> Result<Self, Failure> {
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::bug)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::bug)?;
        let listener = tokio::spawn(async move {
            let mut received = async || {
                tokio::select! {
                    _ = terminate.recv() => 143,
                    _ = interrupt.recv() => 130,
                }
            };
            let first = received().await;
            stop.request(first);
            output::hint("stopping after a checkpoint; a second signal stops at once");
            let last = tokio::time::timeout(limits::SHUTDOWN, received()).await;
            // Either the user insists or the checkpoint takes too long: the last one is whole.
            std::process::exit(i32::from(last.unwrap_or(first)));
        });
        Ok(Self { listener })
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

/// What a scheduler gets to know of a failure; `run_id` is null where the run had no name yet.
fn failed(failure: &Failure, exit_code: u8, run_id: Option<&RunId>) -> Value {
    let remedy = failure.remedy();
    json!({
        "run_id": run_id,
        "status": if remedy == Remedy::Interrupted { "interrupted" } else { "failed" },
        "error": {
            "message": failure.causes().join(": "),
            "exit_code": exit_code,
            "retryable": remedy.retryable(),
        },
    })
}

/// What a scheduler gets to know.
fn result(outcome: &RunOutcome) -> Value {
    let record = &outcome.record;
    let models = record.models.iter().map(|model| {
        let last = model.epochs.last();
        json!({
            "name": model.name,
            "fingerprint": model.fingerprint,
            "location": model.location,
            "epochs": model.epochs.len(),
            "loss": last.map(|epoch| epoch.loss),
            "held_out_loss": last.and_then(|epoch| epoch.held_out_loss),
        })
    });
    json!({
        "run_id": record.run_id,
        "status": outcome.status.as_str(),
        "pipeline": record.pipeline,
        "embeddings": record.embeddings,
        "models": models.collect::<Vec<_>>(),
        "metrics": record.metrics,
    })
}

async fn write_result(context: &Context, file: &Path, result: &Value) -> Result<(), Failure> {
    let location = Location::parse(&file.display().to_string(), &working_folder()?)?;
    Ok(context.storage.replace(&location, result.to_string().into()).await?)
}

/// What people get to know: what came of it, and what to type next.
fn summary(plan: &PipelinePlan, outcome: &RunOutcome) -> String {
    let record = &outcome.record;
    let mut lines = Vec::new();
    match outcome.status {
        Outcome::Succeeded => lines.push(format!("run {} succeeded", record.run_id)),
        Outcome::Unchanged => {
            let ended = record.ended_ms.and_then(chrono::DateTime::from_timestamp_millis).unwrap_or_default();
            let ended = ended.format("%Y-%m-%d %H:%M:%S UTC");
            lines.push(format!("nothing to do: run {} finished at {ended}", record.run_id));
        }
        Outcome::Skipped => lines.push(format!("run {} was skipped: there are no rows", record.run_id)),
    }
    for model in &record.models {
        if let (Some(first), Some(last)) = (model.epochs.first(), model.epochs.last()) {
            let epochs = output::count(model.epochs.len(), "epoch");
            let held_out = last.held_out_loss.map(|loss| format!(", held out {loss:.6}")).unwrap_or_default();
            lines.push(format!(
                "model {}: {} parameters, loss {:.6} to {:.6}{held_out} in {epochs}",
                model.name, model.parameters, first.loss, last.loss
            ));
        }
    }
    if let Some(speed) = record.metrics.get("train_rows_per_s").filter(|_| outcome.status == Outcome::Succeeded) {
        let executors = output::count(record.executors as usize, "executor");
        let speed_up = record.metrics.get("speed_up").filter(|_| record.executors > 1);
        let times = speed_up.map(|times| format!(", {times:.2} times one executor's")).unwrap_or_default();
        lines.push(format!("trained at {speed:.0} rows/s on {executors}{times}{}", time_spent(record)));
    }
    for decision in &record.decisions {
        lines.push(format!("{}: {}", decision.model, decision.why));
    }
    for table in &record.embeddings {
        lines.push(format!("{}: {} rows, version {}, at {}", table.table, table.rows, table.version, table.location));
    }
    if let Some(table) = record.embeddings.first() {
        lines.push(String::new());
        lines.push("next, look at them:".to_owned());
        lines.push(format!("    emberflow sql --db {} \"SELECT * FROM {} LIMIT 5\"", shown(&plan.store), table.table));
    }
    lines.join("\n") + "\n"
}

/// What executors spent their time with while they trained, the most first; what took less than a
/// hundredth of it is left out.
fn time_spent(record: &RunRecord) -> String {
    let phases = [
        ("compute_s", "computing"),
        ("feed_wait_s", "waiting for rows"),
        ("wait_s", "waiting for each other"),
        ("communicate_s", "exchanging"),
        ("update_s", "updating"),
    ];
    let seconds = |name: &str| record.metrics.get(name).copied().unwrap_or_default();
    let total: f64 = phases.iter().map(|(name, _)| seconds(name)).sum();
    let mut parts = phases.map(|(name, what)| (100.0 * seconds(name) / total.max(f64::MIN_POSITIVE), what));
    parts.sort_by(|a, b| b.0.total_cmp(&a.0));
    let parts = parts.iter().filter(|(percent, _)| *percent >= 1.0);
    let parts: Vec<String> = parts.map(|(percent, what)| format!("{percent:.0}% {what}")).collect();
    if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) }
}

/// A local folder below the working directory by its relative path.
fn shown(store: &Location) -> String {
    let relative = || {
        let path = store.local_path()?;
        let relative = path.strip_prefix(std::env::current_dir().ok()?).ok()?.display().to_string();
        (!relative.is_empty()).then_some(relative)
    };
    relative().unwrap_or_else(|| store.to_string())
}
