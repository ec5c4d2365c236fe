//! The training loop of one rank.
//!
//! Every rank runs the same loop over the same number of steps and holds the same parameters;
//! only its rows differ. Whatever changes the course of the loop (an update, the end, a stop)
//! follows from numbers that all ranks have exchanged, so they never part.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    Checkpoint, Communicator, LearnError, Step,
    blame::blame,
    optimizer,
    sync::{self, Account},
};
use crate::{
    data::{Batch, EpochFeed, Feed, StepPlan},
    ids::Rank,
    pipeline::{
        TrainPlan,
        spec::{EarlyStopping, Keep, Loss},
    },
    runs::EpochRecord,
};

/// Between two calls of `Observer::progress`: often enough for the eye.
const PROGRESS: Duration = Duration::from_millis(200);

/// How far a scaled feature may lie beyond its range by rounding.
const ROUNDING: f32 = 1e-6;

/// What a rank trains; the same on every rank but for `feed`, `step` and `comm`.
pub struct TrainJob<'a> {
    /// The training.
    pub plan: &'a TrainPlan,
    /// Steps of an epoch, over all ranks.
    pub steps: StepPlan,
    /// Whether rows are held out (on any rank).
    pub held_out_rows: u64,
    /// Names of the features, to name those to blame.
    pub feature_names: Vec<String>,
    /// Ties a checkpoint to what it belongs to.
    pub identity: String,
    /// Where to go on.
    pub resume: Option<Checkpoint>,
}

/// How the outside speaks to all ranks of this process.
#[derive(Debug, Default)]
pub struct Control {
    /// Set: make a checkpoint after the current step and stop. Ranks vote on it, so all stop
    /// at the same step even if they see it at different times.
    pub stop: Arc<AtomicBool>,
}

/// What rank 0 tells while it trains; calls block the loop.
pub trait Observer: Send {
    /// Epochs finished so far, and steps of the running one; called at most every few hundred
    /// milliseconds.
    fn progress(&mut self, epoch: u32, step: u64);
    /// An epoch ended.
    fn epoch(&mut self, record: &EpochRecord);
    /// Keep this checkpoint.
    fn checkpoint(&mut self, checkpoint: &Checkpoint) -> Result<(), LearnError>;
}

/// Where a rank's time went, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Phases {
    /// Waiting for the feed.
    pub feed_wait_s: f64,
    /// Forward and backward.
    pub compute_s: f64,
    /// Exchanging gradients, waiting for other ranks included.
    pub communicate_s: f64,
    /// Updating parameters.
    pub update_s: f64,
}

/// What came of it; the parameters are the same on every rank.
#[derive(Clone, Debug)]
pub struct Trained {
    /// The parameters kept.
    pub parameters: Vec<f32>,
    /// One entry per epoch.
    pub history: Vec<EpochRecord>,
    /// Rows this rank trained on in each epoch of this attempt.
    pub rows_per_epoch: Vec<u64>,
    /// Rows this rank measured the held-out loss on, in one epoch.
    pub held_out_rows: u64,
    /// Where the time went.
    pub phases: Phases,
}

/// Trains on the calling thread until done, stopped (`LearnError::Interrupted`, after a
/// checkpoint) or failed. `observer` is given on rank 0 only.
pub fn train_rank(
    job: &TrainJob<'_>,
    control: &Control,
    feed: &Feed,
    step: &mut dyn Step,
    comm: &mut dyn Communicator,
    observer: Option<&mut dyn Observer>,
) -> Result<Trained, LearnError> {
    if job.steps.steps() == 0 {
        return Err(LearnError::NoRows { held_out: job.held_out_rows });
    }
    let state = starting_state(job, step);
    step.write_parameters(&state.parameters);
    let mut trainer = Trainer {
        job,
        control,
        feed,
        gradients: vec![0.0; step.parameters()],
        step,
        comm,
        observer,
        state,
        rows_per_epoch: Vec::new(),
        held_out_rows: 0,
        phases: Phases::default(),
        told: Instant::now(),
    };
    while !trainer.is_done() {
        trainer.train_epoch()?;
        trainer.end_epoch()?;
    }
    Ok(trainer.finish())
}

