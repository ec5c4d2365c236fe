//! Whether executors that train together come to what one alone comes to: each strategy in turn,
//! on the pipeline's own rows, beside one executor.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
};

use serde::Serialize;

use super::{RunError, Stop, fleet::Fleet, run::new_record, stages::Stages, training::Training};
use crate::{
    config::SiteConfig,
    data::{Dataset, Engine, FittedFeatures, Snapshot},
    ids::RunId,
    learn::Trained,
    pipeline::{
        ModelPlan, PipelinePlan,
        spec::{Choice, Compression, Launcher, ServerMode, Spread, SyncStrategy},
    },
    runs::{self, Lease},
    storage::Storage,
    telemetry::{Event, Events},
};

/// The loss of a synchronous strategy may differ by this much of it, by the order of sums alone.
pub const TOLERANCE: f64 = 1e-4;

/// How a verification differs from a run.
#[derive(Clone, Debug, Default)]
pub struct VerifyOptions {
    /// Epochs instead of the file's.
    pub epochs: Option<u32>,
    /// The site's settings, and the file that they were read from if one was named.
    pub site: SiteConfig,
    /// See `site`.
    pub site_file: Option<PathBuf>,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Verification {
    /// One entry per model.
    pub models: Vec<VerifiedModel>,
}

/// One model.
#[derive(Clone, Debug, Serialize)]
pub struct VerifiedModel {
    /// Its name.
    pub model: String,
    /// Executors that trained together.
    pub executors: u32,
    /// The first entry is one executor alone.
    pub strategies: Vec<VerifiedStrategy>,
}

/// One strategy.
#[derive(Clone, Debug, Serialize)]
pub struct VerifiedStrategy {
    /// As a file names it.
    pub strategy: String,
    /// Executors.
    pub executors: u32,
    /// Whether it must come to the losses of one executor.
    pub synchronous: bool,
    /// By epoch, mean over rows and features.
    pub losses: Vec<f64>,
    /// The largest difference from one executor's loss in any epoch, as a fraction of it.
    pub largest_difference: f64,
    /// That of the last epoch, with its sign.
    pub last_difference: f64,
    /// Rows per second while it trained.
    pub rows_per_s: f64,
    /// Bytes on the wire per step, over all executors.
    pub bytes_per_step: f64,
    /// Of a parameter server: updates that others made meanwhile, mean over gradients.
    pub staleness_mean: Option<f64>,
    /// Whether it is what it must be.
    pub passed: bool,
}

impl Verification {
    /// Whether every synchronous strategy came to the losses of one executor.
    pub fn passed(&self) -> bool {
        self.models.iter().flat_map(|model| &model.strategies).all(|strategy| strategy.passed)
    }
}

/// Trains every model of the file by every strategy, in a folder of the store that is removed in the
/// end. Nothing is committed.
pub async fn verify(
    storage: &Storage,
    plan: &PipelinePlan,
    options: &VerifyOptions,
    events: &Events,
    stop: &Stop,
) -> Result<Verification, RunError> {
    let scratch = plan.store.join(&format!("_verify/{}-{}", std::process::id(), chrono::Utc::now().timestamp_millis()));
    let aside = PipelinePlan { store: scratch.clone(), ..plan.clone() };
    let result = Box::pin(verify_aside(storage, &aside, options, events, stop.requested())).await;
    storage.remove(&scratch).await?;
    result
}

async fn verify_aside(
    storage: &Storage,
    plan: &PipelinePlan,
    options: &VerifyOptions,
    events: &Events,
    stop: &Arc<AtomicBool>,
) -> Result<Verification, RunError> {
    let snapshot = Snapshot::take(storage, plan).await?;
    let run_id = RunId::new("verify").ok_or(RunError::Protocol { what: "a run's name" })?;
    let folder = runs::run_folder(&plan.store, &run_id);
    let lease = Arc::new(Lease::acquire(storage, &folder).await?);
    let mut record = new_record(plan, &run_id, lease.attempt());
    let start = |launcher, executors| {
        let run = plan.run.clone().started_with(Some(Choice::Fixed(executors)), Some(launcher));
        Fleet::start(&run, &options.site, options.site_file.clone(), events, stop)
    };
    let stages = Stages {
        storage,
        plan,
        snapshot: &snapshot,
        work: folder.join("work"),
        lease: &lease,
        record: &mut record,
        events,
        stop: Arc::clone(stop),
        fleet: start(Launcher::InProcess, 1)?,
    };
    let fleet = start(plan.run.launcher, plan.run.executors)?;
    let engine = Engine::open(storage, plan, &snapshot).await?;
    let mut models = Vec::new();
    for model in plan.models.iter().filter(|model| matches!(model.spread, Spread::Data {})) {
        let dataset = stages.dataset(&engine, model).await?;
        let features = stages.fit(&engine, model, &dataset).await?;
        models.push(verify_model(&stages, &fleet, options, model, &dataset, &features).await?);
    }
    Ok(Verification { models })
}

async fn verify_model(
    stages: &Stages<'_>,
    fleet: &Fleet,
    options: &VerifyOptions,
    model: &ModelPlan,
    dataset: &Arc<Dataset>,
    features: &FittedFeatures,
) -> Result<VerifiedModel, RunError> {
    let executors = stages.plan.run.executors;
    let mut strategies: Vec<VerifiedStrategy> = Vec::new();
    for (number, (name, synchronous, sync)) in all_strategies().into_iter().enumerate() {
        let mut plan = model.clone();
        plan.name = format!("{}-{number}", model.name);
        plan.train.sync = sync;
        plan.train.compression = Compression::None;
        plan.train.epochs = options.epochs.unwrap_or(plan.train.epochs);
        let alone = strategies.is_empty();
        stages.events.emit(&Event::StageStarted {
            kind: "train".to_owned(),
            name: if alone { "one executor".to_owned() } else { name.to_owned() },
            total: Some(u64::from(plan.train.epochs)),
            unit: "epochs".to_owned(),
        });
        let work = stages.training_work(&plan, features, dataset)?;
        let training = Training::new(stages.storage, work, Arc::clone(dataset));
        let steps = training.steps() * u64::from(plan.train.epochs);
        let trained = if alone { stages.fleet.train(training).await? } else { fleet.train(training).await? };
        let expected = strategies.first().map(|first| first.losses.clone());
        let name = if alone { "one executor" } else { name };
        let executors = if alone { 1 } else { executors };
        strategies.push(compare(name, executors, synchronous, &trained, expected.as_deref(), steps));
    }
    Ok(VerifiedModel { model: model.name.clone(), executors, strategies })
}

/// One executor alone, then the strategies as a file names them, and whether they are synchronous.
fn all_strategies() -> Vec<(&'static str, bool, SyncStrategy)> {
    let server = |mode| SyncStrategy::ParameterServer { servers: 1, mode, staleness: None };
    let local = SyncStrategy::LocalSgd { steps: 8, outer_momentum: 0.0, outer_learning_rate: 1.0 };
    vec![
        ("one executor", true, SyncStrategy::default()),
        ("all_reduce", true, SyncStrategy::default()),
        ("sharded", true, SyncStrategy::Sharded {}),
        ("parameter_server, sync", true, server(ServerMode::Sync)),
        ("parameter_server, async", false, server(ServerMode::Async)),
        ("parameter_server, bounded", false, server(ServerMode::Bounded)),
        ("local_sgd, 8 steps", false, local),
    ]
}

fn compare(
    strategy: &str,
    executors: u32,
    synchronous: bool,
    trained: &[Trained],
    expected: Option<&[f64]>,
    steps: u64,
) -> VerifiedStrategy {
    let history = trained.first().map(|first| first.history.clone()).unwrap_or_default();
    let losses: Vec<f64> = history.iter().map(|epoch| epoch.loss).collect();
    let expected = expected.unwrap_or(&losses);
    let differences = losses.iter().zip(expected).map(|(loss, expected)| (loss - expected) / expected.abs().max(1e-12));
    let largest_difference = differences.clone().fold(0.0, |most, difference| f64::max(most, difference.abs()));
    let elapsed_s: f64 = history.iter().map(|epoch| epoch.elapsed_s).sum();
    let rows: u64 = history.iter().map(|epoch| epoch.rows).sum();
    let bytes: u64 = trained.iter().map(|rank| rank.bytes_sent).sum();
    let staleness = trained.iter().filter_map(|rank| rank.staleness).reduce(|mut all, server| {
        all.add(&server);
        all
    });
    VerifiedStrategy {
        strategy: strategy.to_owned(),
        executors,
        synchronous,
        largest_difference,
        last_difference: differences.clone().next_back().unwrap_or_default(),
        rows_per_s: rows as f64 / elapsed_s.max(f64::MIN_POSITIVE),
        bytes_per_step: bytes as f64 / steps.max(1) as f64,
        staleness_mean: staleness.map(|staleness| staleness.mean()),
        passed: !synchronous || (losses.len() == expected.len() && largest_difference <= TOLERANCE),
        losses,
    }
}

impl fmt::Display for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for model in &self.models {
            writeln!(f, "model {}, {} executors beside one:\n", model.model, model.executors)?;
            writeln!(
                f,
                "{:<27} {:>10} {:>12} {:>12} {:>10} {:>12} {:>10}",
                "strategy", "last loss", "difference", "at most", "rows/s", "bytes/step", "staleness"
            )?;
            for strategy in &model.strategies {
                let last = strategy.losses.last().copied().unwrap_or_default();
                let staleness = strategy.staleness_mean.map(|mean| format!("{mean:.2}")).unwrap_or_default();
                writeln!(
                    f,
                    "{:<27} {last:>10.6} {:>+12.1e} {:>12.1e} {:>10.0} {:>12.0} {staleness:>10}{}",
                    strategy.strategy,
                    strategy.last_difference,
                    strategy.largest_difference,
                    strategy.rows_per_s,
                    strategy.bytes_per_step,
                    if strategy.passed { "" } else { "  FAILED" }
                )?;
            }
            writeln!(f)?;
        }
        let verdict =
            if self.passed() { "every synchronous strategy comes" } else { "NOT every synchronous strategy comes" };
        writeln!(f, "{verdict} to the losses of one executor, within {TOLERANCE:e} of them in every epoch")
    }
}
