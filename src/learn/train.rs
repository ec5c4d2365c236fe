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

use serde::{Deserialize, Serialize};

use super::{
    Checkpoint, Communicator, LearnError, Parts, Step,
    blame::blame,
    optimizer,
    sync::{self, Account, At, Staleness, Strategy, Taken, Votes},
};
use crate::{
    data::{self, Batch, EpochFeed, Feed, StepPlan},
    ids::{self, Rank},
    pipeline::{
        TrainPlan,
        spec::{EarlyStopping, Keep, Loss},
    },
    runs::EpochRecord,
};

/// Between two calls of `Observer::progress`: often enough for the eye.
const PROGRESS: Duration = Duration::from_millis(200);

/// Steps of a trial that are not counted: caches fill, and kernels are compiled.
const WARM_UP: u64 = 3;

/// Barriers that a trial measures.
const BARRIERS: u32 = 16;

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
    /// The rank whose state all go on with.
    pub source: Rank,
    /// Which numbers each rank updates, where the model is spread; none where each has a replica.
    pub parts: Option<Parts>,
    /// How far to train.
    pub extent: Extent,
}

/// How far a training goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Extent {
    /// To the end.
    #[default]
    Whole,
    /// Until so many epochs are behind; the same training goes on from there.
    Epochs(u32),
    /// For so long, within the first epoch, to measure how fast it is; nothing is kept.
    Trial(Duration),
}

impl Extent {
    /// For how long, of a trial.
    pub fn trial(self) -> Option<Duration> {
        if let Self::Trial(duration) = self { Some(duration) } else { None }
    }
}

impl TrainJob<'_> {
    /// How many of a batch's rows count as this rank's: the ranks of a model that is spread all see
    /// the same rows.
    fn counted(&self, batch: &Batch, rank: Rank) -> u64 {
        if self.parts.is_none() || rank == Rank(0) { batch.rows as u64 } else { 0 }
    }
}

/// How the outside speaks to all ranks of this process.
#[derive(Debug, Default)]
pub struct Control {
    /// Set: make a checkpoint after the current step and stop. Ranks vote on it, so all stop
    /// at the same step even if they see it at different times.
    pub stop: Arc<AtomicBool>,
    /// Set: leave after the current step, by a vote too, so that the fleet can form anew.
    pub regroup: Arc<AtomicBool>,
}

impl Control {
    /// What this rank wants now.
    pub(super) fn votes(&self) -> Votes {
        Votes { stop: self.stop.load(Ordering::Relaxed), regroup: self.regroup.load(Ordering::Relaxed) }
    }
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Phases {
    /// Waiting for the feed.
    pub feed_wait_s: f64,
    /// Forward and backward.
    pub compute_s: f64,
    /// Waiting for slower ranks.
    pub wait_s: f64,
    /// Exchanging gradients or parameters.
    pub communicate_s: f64,
    /// Updating parameters.
    pub update_s: f64,
}

/// What came of it; the parameters are the same on every rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
    /// Bytes that this rank put on the wire.
    pub bytes_sent: u64,
    /// Processor seconds of an executor process; those of threads count to their process.
    pub cpu_s: f64,
    /// The most memory that an executor process has held, bytes.
    pub peak_memory_bytes: u64,
    /// How old parameters were, as a parameter server measured it that does not move in step.
    pub staleness: Option<Staleness>,
    /// What a barrier took, seconds; measured by trials only.
    pub barrier_s: f64,
}

impl Trained {
    /// Takes in what the same rank did before, in an earlier part of the same training.
    pub fn after(&mut self, before: &Self) {
        self.rows_per_epoch.splice(0..0, before.rows_per_epoch.iter().copied());
        self.phases.add(&before.phases);
        self.bytes_sent += before.bytes_sent;
        if let (Some(staleness), Some(before)) = (&mut self.staleness, &before.staleness) {
            staleness.add(before);
        }
    }
}

impl Phases {
    fn add(&mut self, other: &Self) {
        self.feed_wait_s += other.feed_wait_s;
        self.compute_s += other.compute_s;
        self.wait_s += other.wait_s;
        self.communicate_s += other.communicate_s;
        self.update_s += other.update_s;
    }
}