/// The checkpoint, if there is one that fits, else the beginning.
fn starting_state(job: &TrainJob<'_>, step: &dyn Step) -> Checkpoint {
    let mut parameters = vec![0.0; step.parameters()];
    let moments = optimizer::initial_moments(job.plan.optimizer, parameters.len());
    let fits = |checkpoint: &&Checkpoint| {
        checkpoint.identity == job.identity
            && checkpoint.parameters.len() == parameters.len()
            && checkpoint.moments.iter().map(Vec::len).eq(moments.iter().map(Vec::len))
    };
    if let Some(checkpoint) = job.resume.as_ref().filter(fits) {
        return checkpoint.clone();
    }
    step.read_parameters(&mut parameters);
    Checkpoint { identity: job.identity.clone(), parameters, moments, ..Checkpoint::default() }
}

/// A rank at work. `state` is all that the future depends on: a checkpoint is a copy of it.
struct Trainer<'a, 'o> {
    job: &'a TrainJob<'a>,
    control: &'a Control,
    feed: &'a Feed,
    step: &'a mut dyn Step,
    comm: &'a mut dyn Communicator,
    observer: Option<&'a mut (dyn Observer + 'o)>,
    state: Checkpoint,
    gradients: Vec<f32>,
    rows_per_epoch: Vec<u64>,
    held_out_rows: u64,
    phases: Phases,
    /// When progress was last told.
    told: Instant,
}

impl Trainer<'_, '_> {
    fn is_done(&self) -> bool {
        let stale = self.state.stale_epochs;
        let gave_up = |stopping: EarlyStopping| stale > 0 && stale >= stopping.patience;
        self.state.epoch >= self.job.plan.epochs || self.job.plan.early_stopping.is_some_and(gave_up)
    }

    /// The rest of the running epoch's steps.
    fn train_epoch(&mut self) -> Result<(), LearnError> {
        let mut batches = self.feed.epoch(self.state.epoch, self.state.step);
        self.rows_per_epoch.push(0);
        let mut started = Instant::now();
        while self.state.step < self.job.steps.steps() {
            let batch = next_batch(&mut batches, &mut self.phases)?.unwrap_or(Batch { x: Vec::new(), rows: 0 });
            let stop = self.train_step(&batch)?;
            if let Some(rows) = self.rows_per_epoch.last_mut() {
                *rows += batch.rows as u64;
            }
            batches.recycle(batch);
            self.state.epoch_elapsed_s += seconds_since(mem::replace(&mut started, Instant::now()));
            if stop {
                self.checkpoint()?;
                return Err(LearnError::Interrupted);
            }
            let every = self.job.plan.checkpoint_steps;
            if every.is_some_and(|every| every > 0 && self.state.updates.is_multiple_of(every)) {
                self.checkpoint()?;
            }
            self.tell_progress();
        }
        Ok(())
    }

