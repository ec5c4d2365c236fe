//! What a file leaves to Emberflow (`auto`): a short trial, a model of what a step costs, and a
//! decision with its reason.

use std::{
    fmt::Write,
    sync::{Arc, atomic::Ordering},
};

use super::{
    Link, RunError,
    cost::{Constants, Measured, Predicted, Setting, Way, share},
    stages::Stages,
    training::Training,
};
use crate::{
    data::{self, Dataset, FittedFeatures},
    learn::{Extent, NetShape, Trained},
    limits,
    pipeline::{
        ModelPlan, PartitionPlan,
        spec::{Compression, Launcher, SyncStrategy},
    },
    runs::{DecisionRecord, EpochRecord, ExpectedSpeed},
    storage::Location,
    telemetry::Event,
};

/// What is this much faster is worth being less exact, or having more executors, for.
const WORTH: f64 = 1.1;

/// The fullest executor has at most so many times its share of the rows, where partitions allow it.
const EVEN: f64 = 1.05;

/// Up to so many executors every number is looked at, beyond only powers of two.
const EACH: u32 = 64;

/// Short trainings that nothing is kept of.
#[derive(Clone)]
pub(super) struct Trials {
    /// One executor.
    whole: Measured,
    /// One executor, steps of half the rows.
    half: Measured,
    /// Two executors, where there can be two.
    pair: Option<Measured>,
}

impl Trials {
    /// The middle of several rounds, each kind of trial for itself.
    pub fn middle(rounds: &[Self]) -> Option<Self> {
        let of = |kind: fn(&Self) -> Option<Measured>| middle(rounds.iter().filter_map(kind).collect());
        Some(Self {
            whole: of(|round| Some(round.whole))?,
            half: of(|round| Some(round.half))?,
            pair: of(|round| round.pair),
        })
    }
}

/// The trial in the middle, by speed.
pub(super) fn middle(mut trials: Vec<Measured>) -> Option<Measured> {
    trials.sort_unstable_by(|a, b| a.rows_per_s().total_cmp(&b.rows_per_s()));
    trials.get(trials.len() / 2).copied()
}

/// What trials say of a training, and where it is to run.
#[derive(Clone)]
pub(super) struct Probe {
    /// One executor.
    pub single: Measured,
    pub constants: Constants,
    setting: Setting,
}

impl Probe {
    /// The same with a host for each executor, joined by another network.
    pub fn joined_by(&self, link: Link) -> Self {
        let constants = Constants { latency_s: link.latency_s, byte_s: 1.0 / link.bytes_per_s, ..self.constants };
        Self { constants, setting: Setting { one_host: false, ..self.setting.clone() }, ..*self }
    }

    /// A step of one way to train.
    pub fn predict(&self, way: &Way) -> Predicted {
        self.constants.predict(&self.setting, way)
    }

    /// Rows per second of one way to train.
    pub fn rows_per_s(&self, way: &Way) -> f64 {
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
        let run = &self.plan.run;
        let open = run.choose_executors || (run.executors > 1 && (model.train.choose_sync || model.partition.choose));
        if !open {
            return Ok(chosen);
        }
        let location = self.decision_file(model);
        let decision: DecisionRecord = if let Some(decision) = self.written(&location).await? {
            decision
        } else {
            let decision = self.decide(model, features, dataset).await?;
            self.write(&location, &decision).await?;
            decision
        };
        chosen.train.sync = decision.sync;
        chosen.train.compression = decision.compression;
        chosen.partition.count = decision.partitions;
        self.follow(decision);
        Ok(chosen)
    }

    /// Looks at the decision again at the end of an epoch, with so many rows to come. What changes is
    /// how many executors there are, for that does not change what is computed.
    pub async fn reconsider(&mut self, model: &ModelPlan, last: &EpochRecord, left: f64) -> Result<(), RunError> {
        let decided = self.record.decisions.iter().find(|decision| decision.model == model.name);
        let measured = last.rows as f64 / last.elapsed_s.max(f64::MIN_POSITIVE);
        let Some(better) = decided.and_then(|decision| correct(decision, measured, left)) else { return Ok(()) };
        self.write(&self.decision_file(model), &better).await?;
        self.follow(better);
        Ok(())
    }