/// Trains on the calling thread until done, stopped (`LearnError::Interrupted`, after a
/// checkpoint), told to regroup (`LearnError::Regroup`) or failed. `state` is where this rank is,
/// an empty one at the beginning; that of `job.source` counts. However the training ends, the
/// state is then one between two steps. `observer` is given on rank 0 only.
pub fn train_rank(
    job: &TrainJob<'_>,
    control: &Control,
    feed: &Feed,
    step: &mut dyn Step,
    comm: &mut dyn Communicator,
    observer: Option<&mut dyn Observer>,
    state: &mut Checkpoint,
) -> Result<Trained, LearnError> {
    if job.steps.steps() == 0 {
        return Err(LearnError::NoRows { held_out: job.held_out_rows });
    }
    begin(job, step, state);
    state.share(comm, job.source)?;
    step.write_parameters(&state.parameters);
    let strategy = sync::strategy(job.plan, job.parts.as_ref(), comm, state);
    let servers = sync::servers(job.plan);
    // The ranks of a model that is spread all see all rows.
    let workers = if job.parts.is_some() { 1 } else { comm.world_size().saturating_sub(servers).max(1) };
    let owners = feed.partitions().owners(workers);
    let mut trainer = Trainer {
        job,
        control,
        feed: feed.clone(),
        owners,
        workers: workers as usize,
        s_per_row: vec![0.0; workers as usize],
        compute_s_before: 0.0,
        gradients: vec![0.0; step.parameters()],
        step,
        comm,
        observer,
        strategy,
        state,
        blame: String::new(),
        rows_per_epoch: Vec::new(),
        held_out_rows: 0,
        phases: Phases::default(),
        told: Instant::now(),
        began: Instant::now(),
    };
    if job.extent.trial().is_some() {
        return trainer.try_out();
    }
    if trainer.is_done() {
        // Whoever wrote the last checkpoint may have ended before it could.
        trainer.checkpoint()?;
    }
    while !trainer.is_done() {
        trainer.train_epoch()?;
        trainer.end_epoch()?;
        trainer.rebalance()?;
    }
    trainer.finish()
}

/// Makes a state that does not fit the job the one to begin with.
fn begin(job: &TrainJob<'_>, step: &dyn Step, state: &mut Checkpoint) {
    let mut parameters = vec![0.0; step.parameters()];
    let moments = sync::initial_moments(job.plan, parameters.len());
    let fits = state.identity == job.identity
        && state.parameters.len() == parameters.len()
        && state.moments.iter().map(Vec::len).eq(moments.iter().map(Vec::len));
    if !fits {
        step.read_parameters(&mut parameters);
        *state = Checkpoint { identity: job.identity.clone(), parameters, moments, ..Checkpoint::default() };
    }
}

/// A rank at work. `state` is all that the future depends on: a checkpoint is a copy of it, made
/// whole by the strategy.
struct Trainer<'a, 'o> {
    job: &'a TrainJob<'a>,
    control: &'a Control,
    feed: Feed,
    /// The rank that owns each partition.
    owners: Vec<usize>,
    /// Ranks that own partitions: the first so many.
    workers: usize,
    /// What a row took each worker; 0 before it is known.
    s_per_row: Vec<f64>,
    /// What this rank had computed when the running epoch began.
    compute_s_before: f64,
    step: &'a mut dyn Step,
    comm: &'a mut dyn Communicator,
    observer: Option<&'a mut (dyn Observer + 'o)>,
    strategy: Box<dyn Strategy>,
    state: &'a mut Checkpoint,
    gradients: Vec<f32>,
    /// What to look at for the number that was not finite on this rank.
    blame: String,
    rows_per_epoch: Vec<u64>,
    held_out_rows: u64,
    phases: Phases,
    /// When progress was last told.
    told: Instant,
    /// When the training, or the counted part of a trial, began.
    began: Instant,
}

impl Trainer<'_, '_> {
    fn is_done(&self) -> bool {
        let stale = self.state.stale_epochs;
        let gave_up = |stopping: EarlyStopping| stale > 0 && stale >= stopping.patience;
        let until = if let Extent::Epochs(until) = self.job.extent { until } else { self.job.plan.epochs };
        self.state.epoch >= until.min(self.job.plan.epochs) || self.job.plan.early_stopping.is_some_and(gave_up)
    }

    /// Measures steps for a while; the account's only epoch tells how many rows they had.
    fn try_out(mut self) -> Result<Trained, LearnError> {
        self.train_epoch()?;
        let (rows, elapsed_s) = (self.state.epoch_rows, self.state.epoch_elapsed_s);
        let started = Instant::now();
        for _ in 0..BARRIERS {
            self.comm.barrier()?;
        }
        let barrier_s = seconds_since(started) / f64::from(BARRIERS);
        self.state.history.push(EpochRecord { epoch: 1, rows, elapsed_s, ..EpochRecord::default() });
        Ok(Trained { barrier_s, ..self.finish()? })
    }

    /// Whether a trial's first steps are not counted: rows are read and decoded meanwhile.
    fn warms_up(&self) -> bool {
        self.job.steps.steps() > 2 * WARM_UP
    }

