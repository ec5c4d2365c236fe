//! What a file leaves to Emberflow (`auto`): a short trial, a model of what a step costs, and a
//! decision with its reason.

use std::{
    fmt::Write,
    sync::{Arc, atomic::Ordering},
};

use super::{
    RunError,
    cost::{Constants, Measured, Setting, Way},
    stages::Stages,
    training::Training,
};
use crate::{
    data::{self, Dataset, FittedFeatures},
    learn::{NetShape, Trained},
    limits,
    pipeline::{
        ModelPlan,
        spec::{Compression, Launcher, SyncStrategy},
    },
    runs::DecisionRecord,
    telemetry::Event,
};

/// What is this much faster is worth being less exact, or having more executors, for.
const WORTH: f64 = 1.1;

/// Up to so many executors every number is looked at, beyond only powers of two.
const EACH: u32 = 64;

/// What trials measured of a training, and where it is to run.
struct Probe {
    /// One executor.
    single: Measured,
    constants: Constants,
    setting: Setting,
}

impl Probe {
    fn rows_per_s(&self, way: &Way) -> f64 {
        self.constants.rows_per_s(&self.setting, way)
    }
}

impl Stages<'_> {
    /// How a model is to be trained: what the file leaves open is measured and decided, once for all
    /// attempts. The fleet has the right size then.
    pub async fn choose(
        &mut self,
        model: &ModelPlan,
        features: &FittedFeatures,
        dataset: &Arc<Dataset>,
    ) -> Result<ModelPlan, RunError> {
        let mut chosen = model.clone();
        let open = self.plan.run.choose_executors || model.train.choose_sync;
        if !open || (self.plan.run.executors == 1 && !self.plan.run.choose_executors) {
            return Ok(chosen);
        }
        let location = self.work.join(&format!("decision-{}.json", model.name));
        let decision: DecisionRecord = if let Some(decision) = self.written(&location).await? {
            decision
        } else {
            let decision = self.decide(model, features, dataset).await?;
            self.write(&location, &decision).await?;
            decision
        };
        self.events.emit(&Event::Decision {
            model: model.name.clone(),
            executors: decision.executors,
            sync: name(decision.sync).to_owned(),
            compression: compression(decision.compression).to_owned(),
            why: decision.why.clone(),
        });
        chosen.train.sync = decision.sync;
        chosen.train.compression = decision.compression;
        self.fleet.resize(decision.executors);
        self.record.executors = decision.executors;
        self.record.decisions.retain(|other| other.model != decision.model);
        self.record.decisions.push(decision);
        Ok(chosen)
    }

    async fn decide(
        &mut self,
        model: &ModelPlan,
        features: &FittedFeatures,
        dataset: &Arc<Dataset>,
    ) -> Result<DecisionRecord, RunError> {
        let run = &self.plan.run;
        let most = run.executors.min(model.partition.count).max(1);
        let counts = if run.choose_executors { counts(most) } else { vec![run.executors] };
        let started = self.start("measure", &model.name, None, "trials");
        let probe = self.probe(model, features, dataset, most).await?;
        self.finish("measure", &model.name, started);
        let open = if model.train.choose_sync { ways() } else { vec![(model.train.sync, model.train.compression)] };
        // The exact first, then the fewest executors.
        let all = open.iter().flat_map(|(sync, compression)| {
            let way = |executors: &u32| Way { executors: *executors, sync: *sync, compression: *compression };
            counts.iter().map(way)
        });
        let all: Vec<(Way, f64)> = all.map(|way| (way, probe.rows_per_s(&way))).collect();
        let best = all.iter().map(|(_, speed)| *speed).fold(0.0, f64::max);
        let worth = |(_, speed): &&(Way, f64)| speed * WORTH >= best;
        let Some((way, speed)) = all.iter().find(worth).copied() else {
            return Err(RunError::Protocol { what: "nothing to choose from" });
        };
        let single = probe.single.rows_per_s();
        Ok(DecisionRecord {
            model: model.name.clone(),
            executors: way.executors,
            sync: way.sync,
            compression: way.compression,
            rows_per_s: speed,
            single_rows_per_s: single,
            why: why(&probe, &way, &all),
        })
    }

    /// Tries a training out, for a second or so each, on one executor and, where there can be two, on two.
    async fn probe(
        &mut self,
        model: &ModelPlan,
        features: &FittedFeatures,
        dataset: &Arc<Dataset>,
        most: u32,
    ) -> Result<Probe, RunError> {
        let whole = self.trial(model, features, dataset, 1).await?;
        let mut smaller = model.clone();
        smaller.train.batch = model.train.batch.div_ceil(2);
        let half = self.trial(&smaller, features, dataset, 1).await?;
        let pair = if most > 1 { Some(self.trial(model, features, dataset, 2).await?) } else { None };
        let pair = pair.filter(|pair| pair.executors > 1);
        let train = &model.train;
        let setting = Setting {
            batch: train.batch,
            parameters: NetShape::new(model, features).parameters(),
            partitions: data::deal(dataset, &model.partition, train.validation, self.plan.run.seed).weights(),
            cores: std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
            one_host: self.plan.run.launcher != Launcher::Static || self.fleet.hosts() == 1,
        };
        let constants = Constants::new(&whole, &half, pair.as_ref(), &setting);
        Ok(Probe { single: whole, constants, setting })
    }

    /// Trains for a moment, and keeps nothing of it.
    async fn trial(
        &mut self,
        model: &ModelPlan,
        features: &FittedFeatures,
        dataset: &Arc<Dataset>,
        executors: u32,
    ) -> Result<Measured, RunError> {
        let mut plan = model.clone();
        (plan.train.sync, plan.train.compression) = (SyncStrategy::default(), Compression::None);
        (plan.train.checkpoint_steps, plan.train.early_stopping) = (None, None);
        let mut work = self.training_work(&plan, features, dataset)?;
        work.trial = Some(limits::TRIAL);
        self.fleet.resize(executors);
        let trained = self.fleet.train(Training::new(self.storage, work, Arc::clone(dataset))).await?;
        if self.stop.load(Ordering::Relaxed) {
            return Err(RunError::Interrupted);
        }
        Ok(measured(&trained, plan.train.batch))
    }
}