    /// Whether a later epoch may show that there are too many executors.
    pub fn may_reconsider(&self, model: &ModelPlan) -> bool {
        let decided = self.record.decisions.iter().find(|decision| decision.model == model.name);
        self.plan.run.choose_executors && decided.is_some_and(|decision| decision.executors > 1)
    }

    fn decision_file(&self, model: &ModelPlan) -> Location {
        self.work.join(&format!("decision-{}.json", model.name))
    }

    /// Makes a decision that of the fleet and of the record.
    fn follow(&mut self, decision: DecisionRecord) {
        self.events.emit(&Event::Decision {
            model: decision.model.clone(),
            executors: decision.executors,
            sync: name(decision.sync).to_owned(),
            compression: compression(decision.compression).to_owned(),
            why: decision.why.clone(),
        });
        self.fleet.resize(decision.executors);
        self.record.executors = decision.executors;
        self.record.decisions.retain(|other| other.model != decision.model);
        self.record.decisions.push(decision);
    }

    async fn decide(
        &mut self,
        model: &ModelPlan,
        features: &FittedFeatures,
        dataset: &Arc<Dataset>,
    ) -> Result<DecisionRecord, RunError> {
        let run = &self.plan.run;
        let most = if model.partition.choose { limits::MAX_PARTITIONS } else { model.partition.count };
        let most = run.executors.min(most).max(1);
        let counts = if run.choose_executors { counts(most) } else { vec![run.executors] };
        let started = self.start("measure", &model.name, None, "trials");
        let mut dealt = model.clone();
        if model.partition.choose {
            dealt.partition.count = self.partitions(model, dataset, &counts);
        }
        let trials = self.trials(&dealt, features, dataset, most).await?;
        let probe = self.probe(&dealt, features, dataset, &trials);
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
        let alike = all.iter().filter(|(other, _)| other.sync == way.sync && other.compression == way.compression);
        let expected = |(way, speed): &(Way, f64)| ExpectedSpeed { executors: way.executors, rows_per_s: *speed };
        Ok(DecisionRecord {
            model: model.name.clone(),
            executors: way.executors,
            sync: way.sync,
            compression: way.compression,
            partitions: dealt.partition.count,
            speeds: alike.map(expected).collect(),
            rows_per_s: speed,
            single_rows_per_s: probe.single.rows_per_s(),
            why: why(&probe, &way, &all),
        })
    }

    /// The fewest partitions that executors share evenly, however many of these numbers they are.
    fn partitions(&self, model: &ModelPlan, dataset: &Dataset, executors: &[u32]) -> u32 {
        let least = executors.iter().copied().max().unwrap_or(1).max(limits::PARTITIONS);
        let doubled = std::iter::successors(Some(least), |count| count.checked_mul(2));
        let load = |count: u32| {
            let plan = PartitionPlan { count, ..model.partition.clone() };
            let weights = data::deal(dataset, &plan, model.train.validation, self.plan.run.seed).weights();
            let loads = executors.iter().map(|executors| share(&weights, *executors) * f64::from(*executors));
            loads.fold(1.0, f64::max)
        };
        let tried = doubled.take_while(|count| *count <= limits::MAX_PARTITIONS.min(least * 64));
        let loads: Vec<(u32, f64)> = tried.map(|count| (count, load(count))).collect();
        let even = loads.iter().find(|(_, load)| *load <= EVEN);
        let best = loads.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        even.or(best).map_or(least, |(count, _)| *count)
    }

    /// What is measured before a decision, a second or so each.
    pub async fn trials(
        &mut self,
        model: &ModelPlan,
        features: &FittedFeatures,
        dataset: &Arc<Dataset>,
        most: u32,
    ) -> Result<Trials, RunError> {
        let whole = self.trial(model, features, dataset, 1).await?;
        let mut smaller = model.clone();
        smaller.train.batch = model.train.batch.div_ceil(2);
        let half = self.trial(&smaller, features, dataset, 1).await?;
        let pair = if most > 1 { Some(self.trial(model, features, dataset, 2).await?) } else { None };
        Ok(Trials { whole, half, pair: pair.filter(|pair| pair.executors > 1) })
    }

