//! `emberflow run`.

use std::{
    fs::File,
    io::{self, IsTerminal},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
};

use clap::ValueEnum;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::{Context, Failure, output, pipeline_args::PipelineArgs};
use crate::{
    cluster::{self, EmptyInput, Outcome, Run, RunOptions, RunOutcome},
    ids::RunId,
    limits,
    pipeline::PipelinePlan,
    remedy::Remedy,
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
    /// Executors, instead of the file's.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    executors: Option<u32>,
    /// Write events as JSON lines to a file, or to stdout by `-`.
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
enum OutputFormat {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Empty {
    Error,
    Skip,
    Ok,
}

fn run_id(text: &str) -> Result<RunId, String> {
    RunId::new(text).ok_or_else(|| "at most 128 letters, digits and . _ + : -, not starting with a dot".to_owned())
}

/// Runs a pipeline to its end.
pub(super) async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let plan = args.pipeline.plan()?;
    if args.dry_run {
        output::print(&cluster::explain(&context.storage, &plan).await?.to_string())?;
        return Ok(0);
    }
    let options = RunOptions {
        run_id: args.run_id.clone(),
        executors: args.executors,
        empty: match args.empty {
            Empty::Error => EmptyInput::Error,
            Empty::Skip => EmptyInput::Skip,
            Empty::Ok => EmptyInput::Ok,
        },
        fresh: args.fresh,
    };
    let run = Run::open(&context.storage, &plan, options).await?;
    let events = Events::new(run.id().clone(), listeners(context, &args)?);
    let signals = Signals::listen()?;
    let outcome = match run.execute(&events, Arc::clone(&signals.stop)).await {
        Ok(outcome) => outcome,
        Err(error) => {
            let failure = Failure::from(error);
            let interrupted = failure.remedy() == Remedy::Interrupted;
            let code = failure.report(context.color);
            return Ok(if interrupted { signals.exit_code() } else { code });
        }
    };
    let result = result(&outcome);
    if let Some(file) = &args.result_file {
        write_result(context, file, &result).await?;
    }
    let to_stdout = args.events.as_ref().is_none_or(|file| file.as_os_str() != "-");
    let text = match args.output {
        OutputFormat::Json => format!("{result}\n"),
        OutputFormat::Text => summary(&plan, &outcome),
    };
    if to_stdout || args.output == OutputFormat::Json {
        output::print(&text)?
    } else {
        output::hint(text.trim_end())
    }
    Ok(if outcome.status == Outcome::Skipped { Remedy::NothingToDo.exit_code() } else { 0 })
}

fn listeners(context: &Context, args: &Args) -> Result<Vec<Listener>, Failure> {
    let mut listeners = Vec::new();
    match &args.events {
        Some(file) if file.as_os_str() == "-" => listeners.push(telemetry::json_lines(io::stdout())),
        Some(file) => {
            let sink = File::create(file).map_err(|error| {
                Failure::io(format!("{}: events cannot be written", file.display()), error)
                    .with_remedy(Remedy::FixTarget)
            })?;
            listeners.push(telemetry::json_lines(sink));
        }
        None => {}
    }
    if !context.quiet {
        listeners.push(if io::stderr().is_terminal() { telemetry::bars() } else { telemetry::lines() });
    }
    Ok(listeners)
}

/// SIGTERM and SIGINT ask the run to stop; a second one, or too long a stop, ends the process.
struct Signals {
    stop: Arc<AtomicBool>,
    code: Arc<AtomicU8>,
    listener: tokio::task::JoinHandle<()>,
}

impl Signals {
    fn listen() -> Result<Self, Failure> {
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::bug)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::bug)?;
        let (stop, code) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU8::new(143)));
        let (set_stop, set_code) = (Arc::clone(&stop), Arc::clone(&code));
        let listener = tokio::spawn(async move {
            let mut received = async || {
                tokio::select! {
                    _ = terminate.recv() => 143,
                    _ = interrupt.recv() => 130,
                }
            };
            let first = received().await;
            set_code.store(first, Ordering::Relaxed);
            set_stop.store(true, Ordering::Relaxed);
            output::hint("stopping after a checkpoint; a second signal stops at once");
            let last = tokio::time::timeout(limits::SHUTDOWN, received()).await;
            // Either the user insists or the checkpoint takes too long: the last one is whole.
            std::process::exit(i32::from(last.unwrap_or(first)));
        });
        Ok(Self { stop, code, listener })
    }

    fn exit_code(&self) -> u8 {
        self.code.load(Ordering::Relaxed)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.listener.abort();
    }
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

async fn write_result(context: &Context, file: &std::path::Path, result: &Value) -> Result<(), Failure> {
    let folder = super::pipeline_args::working_folder()?;
    let location = Location::parse(&file.display().to_string(), &folder)?;
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
            let epochs = model.epochs.len();
            let held_out = last.held_out_loss.map(|loss| format!(", held out {loss:.6}")).unwrap_or_default();
            lines.push(format!(
                "model {}: {} parameters, loss {:.6} to {:.6}{held_out} in {epochs} epochs",
                model.name, model.parameters, first.loss, last.loss
            ));
        }
    }
    if let Some(speed) = record.metrics.get("train_rows_per_s").filter(|_| outcome.status == Outcome::Succeeded) {
        lines.push(format!("trained at {speed:.0} rows/s on {} executors", record.executors));
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

/// A local folder below the working directory by its relative path.
fn shown(store: &Location) -> String {
    let relative = || {
        let path = store.local_path()?;
        let relative = path.strip_prefix(std::env::current_dir().ok()?).ok()?.display().to_string();
        (!relative.is_empty()).then_some(relative)
    };
    relative().unwrap_or_else(|| store.to_string())
}