    /// Forgets what a trial measured so far, once it has warmed up.
    fn warm_up(&mut self) {
        if self.job.extent.trial().is_some() && self.state.step == WARM_UP && self.warms_up() {
            self.phases = Phases::default();
            self.rows_per_epoch = vec![0];
            (self.state.epoch_rows, self.state.epoch_elapsed_s) = (0, 0.0);
            self.began = Instant::now();
        }
    }

    /// The rest of the running epoch's steps.
    fn train_epoch(&mut self) -> Result<(), LearnError> {
        let mut batches = self.feed.epoch(self.state.epoch, self.state.step);
        self.rows_per_epoch.push(0);
        let mut started = Instant::now();
        let mut step = self.state.step;
        while step < self.job.steps.steps() {
            let batch = next_batch(&mut batches, &mut self.phases)?.unwrap_or(Batch { x: Vec::new(), rows: 0 });
            let before = self.place();
            let (taken, last) = self.train_step(step, &batch)?;
            if let Some(rows) = self.rows_per_epoch.last_mut() {
                *rows += self.job.counted(&batch, self.comm.rank());
            }
            batches.recycle(batch);
            self.state.epoch_elapsed_s += seconds_since(mem::replace(&mut started, Instant::now()));
            match taken {
                Taken::Alone => {}
                Taken::Updated(votes) if votes.stop && self.job.extent.trial().is_some() => return Ok(()),
                Taken::Updated(votes) => self.after_update(before, votes)?,
                Taken::NotFinite(rank) => return Err(self.not_finite(rank, last + 1)),
            }
            self.tell_progress(last);
            self.warm_up();
            step = last + 1;
        }
        Ok(())
    }

    /// Steps behind the state, over all epochs.
    fn place(&self) -> u64 {
        u64::from(self.state.epoch) * self.job.steps.steps() + self.state.step
    }

    /// Honours votes, and makes a checkpoint where one is due; so many steps were behind the state
    /// before.
    fn after_update(&mut self, before: u64, votes: Votes) -> Result<(), LearnError> {
        if votes.stop {
            self.checkpoint()?;
            return Err(LearnError::Interrupted);
        }
        if votes.regroup {
            self.strategy.settle(self.comm, self.state)?;
            return Err(LearnError::Regroup);
        }
        let due = |every: u64| every > 0 && self.place() / every > before / every;
        if self.job.plan.checkpoint_steps.is_some_and(due) { self.checkpoint() } else { Ok(()) }
    }