/// What a trial came to: the way of the slowest rank, for whom all others wait.
fn measured(trained: &[Trained], batch: usize) -> Measured {
    let slowest = trained.iter().max_by(|a, b| a.phases.compute_s.total_cmp(&b.phases.compute_s));
    let epoch = trained.first().and_then(|first| first.history.last());
    let (Some(slowest), Some(epoch)) = (slowest, epoch) else { return Measured::default() };
    let steps = epoch.rows.div_ceil(batch as u64).max(1) as f64;
    let phases = slowest.phases;
    Measured {
        executors: trained.len() as u32,
        rows: epoch.rows as f64 / steps,
        step_s: epoch.elapsed_s / steps,
        compute_s: phases.compute_s / steps,
        feed_s: phases.feed_wait_s / steps,
        wait_s: phases.wait_s / steps,
        communicate_s: phases.communicate_s / steps,
        update_s: phases.update_s / steps,
        barrier_s: slowest.barrier_s,
    }
}

/// Numbers of executors to look at.
fn counts(most: u32) -> Vec<u32> {
    let beyond = std::iter::successors(Some(2 * EACH), |count| count.checked_mul(2)).take_while(|count| *count <= most);
    (1..=most.min(EACH)).chain(beyond).collect()
}

/// What `sync: auto` chooses from, the exact first.
fn ways() -> Vec<(SyncStrategy, Compression)> {
    let local = SyncStrategy::LocalSgd { steps: limits::LOCAL_STEPS, outer_momentum: 0.0, outer_learning_rate: 1.0 };
    vec![
        (SyncStrategy::default(), Compression::None),
        (SyncStrategy::Sharded {}, Compression::None),
        (SyncStrategy::default(), Compression::Bf16),
        (local, Compression::None),
        (local, Compression::Bf16),
    ]
}

/// A strategy as a file names it.
fn name(sync: SyncStrategy) -> &'static str {
    match sync {
        SyncStrategy::AllReduce { .. } => "all_reduce",
        SyncStrategy::Sharded {} => "sharded",
        SyncStrategy::ParameterServer { .. } => "parameter_server",
        SyncStrategy::LocalSgd { .. } => "local_sgd",
    }
}

/// A compression as a file names it.
fn compression(compression: Compression) -> &'static str {
    match compression {
        Compression::None => "none",
        Compression::Bf16 => "bf16",
        Compression::TopK(_) => "top_k",
    }
}

fn way_in_words(way: &Way) -> String {
    let executors = if way.executors == 1 { "one executor".to_owned() } else { format!("{} executors", way.executors) };
    match (way.executors, way.compression) {
        (1, _) => executors,
        (_, Compression::None) => format!("{executors} by {}", name(way.sync)),
        (_, wire) => format!("{executors} by {} in {}", name(way.sync), compression(wire)),
    }
}

/// The reason, in one sentence: what was chosen beside the best of the others.
fn why(probe: &Probe, chosen: &Way, all: &[(Way, f64)]) -> String {
    let mut text = format!(
        "{}: {:.0} rows/s expected; one executor alone was measured at {:.0}",
        way_in_words(chosen),
        probe.rows_per_s(chosen),
        probe.single.rows_per_s()
    );
    let others = all.iter().filter(|(way, _)| way.executors != chosen.executors || way.sync != chosen.sync);
    if let Some((other, speed)) = others.max_by(|a, b| a.1.total_cmp(&b.1)) {
        let step = probe.constants.predict(&probe.setting, other);
        let _ = write!(
            text,
            "; next best {}: {speed:.0}, a step being {:.1} ms of computing, {:.1} ms of waiting, {:.1} ms of exchange",
            way_in_words(other),
            1e3 * (step.compute + step.update),
            1e3 * step.wait,
            1e3 * step.communicate
        );
    }
    text
}