    /// What trials say of a training.
    pub fn probe(&self, model: &ModelPlan, features: &FittedFeatures, dataset: &Dataset, trials: &Trials) -> Probe {
        let train = &model.train;
        let setting = Setting {
            batch: train.batch,
            parameters: NetShape::new(model, features).parameters(),
            moments: train.optimizer.moments(),
            partitions: data::deal(dataset, &model.partition, train.validation, self.plan.run.seed).weights(),
            cores: std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
            one_host: self.plan.run.launcher != Launcher::Static || self.fleet.hosts() == 1,
        };
        let constants = Constants::new(&trials.whole, &trials.half, trials.pair.as_ref(), &setting);
        Probe { single: trials.whole, constants, setting }
    }

    /// Trains for a moment, and keeps nothing of it.
    pub async fn trial(
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
        work.extent = Extent::Trial(limits::TRIAL);
        self.fleet.resize(executors);
        let trained = self.fleet.train(Training::new(self.storage, work, Arc::clone(dataset))).await?;
        if self.stop.load(Ordering::Relaxed) {
            return Err(RunError::Interrupted);
        }
        Ok(measured(&trained, plan.train.batch))
    }
}

/// A better decision for so many rows to come, where an epoch's speed shows that the model was off:
/// the fleets of several executors are as far off as this one, one executor was measured alone.
fn correct(decision: &DecisionRecord, measured: f64, left: f64) -> Option<DecisionRecord> {
    let off = measured / decision.rows_per_s.max(f64::MIN_POSITIVE);
    let corrected = decision.speeds.iter().map(|expected| match expected.executors {
        1 => *expected,
        _ => ExpectedSpeed { rows_per_s: expected.rows_per_s * off, ..*expected },
    });
    let speeds: Vec<ExpectedSpeed> = corrected.collect();
    let best = speeds.iter().map(|expected| expected.rows_per_s).fold(0.0, f64::max);
    let better = speeds.iter().find(|expected| expected.rows_per_s * WORTH >= best)?;
    let saved_s = left / measured.max(f64::MIN_POSITIVE) - left / better.rows_per_s.max(f64::MIN_POSITIVE);
    if better.executors == decision.executors
        || better.rows_per_s < measured * WORTH
        || saved_s < limits::REBALANCING.as_secs_f64()
    {
        return None;
    }
    let way = Way { executors: better.executors, sync: decision.sync, compression: decision.compression };
    let before = Way { executors: decision.executors, ..way };
    let why = format!(
        "{}: {:.0} rows/s expected; {} were measured at {measured:.0}, not {:.0}",
        way_in_words(&way),
        better.rows_per_s,
        way_in_words(&before),
        decision.rows_per_s
    );
    let (executors, rows_per_s) = (better.executors, better.rows_per_s);
    Some(DecisionRecord { executors, speeds, rows_per_s, why, ..decision.clone() })
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

pub(super) fn way_in_words(way: &Way) -> String {
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
    // However one executor keeps its model in common, it is the same.
    let alike = |way: &Way| way.executors == chosen.executors && (way.executors == 1 || way.sync == chosen.sync);
    let others = all.iter().filter(|(way, _)| !alike(way));
    if let Some((other, speed)) = others.max_by(|a, b| a.1.total_cmp(&b.1)) {
        let step = probe.predict(other);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn decision() -> DecisionRecord {
        let speeds = [(1, 100.0), (2, 190.0), (4, 350.0)];
        let expected = |(executors, rows_per_s)| ExpectedSpeed { executors, rows_per_s };
        DecisionRecord {
            model: "m".to_owned(),
            executors: 4,
            sync: SyncStrategy::default(),
            compression: Compression::None,
            partitions: 8,
            speeds: speeds.into_iter().map(expected).collect(),
            rows_per_s: 350.0,
            single_rows_per_s: 100.0,
            why: String::new(),
        }
    }

    #[test]
    fn a_fleet_that_is_slower_than_expected_makes_room() {
        assert!(correct(&decision(), 340.0, 1e6).is_none(), "as expected");
        assert!(correct(&decision(), 150.0, 1e6).is_none(), "slower, but nothing else is faster");
        assert!(correct(&decision(), 50.0, 20.0).is_none(), "too few rows are left");
        let better = correct(&decision(), 50.0, 1e6).unwrap();
        assert_eq!((better.executors, better.rows_per_s), (1, 100.0));
        assert!(better.why.contains("4 executors by all_reduce were measured at 50, not 350"), "{}", better.why);
        assert!(correct(&better, 20.0, 1e6).is_none(), "one executor is what there is");
    }
}
