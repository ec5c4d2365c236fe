//! `emberflow runs`, `status` and `models`: what ran and what it made.

use chrono::DateTime;
use serde_json::json;

use super::{Context, Failure, output, sql::DbArg};
use crate::{
    ids::RunId,
    runs::{self, ModelRecord, RunRecord},
};

/// Arguments of `runs`.
#[derive(Debug, clap::Args)]
pub(super) struct RunsArgs {
    #[command(flatten)]
    db: DbArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `status`.
#[derive(Debug, clap::Args)]
pub(super) struct StatusArgs {
    /// The run [default: the latest].
    run_id: Option<String>,
    #[command(flatten)]
    db: DbArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `models`.
#[derive(Debug, clap::Args)]
pub(super) struct ModelsArgs {
    #[command(flatten)]
    db: DbArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Lists runs, the latest first.
pub(super) async fn runs(context: &Context, args: &RunsArgs) -> Result<u8, Failure> {
    let runs = runs::list_runs(&context.storage, &args.db.location()?).await?;
    if args.json {
        output::print_json(&runs)?;
        return Ok(0);
    }
    let row = |run: &RunRecord| {
        let tables = run.embeddings.iter().map(|table| format!("{}@{}", table.table, table.version));
        vec![
            run.run_id.to_string(),
            run.pipeline.clone(),
            run.status.as_str().to_owned(),
            time(run.started_ms),
            run.metrics.get("elapsed_s").map(|elapsed| format!("{elapsed:.1} s")).unwrap_or_default(),
            tables.collect::<Vec<_>>().join(", "),
        ]
    };
    let rows: Vec<_> = runs.iter().map(row).collect();
    output::print(&output::table(&["run", "pipeline", "status", "started", "took", "wrote"], &rows))?;
    Ok(0)
}

/// Tells how one run went.
pub(super) async fn status(context: &Context, args: &StatusArgs) -> Result<u8, Failure> {
    let store = args.db.location()?;
    let run = match &args.run_id {
        Some(text) => {
            let run_id = RunId::new(text).ok_or_else(|| Failure::usage(format!("{text} is no run ID")))?;
            runs::read_run(&context.storage, &store, &run_id).await?
        }
        None => runs::list_runs(&context.storage, &store).await?.into_iter().next(),
    };
    let Some(run) = run else {
        return Err(Failure::usage(format!("there is no such run in {store}; `emberflow runs` lists them")));
    };
    if args.json {
        output::print_json(&run)?;
    } else {
        output::print(&status_report(&run))?;
    }
    Ok(0)
}

fn status_report(run: &RunRecord) -> String {
    let mut lines = vec![
        format!("run {} of {}: {}", run.run_id, run.pipeline, run.status.as_str()),
        format!("started {}, attempt {} on {}", time(run.started_ms), run.attempt, run.host),
    ];
    if let Some(error) = &run.error {
        let again = if error.retryable { "; the same command may succeed later" } else { "" };
        lines.push(format!("error (exit code {}{again}): {}", error.exit_code, error.message));
    }
    for model in &run.models {
        lines.push(format!("model {}: {} parameters, fingerprint {}", model.name, model.parameters, model.fingerprint));
        for epoch in &model.epochs {
            let held_out = epoch.held_out_loss.map(|loss| format!(", held out {loss:.6}")).unwrap_or_default();
            lines.push(format!("  epoch {}: loss {:.6}{held_out}, {:.1} s", epoch.epoch, epoch.loss, epoch.elapsed_s));
        }
    }
    for table in &run.embeddings {
        lines.push(format!("{}@{}: {} rows at {}", table.table, table.version, table.rows, table.location));
    }
    for (name, value) in &run.metrics {
        lines.push(format!("{name} {value:.3}"));
    }
    lines.join("\n") + "\n"
}

/// Lists trained models, the latest first.
pub(super) async fn models(context: &Context, args: &ModelsArgs) -> Result<u8, Failure> {
    let runs = runs::list_runs(&context.storage, &args.db.location()?).await?;
    let models: Vec<(&RunRecord, &ModelRecord)> =
        runs.iter().flat_map(|run| run.models.iter().map(move |model| (run, model))).collect();
    if args.json {
        let models: Vec<_> = models
            .iter()
            .map(|(run, model)| json!({ "run_id": run.run_id, "pipeline": run.pipeline, "model": model }))
            .collect();
        output::print_json(&models)?;
        return Ok(0);
    }
    let row = |(run, model): &(&RunRecord, &ModelRecord)| {
        vec![
            model.name.clone(),
            model.fingerprint.0.chars().take(12).collect(),
            model.features.to_string(),
            model.latent.to_string(),
            model.parameters.to_string(),
            model.epochs.last().map(|epoch| format!("{:.6}", epoch.loss)).unwrap_or_default(),
            run.run_id.to_string(),
            model.location.to_string(),
        ]
    };
    let rows: Vec<_> = models.iter().map(row).collect();
    let headings = ["model", "fingerprint", "features", "latent", "parameters", "loss", "run", "location"];
    output::print(&output::table(&headings, &rows))?;
    Ok(0)
}

fn time(ms: i64) -> String {
    DateTime::from_timestamp_millis(ms).unwrap_or_default().format("%Y-%m-%d %H:%M:%S UTC").to_string()
}