    /// A step, or what a server does until all meet; gives the last step (from 0) that is then behind.
    fn train_step(&mut self, step: u64, batch: &Batch) -> Result<(Taken, u64), LearnError> {
        let started = Instant::now();
        self.check_range(&batch.x)?;
        self.comm.at_step(ids::Step(u64::from(self.state.epoch) * self.job.steps.steps() + step));
        let loss = self.step.gradients(&batch.x, batch.rows, &mut self.gradients)?;
        let finite = loss.is_finite() && sync::all_finite(&self.gradients);
        if !finite && self.blame.is_empty() {
            self.blame = blame(&self.job.feature_names, &batch.x);
        }
        self.phases.compute_s += seconds_since(started);
        let (rows, mut votes) = (self.job.counted(batch, self.comm.rank()), self.control.votes());
        let warm = step >= WARM_UP || !self.warms_up();
        votes.stop |= self.job.extent.trial().is_some_and(|trial| warm && self.began.elapsed() >= trial);
        let mut at = At {
            plan: self.job.plan,
            steps: &self.job.steps,
            control: self.control,
            step,
            account: Account { loss, rows, votes, finite },
            gradients: &mut self.gradients,
            comm: self.comm,
            replica: self.step,
            state: self.state,
            phases: &mut self.phases,
        };
        let taken = self.strategy.step(&mut at)?;
        let last = at.step;
        if taken == Taken::NotFinite(self.comm.rank()) && self.blame.is_empty() {
            // Every rank's numbers were finite, their sum is not.
            self.blame = blame(&self.job.feature_names, &batch.x);
        }
        Ok((taken, last))
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
        let finite = sync::all_finite(&self.state.parameters);
        if !finite {
            "the last update overflowed; lower the learning rate".clone_into(&mut self.blame);
        }
        // Ranks that each update a part do not see the others' numbers.
        let total = sync::add_accounts(self.comm, &Account { finite, ..Account::default() })?;
        if let Some(rank) = total.not_finite {
            return Err(self.not_finite(rank, self.job.steps.steps()));
        }
        let held_out_loss = if self.job.held_out_rows > 0 { Some(self.held_out_loss()?) } else { None };

        let state = &mut *self.state;
        let per_epoch = sync::updates_per_epoch(self.job.plan.sync, self.job.steps.steps());
        let last_update = ((u64::from(state.epoch) + 1) * per_epoch).saturating_sub(1);
        let record = EpochRecord {
            epoch: state.epoch + 1,
            loss: state.epoch_loss / state.epoch_rows.max(1) as f64,
            held_out_loss,
            learning_rate: optimizer::learning_rate(self.job.plan, last_update, per_epoch),
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

    /// Between epochs, slow ranks hand partitions over; all ranks come to the same owners.
    fn rebalance(&mut self) -> Result<(), LearnError> {
        let rank = self.comm.rank().0 as usize;
        if self.workers == 1 || self.is_done() {
            return Ok(());
        }
        // Of each rank: rows, and seconds that it computed.
        let mut bucket = vec![0.0; 2 * self.workers];
        if rank < self.workers {
            bucket[2 * rank] = self.rows_per_epoch.last().copied().unwrap_or_default() as f64;
            bucket[2 * rank + 1] =
                self.phases.compute_s - mem::replace(&mut self.compute_s_before, self.phases.compute_s);
        }
        self.comm.all_reduce_sum_f64(&mut bucket)?;
        let paces: &[[f64; 2]] = bucket.as_chunks().0;
        let [rows, compute_s] = paces.iter().fold([0.0; 2], |[rows, s], pace| [rows + pace[0], s + pace[1]]);
        // One without rows is taken for an ordinary one, though not at once if it was slow.
        let mean = compute_s / f64::max(rows, 1.0);
        for (s_per_row, [rows, compute_s]) in self.s_per_row.iter_mut().zip(paces) {
            *s_per_row = match (*rows > 0.0, *s_per_row) {
                (true, _) => compute_s / rows,
                (false, 0.0) => mean,
                (false, before) => f64::midpoint(before, mean),
            };
        }
        if let Some(owners) = self.feed.partitions().rebalanced(&self.owners, &self.s_per_row) {
            self.feed = self.feed.owning(data::owned(&owners, self.comm.rank()));
            self.owners = owners;
        }
        Ok(())
    }

    /// The mean loss over all ranks' held-out rows.
    fn held_out_loss(&mut self) -> Result<f64, LearnError> {
        let mut batches = self.feed.held_out();
        let mut account = Account::default();
        while let Some(batch) = next_batch(&mut batches, &mut self.phases)? {
            let started = Instant::now();
            self.check_range(&batch.x)?;
            let loss = self.step.loss(&batch.x, batch.rows)?;
            self.phases.compute_s += seconds_since(started);
            if account.finite && !loss.is_finite() {
                account.finite = false;
                self.blame = format!("in held-out rows, {}", blame(&self.job.feature_names, &batch.x));
            }
            account.loss += loss;
            account.rows += self.job.counted(&batch, self.comm.rank());
            batches.recycle(batch);
        }
        self.held_out_rows = account.rows;
        let started = Instant::now();
        let total = sync::add_accounts(self.comm, &account)?;
        self.phases.wait_s += seconds_since(started);
        match total.not_finite {
            Some(rank) => Err(self.not_finite(rank, self.job.steps.steps())),
            None => Ok(total.loss / total.rows.max(1) as f64),
        }
    }

    /// The same error on every rank, but for the blame, which only `rank` can tell.
    fn not_finite(&mut self, rank: Rank, step: u64) -> LearnError {
        let blame = if rank == self.comm.rank() { mem::take(&mut self.blame) } else { String::new() };
        LearnError::NotFinite { rank, epoch: self.state.epoch + 1, step, blame }
    }

    fn checkpoint(&mut self) -> Result<(), LearnError> {
        self.strategy.settle(self.comm, self.state)?;
        match &mut self.observer {
            Some(observer) => observer.checkpoint(self.state),
            None => Ok(()),
        }
    }

    fn tell_progress(&mut self, step: u64) {
        if let Some(observer) = &mut self.observer
            && self.told.elapsed() >= PROGRESS
        {
            observer.progress(self.state.epoch, step + 1);
            self.told = Instant::now();
        }
    }

    fn finish(self) -> Result<Trained, LearnError> {
        let mut parameters = self.state.kept(self.job.plan.keep).to_vec();
        if self.job.parts.is_some() {
            // Rank 0 has the parts of all since the last checkpoint.
            self.comm.broadcast(Rank(0), &mut parameters)?;
        }
        Ok(Trained {
            parameters,
            history: self.state.history.clone(),
            rows_per_epoch: self.rows_per_epoch,
            held_out_rows: self.held_out_rows,
            phases: self.phases,
            bytes_sent: self.comm.bytes_sent(),
            cpu_s: 0.0,
            peak_memory_bytes: 0,
            staleness: self.strategy.staleness(),
            barrier_s: 0.0,
        })
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