    /// One update; true if a rank wants to stop.
    fn train_step(&mut self, batch: &Batch) -> Result<bool, LearnError> {
        let started = Instant::now();
        self.check_range(&batch.x)?;
        let loss = self.step.gradients(&batch.x, batch.rows, &mut self.gradients)?;
        let finite = loss.is_finite() && sync::all_finite(&self.gradients);
        let stop = self.control.stop.load(Ordering::Relaxed);
        let computed = Instant::now();
        self.phases.compute_s += (computed - started).as_secs_f64();

        let account = Account { loss, rows: batch.rows as u64, stop, finite };
        let total = sync::add_accounts(self.comm, &account)?;
        if let Some(rank) = total.not_finite {
            return Err(self.not_finite(rank, || blame(&self.job.feature_names, &batch.x)));
        }
        let expected = self.job.steps.rows(self.state.step);
        if total.rows != expected {
            let (epoch, step) = (self.state.epoch + 1, self.state.step + 1);
            return Err(LearnError::Rows { epoch, step, got: total.rows, expected });
        }
        if !sync::average_gradients(self.comm, &mut self.gradients, total.rows, self.job.plan.clip_norm)? {
            return Err(self.not_finite(Rank(0), || blame(&self.job.feature_names, &batch.x)));
        }
        let exchanged = Instant::now();
        self.phases.communicate_s += (exchanged - computed).as_secs_f64();

        let state = &mut self.state;
        let learning_rate = optimizer::learning_rate(self.job.plan, state.updates, self.job.steps.steps());
        let (parameters, moments) = (&mut state.parameters, &mut state.moments);
        optimizer::update(self.job.plan, learning_rate, state.updates, parameters, &self.gradients, moments);
        self.step.write_parameters(parameters);
        state.step += 1;
        state.updates += 1;
        state.epoch_loss += total.loss;
        state.epoch_rows += total.rows;
        self.phases.update_s += seconds_since(exchanged);
        Ok(total.stop)
    }

    /// Cross-entropy has no least value beyond 0..1; training would run away without an error.
    fn check_range(&self, x: &[f32]) -> Result<(), LearnError> {
        // NaN is told elsewhere; scaling may round a little beyond.
        let beyond = |number: &f32| *number < -ROUNDING || *number > 1.0 + ROUNDING;
        if self.job.plan.loss != Loss::BinaryCrossEntropy || !x.iter().fold(false, |any, number| any | beyond(number)) {
            return Ok(());
        }
        let names = &self.job.feature_names;
        let at = x.iter().position(beyond).unwrap_or_default();
        let feature = names.get(at % names.len().max(1)).cloned().unwrap_or_default();
        Err(LearnError::BeyondCrossEntropy { feature, value: x[at] })
    }

    /// Measures, records and judges the epoch, and makes the next one the running one.
    fn end_epoch(&mut self) -> Result<(), LearnError> {
        let started = Instant::now();
        if !sync::all_finite(&self.state.parameters) {
            let blame = || "the last update overflowed; lower the learning rate".to_owned();
            return Err(self.not_finite(Rank(0), blame));
        }
        let held_out_loss = if self.job.held_out_rows > 0 { Some(self.held_out_loss()?) } else { None };

        let state = &mut self.state;
        let last_update = state.updates.saturating_sub(1);
        let record = EpochRecord {
            epoch: state.epoch + 1,
            loss: state.epoch_loss / state.epoch_rows.max(1) as f64,
            held_out_loss,
            learning_rate: optimizer::learning_rate(self.job.plan, last_update, self.job.steps.steps()),
            rows: state.epoch_rows,
            elapsed_s: state.epoch_elapsed_s + seconds_since(started),
        };
        judge(state, self.job.plan, held_out_loss.unwrap_or(record.loss));
        state.epoch += 1;
        state.step = 0;
        (state.epoch_loss, state.epoch_rows, state.epoch_elapsed_s) = (0.0, 0, 0.0);
        if let Some(observer) = &mut self.observer {
            observer.epoch(&record);
        }
        self.state.history.push(record);
        self.checkpoint()
    }

    /// The mean loss over all ranks' held-out rows.
    fn held_out_loss(&mut self) -> Result<f64, LearnError> {
        let mut batches = self.feed.held_out();
        let mut account = Account { finite: true, ..Account::default() };
        let mut to_blame = String::new();
        while let Some(batch) = next_batch(&mut batches, &mut self.phases)? {
            let started = Instant::now();
            self.check_range(&batch.x)?;
            let loss = self.step.loss(&batch.x, batch.rows)?;
            self.phases.compute_s += seconds_since(started);
            if account.finite && !loss.is_finite() {
                account.finite = false;
                to_blame = format!("in held-out rows, {}", blame(&self.job.feature_names, &batch.x));
            }
            account.loss += loss;
            account.rows += batch.rows as u64;
            batches.recycle(batch);
        }
        self.held_out_rows = account.rows;
        let started = Instant::now();
        let total = sync::add_accounts(self.comm, &account)?;
        self.phases.communicate_s += seconds_since(started);
        match total.not_finite {
            Some(rank) => Err(self.not_finite(rank, || to_blame)),
            None => Ok(total.loss / total.rows.max(1) as f64),
        }
    }

