//! How fast fleets of any size would train: the model of a step's cost, driven by what short trials
//! measured here.

use std::{fmt, sync::Arc};

use serde::Serialize;

use super::{
    Aside, RunError,
    choose::{Trials, middle, way_in_words},
    cost::{Constants, Predicted, Way},
    stages::Stages,
};
use crate::{
    data::{Dataset, FittedFeatures},
    limits,
    pipeline::{
        ModelPlan,
        spec::{Compression, ServerMode, SyncStrategy},
    },
};

/// What to simulate.
#[derive(Clone, Debug, Default)]
pub struct SimulateOptions {
    /// Numbers of executors.
    pub executors: Vec<u32>,
    /// Executors that each have a host like this one, joined by such a link; without, they start as
    /// the file says, and the link is the one measured.
    pub link: Option<Link>,
    /// Fleets that are started too, to see how far the model is off.
    pub check: Vec<u32>,
}

/// A network between hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Until a message is there, seconds.
    pub latency_s: f64,
    /// Bytes per second of one host, each way.
    pub bytes_per_s: f64,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Simulation {
    /// One entry per model.
    pub models: Vec<SimulatedModel>,
}

/// One model.
#[derive(Clone, Debug, Serialize)]
pub struct SimulatedModel {
    /// Its name.
    pub model: String,
    /// Rows per second of one executor, as measured.
    pub single_rows_per_s: f64,
    /// What the trials came to.
    pub constants: Constants,
    /// Every way, by executors.
    pub ways: Vec<SimulatedWay>,
    /// Real fleets beside the model.
    pub checks: Vec<CheckedFleet>,
}

/// One way to train.
#[derive(Clone, Debug, Serialize)]
pub struct SimulatedWay {
    /// Executors.
    pub executors: u32,
    /// The strategy and what travels, as a reader names it.
    pub strategy: &'static str,
    /// Rows per second.
    pub rows_per_s: f64,
    /// Over one executor, as modelled.
    pub speed_up: f64,
    /// A step, seconds.
    pub step: Predicted,
}

/// A fleet that was started.
#[derive(Clone, Debug, Serialize)]
pub struct CheckedFleet {
    /// Executors.
    pub executors: u32,
    /// Rows per second by the model.
    pub predicted: f64,
    /// Rows per second, the middle of several trials that took turns with those of the model.
    pub measured: f64,
}

impl CheckedFleet {
    /// How far the model is off, as a fraction of what was measured, with its sign.
    pub fn difference(&self) -> f64 {
        self.predicted / self.measured.max(f64::MIN_POSITIVE) - 1.0
    }
}

/// Rounds of trials, the fleets to check among them, of which the middle ones count: a machine that
/// others use is faster in one second than in the next.
const ROUNDS: usize = 5;

/// Predicts every model of the file, each executor having a replica.
pub async fn simulate(aside: &Aside<'_>, options: &SimulateOptions) -> Result<Simulation, RunError> {
    let models = aside
        .each_model(async |stages, model, features, dataset| {
            simulate_model(stages, options, model, features, dataset).await
        })
        .await?;
    Ok(Simulation { models })
}

async fn simulate_model(
    stages: &mut Stages<'_>,
    options: &SimulateOptions,
    model: &ModelPlan,
    features: &FittedFeatures,
    dataset: &Arc<Dataset>,
) -> Result<SimulatedModel, RunError> {
    let started = stages.start("measure", &model.name, None, "trials");
    let most = stages.plan.run.executors;
    let mut rounds = Vec::new();
    let mut checked = vec![Vec::new(); options.check.len()];
    for _ in 0..ROUNDS {
        rounds.push(stages.trials(model, features, dataset, most).await?);
        for (executors, trials) in options.check.iter().zip(&mut checked) {
            trials.push(stages.trial(model, features, dataset, *executors).await?);
        }
    }
    let nothing = RunError::Protocol { what: "nothing was measured" };
    let trials = Trials::middle(&rounds).ok_or(nothing)?;
    let measured = stages.probe(model, features, dataset, &trials);
    let checks = options.check.iter().zip(checked).filter_map(|(executors, trials)| {
        let way = Way { executors: *executors, sync: SyncStrategy::default(), compression: Compression::None };
        let predicted = measured.rows_per_s(&way);
        Some(CheckedFleet { executors: *executors, predicted, measured: middle(trials)?.rows_per_s() })
    });
    let checks = checks.collect();
    stages.finish("measure", &model.name, started);
    let single_rows_per_s = measured.single.rows_per_s();
    let probe = options.link.map_or(measured.clone(), |link| measured.joined_by(link));
    let alone = probe.rows_per_s(&Way { executors: 1, sync: SyncStrategy::default(), compression: Compression::None });
    let ways = options.executors.iter().flat_map(|executors| {
        strategies().map(|(strategy, sync, compression)| {
            let way = Way { executors: *executors, sync, compression };
            let (rows_per_s, step) = (probe.rows_per_s(&way), probe.predict(&way));
            SimulatedWay { executors: *executors, strategy, rows_per_s, speed_up: rows_per_s / alone, step }
        })
    });
    Ok(SimulatedModel {
        model: model.name.clone(),
        single_rows_per_s,
        constants: probe.constants,
        ways: ways.collect(),
        checks,
    })
}

/// What is compared: the columns of the table.
fn strategies() -> [(&'static str, SyncStrategy, Compression); 6] {
    let server = |mode| SyncStrategy::ParameterServer { servers: 1, mode, staleness: None };
    let local = SyncStrategy::LocalSgd { steps: limits::LOCAL_STEPS, outer_momentum: 0.0, outer_learning_rate: 1.0 };
    [
        ("all_reduce", SyncStrategy::default(), Compression::None),
        ("sharded", SyncStrategy::Sharded {}, Compression::None),
        ("all_reduce, bf16", SyncStrategy::default(), Compression::Bf16),
        ("server, sync", server(ServerMode::Sync), Compression::None),
        ("server, async", server(ServerMode::Async), Compression::None),
        ("local_sgd", local, Compression::None),
    ]
}

impl fmt::Display for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for model in &self.models {
            writeln!(
                f,
                "model {}, rows/s (one executor was measured at {:.0}):\n",
                model.model, model.single_rows_per_s
            )?;
            write!(f, "{:>9}", "executors")?;
            strategies().iter().try_for_each(|(strategy, ..)| write!(f, " {strategy:>16}"))?;
            writeln!(f)?;
            for row in model.ways.chunk_by(|a, b| a.executors == b.executors) {
                write!(f, "{:>9}", row[0].executors)?;
                row.iter().try_for_each(|way| write!(f, " {:>16.0}", way.rows_per_s))?;
                writeln!(f)?;
            }
            if let Some(best) = model.ways.iter().max_by(|a, b| a.rows_per_s.total_cmp(&b.rows_per_s)) {
                let Predicted { compute, wait, communicate, update } = best.step;
                writeln!(
                    f,
                    "\nfastest: {} by {}, {:.1}x one executor; a step is {:.2} ms of computing, {:.2} ms of waiting, \
                     {:.2} ms of exchange",
                    best.executors,
                    best.strategy,
                    best.speed_up,
                    1e3 * (compute + update),
                    1e3 * wait,
                    1e3 * communicate
                )?;
            }
            for check in &model.checks {
                writeln!(
                    f,
                    "{}: {:.0} rows/s predicted, {:.0} measured ({:+.0}%)",
                    way_in_words(&Way {
                        executors: check.executors,
                        sync: SyncStrategy::default(),
                        compression: Compression::None
                    }),
                    check.predicted,
                    check.measured,
                    100.0 * check.difference()
                )?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
