//! Whether executors that train together come to what one alone comes to: each strategy in turn,
//! on the pipeline's own rows, beside one executor.

use std::{fmt, sync::Arc};

use serde::Serialize;

use super::{Aside, RunError, stages::Stages, training::Training};
use crate::{
    data::{Dataset, FittedFeatures},
    learn::Trained,
    pipeline::{
        ModelPlan,
        spec::{Compression, ServerMode, SyncStrategy},
    },
    telemetry::Event,
};

/// The loss of a synchronous strategy may differ by this much of it: sums are taken in another order.
pub const TOLERANCE: f64 = 1e-4;

/// Where one rounding alone leads further, by so many times of that: training amplifies, for a `ReLU`
/// that rounding flips changes a gradient as a whole.
const ROUNDING: f64 = 10.0;

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
    /// The first entry is one executor alone; the second too, with a learning rate that differs in
    /// the last place.
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

/// Trains every model of the file by every strategy, for so many epochs or as many as the file says.
pub async fn verify(aside: &Aside<'_>, epochs: Option<u32>) -> Result<Verification, RunError> {
    let models = aside
        .each_model(async |stages, model, features, dataset| {
            verify_model(stages, epochs.unwrap_or(model.train.epochs), model, features, dataset).await
        })
        .await?;
    Ok(Verification { models })
}

async fn verify_model(
    stages: &mut Stages<'_>,
    epochs: u32,
    model: &ModelPlan,
    features: &FittedFeatures,
    dataset: &Arc<Dataset>,
) -> Result<VerifiedModel, RunError> {
    let executors = stages.plan.run.executors;
    let mut strategies: Vec<VerifiedStrategy> = Vec::new();
    for (number, trial) in trials(executors).into_iter().enumerate() {
        let mut plan = model.clone();
        plan.name = format!("{}-{number}", model.name);
        plan.train.sync = trial.sync;
        plan.train.compression = Compression::None;
        plan.train.epochs = epochs;
        plan.train.learning_rate *= trial.learning_rate;
        stages.events.emit(&Event::StageStarted {
            kind: "train".to_owned(),
            name: trial.name.to_owned(),
            total: Some(u64::from(epochs)),
            unit: "epochs".to_owned(),
        });
        let work = stages.training_work(&plan, features, dataset)?;
        let training = Training::new(stages.storage, work, Arc::clone(dataset));
        let steps = training.steps() * u64::from(epochs);
        stages.fleet.resize(trial.executors);
        let trained = stages.fleet.train(training).await?;
        strategies.push(compare(&trial, &trained, &strategies, steps));
    }
    Ok(VerifiedModel { model: model.name.clone(), executors, strategies })
}

/// A training to compare.
struct Trial {
    /// As a file names the strategy.
    name: &'static str,
    executors: u32,
    sync: SyncStrategy,
    /// The learning rate is multiplied by this.
    learning_rate: f64,
    demand: Demand,
}

/// What its losses must be.
#[derive(Clone, Copy, PartialEq)]
enum Demand {
    /// Those of one executor.
    Same,
    /// Whatever they are.
    None,
    /// The yardstick: how far rounding alone leads one executor away.
    Rounding,
}

/// One executor twice, then the strategies.
fn trials(executors: u32) -> Vec<Trial> {
    let server = |mode| SyncStrategy::ParameterServer { servers: 1, mode, staleness: None };
    let local = SyncStrategy::LocalSgd { steps: 8, outer_momentum: 0.0, outer_learning_rate: 1.0 };
    let trial = |name, demand, sync| Trial { name, executors, sync, learning_rate: 1.0, demand };
    let one = |name, demand, learning_rate| Trial {
        name,
        executors: 1,
        sync: SyncStrategy::default(),
        learning_rate,
        demand,
    };
    vec![
        one("one executor", Demand::Same, 1.0),
        one("one, rounded otherwise", Demand::Rounding, 1.0 + f64::from(f32::EPSILON)),
        trial("all_reduce", Demand::Same, SyncStrategy::default()),
        trial("sharded", Demand::Same, SyncStrategy::Sharded {}),
        trial("parameter_server, sync", Demand::Same, server(ServerMode::Sync)),
        trial("parameter_server, async", Demand::None, server(ServerMode::Async)),
        trial("parameter_server, bounded", Demand::None, server(ServerMode::Bounded)),
        trial("local_sgd, 8 steps", Demand::None, local),
    ]
}

/// What came of a training, beside those before it.
fn compare(trial: &Trial, trained: &[Trained], before: &[VerifiedStrategy], steps: u64) -> VerifiedStrategy {
    let history = trained.first().map(|first| first.history.clone()).unwrap_or_default();
    let losses: Vec<f64> = history.iter().map(|epoch| epoch.loss).collect();
    let expected = before.first().map_or(&losses, |alone| &alone.losses);
    let differences = differences(&losses, expected);
    // What one rounding led to until each epoch.
    let rounding = before.get(1).map(|rounded| self::differences(&rounded.losses, expected)).unwrap_or_default();
    let allowed = rounding.iter().scan(0.0, |most, difference| {
        *most = f64::max(*most, difference.abs());
        Some(f64::max(TOLERANCE, ROUNDING * *most))
    });
    let within = allowed.zip(&differences).all(|(allowed, difference)| difference.abs() <= allowed);
    let elapsed_s: f64 = history.iter().map(|epoch| epoch.elapsed_s).sum();
    let rows: u64 = history.iter().map(|epoch| epoch.rows).sum();
    let bytes: u64 = trained.iter().map(|rank| rank.bytes_sent).sum();
    let staleness = trained.iter().filter_map(|rank| rank.staleness).reduce(|mut all, server| {
        all.add(&server);
        all
    });
    VerifiedStrategy {
        strategy: trial.name.to_owned(),
        executors: trial.executors,
        synchronous: trial.demand == Demand::Same,
        largest_difference: differences.iter().fold(0.0, |most, difference| f64::max(most, difference.abs())),
        last_difference: differences.last().copied().unwrap_or_default(),
        rows_per_s: rows as f64 / elapsed_s.max(f64::MIN_POSITIVE),
        bytes_per_step: bytes as f64 / steps.max(1) as f64,
        staleness_mean: staleness.map(|staleness| staleness.mean()),
        passed: trial.demand != Demand::Same || (losses.len() == expected.len() && within),
        losses,
    }
}

/// From what was expected, as fractions of it.
fn differences(losses: &[f64], expected: &[f64]) -> Vec<f64> {
    losses.iter().zip(expected).map(|(loss, expected)| (loss - expected) / expected.abs().max(1e-12)).collect()
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
        writeln!(
            f,
            "{verdict} to the losses of one executor in every epoch, within {TOLERANCE:e} of them, or {ROUNDING:.0} \
             times as far as one executor comes by a learning rate that differs in the last place"
        )
    }
}