    /// The same error on every rank, but for the blame, which only `rank` can tell.
    fn not_finite(&self, rank: Rank, blame: impl FnOnce() -> String) -> LearnError {
        let blame = if rank == self.comm.rank() { blame() } else { String::new() };
        // At the end of an epoch, the step before.
        let step = (self.state.step + 1).min(self.job.steps.steps());
        LearnError::NotFinite { rank, epoch: self.state.epoch + 1, step, blame }
    }

    fn checkpoint(&mut self) -> Result<(), LearnError> {
        match &mut self.observer {
            Some(observer) => observer.checkpoint(&self.state),
            None => Ok(()),
        }
    }

    fn tell_progress(&mut self) {
        if let Some(observer) = &mut self.observer
            && self.told.elapsed() >= PROGRESS
        {
            observer.progress(self.state.epoch, self.state.step);
            self.told = Instant::now();
        }
    }

    fn finish(self) -> Trained {
        let Checkpoint { parameters, best, history, .. } = self.state;
        let best = best.map(|(_, parameters)| parameters).filter(|_| self.job.plan.keep == Keep::Best);
        Trained {
            parameters: best.unwrap_or(parameters),
            history,
            rows_per_epoch: self.rows_per_epoch,
            held_out_rows: self.held_out_rows,
            phases: self.phases,
        }
    }
}

/// Takes an epoch's loss into account: whether it is the best one, and whether it fell.
fn judge(state: &mut Checkpoint, plan: &TrainPlan, loss: f64) {
    let is_best = state.best.as_ref().is_none_or(|(best, _)| loss < *best);
    if plan.keep == Keep::Best && is_best {
        state.best = Some((loss, state.parameters.clone()));
    }
    if let Some(stopping) = plan.early_stopping {
        if state.reference_loss.is_none_or(|reference| loss < reference - stopping.min_delta) {
            state.reference_loss = Some(loss);
            state.stale_epochs = 0;
        } else {
            state.stale_epochs += 1;
        }
    }
}

fn next_batch(batches: &mut EpochFeed, phases: &mut Phases) -> Result<Option<Batch>, LearnError> {
    let started = Instant::now();
    let batch = batches.next_batch()?;
    phases.feed_wait_s += seconds_since(started);
    Ok(batch)
}

fn seconds_since(started: Instant) -> f64 {
    started.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{learn::optimizer::tests::plan, pipeline::Optimizer};

    #[test]
    fn the_best_epoch_is_kept_and_staleness_counted() {
        let check = |min_delta: f64, losses: &[f64], best: f64, stale: &[u32]| {
            let early_stopping = Some(EarlyStopping { patience: 2, min_delta });
            let plan = TrainPlan { keep: Keep::Best, early_stopping, ..plan(Optimizer::Sgd { momentum: 0.0 }) };
            let mut state = Checkpoint::default();
            let mut found = Vec::new();
            for (epoch, loss) in losses.iter().enumerate() {
                state.parameters = vec![epoch as f32];
                judge(&mut state, &plan, *loss);
                found.push(state.stale_epochs);
            }
            assert_eq!(found, stale);
            let (loss, parameters) = state.best.unwrap();
            assert_eq!(loss, best);
            assert_eq!(losses[parameters[0] as usize], best);
        };
        check(0.0, &[3.0, 2.0, 2.0, 2.5, 1.0], 1.0, &[0, 0, 1, 2, 0]);
        // Better by less than `min_delta` is still the best, but does not count as progress.
        check(0.5, &[3.0, 2.9, 2.7, 2.4, 2.5], 2.4, &[0, 1, 2, 0, 1]);
    }
}
