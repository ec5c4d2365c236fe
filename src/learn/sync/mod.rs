//! How ranks keep one model: what happens with the gradients of a step.
//!
//! ```text
//!   train loop ──gradients, account──▶ Strategy::step ──Communicator──▶ other ranks
//!                                        │
//!              state: parameters, moments, place; only ever changed as a whole
//! ```
//!
//! Before anything changes, ranks exchange a few numbers: losses, rows and votes, who wants to
//! stop, and who met a number that is not finite; in that case no parameter has changed anywhere.

mod all_reduce;
mod local_sgd;
mod parameter_server;
mod parts;
mod reducer;
mod sharded;

use std::time::Instant;

pub use self::parameter_server::Staleness;
use self::{all_reduce::AllReduce, local_sgd::LocalSgd, parts::Parts, sharded::Sharded};
use super::{Checkpoint, Communicator, Control, LearnError, Phases, Step, optimizer};
use crate::{
    data::StepPlan,
    ids::Rank,
    limits,
    pipeline::{
        TrainPlan,
        spec::{ServerMode, SyncStrategy},
    },
};

/// A strategy at work, one per rank.
pub(super) trait Strategy: Send {
    /// Takes a step's gradients, and brings parameters up to date. On a server that works while
    /// others are between two meetings: all steps to the next one; `at.step` is then the last of them.
    fn step(&mut self, at: &mut At<'_>) -> Result<Taken, LearnError>;

    /// Makes rank 0's state whole, for a checkpoint; called on all ranks after a `Taken::Updated`.
    fn settle(&mut self, comm: &mut dyn Communicator, state: &mut Checkpoint) -> Result<(), LearnError>;

    /// How old parameters were, where that differs and this rank measures it.
    fn staleness(&self) -> Option<Staleness> {
        None
    }
}

/// A step of this rank, forward and backward done.
pub(super) struct At<'a> {
    pub plan: &'a TrainPlan,
    pub steps: &'a StepPlan,
    pub control: &'a Control,
    /// Within the epoch, from 0.
    pub step: u64,
    pub account: Account,
    /// Of the sum over this rank's rows.
    pub gradients: &'a mut [f32],
    pub comm: &'a mut dyn Communicator,
    pub replica: &'a mut dyn Step,
    pub state: &'a mut Checkpoint,
    pub phases: &'a mut Phases,
}

/// What became of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Taken {
    /// Nothing was exchanged; the state is still that of an earlier step.
    Alone,
    /// The state is that after this step, on every rank; with all ranks' votes.
    Updated(Votes),
    /// A rank met a number that is not finite; the state has not changed.
    NotFinite(Rank),
}

/// What ranks want: one is enough for all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Votes {
    /// To make a checkpoint and stop.
    pub stop: bool,
    /// To leave, so that the fleet forms anew.
    pub regroup: bool,
}

impl Votes {
    pub fn any(self) -> bool {
        self.stop || self.regroup
    }
}

/// The strategy of a plan. What it keeps of `state` for itself it takes out.
pub(super) fn strategy(plan: &TrainPlan, comm: &dyn Communicator, state: &mut Checkpoint) -> Box<dyn Strategy> {
    match plan.sync {
        SyncStrategy::AllReduce { batches } => Box::new(AllReduce::new(batches, plan.compression)),
        SyncStrategy::Sharded {} => {
            let parts = Parts::of_all(comm, state.parameters.len());
            Box::new(Sharded::new(parts, comm.rank(), plan.compression, state))
        }
        SyncStrategy::LocalSgd { steps, outer_momentum, outer_learning_rate } => {
            Box::new(LocalSgd::new(steps, outer_momentum, outer_learning_rate, plan.compression))
        }
        SyncStrategy::ParameterServer { servers, mode, staleness } => {
            let parts = Parts::of_servers(comm, servers, state.parameters.len());
            let ahead = match mode {
                ServerMode::Sync => return Box::new(Sharded::new(parts, comm.rank(), plan.compression, state)),
                ServerMode::Async => limits::STEPS_AHEAD,
                ServerMode::Bounded => staleness.unwrap_or(limits::STALENESS),
            };
            if parts.only_owns(comm.rank()) {
                Box::new(parameter_server::Server::new(parts, u64::from(ahead), plan, comm, state))
            } else {
                Box::new(parameter_server::Worker::new(parts, comm, plan.compression, state))
            }
        }
    }
}

/// Ranks behind the executors that hold parameters and compute no gradients.
pub fn servers(plan: &TrainPlan) -> u32 {
    match plan.sync {
        SyncStrategy::ParameterServer { servers, .. } => servers,
        _ => 0,
    }
}

/// Zeroed buffers that optimizer and strategy keep between updates, in a checkpoint's order.
pub(super) fn initial_moments(plan: &TrainPlan, parameters: usize) -> Vec<Vec<f32>> {
    let mut moments = optimizer::initial_moments(plan.optimizer, parameters);
    if local_sgd::has_velocity(plan.sync) {
        moments.push(vec![0.0; parameters]);
    }
    moments
}

/// Whether every rank's state is whole after a failure, so that any of them can go on with it.
pub fn survives(strategy: SyncStrategy) -> bool {
    matches!(strategy, SyncStrategy::AllReduce { .. } | SyncStrategy::LocalSgd { .. })
}

/// Updates that the optimizer makes in an epoch of so many steps.
pub(super) fn updates_per_epoch(strategy: SyncStrategy, steps: u64) -> u64 {
    match strategy {
        SyncStrategy::AllReduce { batches } => steps.div_ceil(u64::from(batches.max(1))),
        _ => steps,
    }
}

/// What one rank brings to an exchange.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Account {
    /// Sum over rows of the mean over features.
    pub loss: f64,
    pub rows: u64,
    pub votes: Votes,
    /// Whether its loss and gradient are finite.
    pub finite: bool,
}

impl Default for Account {
    fn default() -> Self {
        Self { loss: 0.0, rows: 0, votes: Votes::default(), finite: true }
    }
}

impl Account {
    /// Takes a further step's account in.
    fn add(&mut self, step: &Self) {
        self.loss += step.loss;
        self.rows += step.rows;
        self.votes.stop |= step.votes.stop;
        self.votes.regroup |= step.votes.regroup;
        self.finite &= step.finite;
    }
}

/// What all ranks together brought.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Total {
    pub loss: f64,
    pub rows: u64,
    pub votes: Votes,
    /// The first rank that met a number that is not finite.
    pub not_finite: Option<Rank>,
}

/// Adds up the ranks' accounts; the same total on every rank.
pub(super) fn add_accounts(comm: &mut dyn Communicator, account: &Account) -> Result<Total, LearnError> {
    // The loss, rows, two votes, then one number per rank: 1 where it is not finite.
    const HEAD: usize = 4;
    let mut bucket = vec![0.0; HEAD + comm.world_size() as usize];
    // One rank's NaN would make the sum NaN; its vote tells enough.
    bucket[0] = if account.finite { account.loss } else { 0.0 };
    bucket[1] = account.rows as f64;
    bucket[2] = f64::from(account.votes.stop);
    bucket[3] = f64::from(account.votes.regroup);
    bucket[HEAD + comm.rank().0 as usize] = f64::from(!account.finite);
    comm.all_reduce_sum_f64(&mut bucket)?;
    let not_finite = bucket[HEAD..].iter().position(|vote| *vote > 0.0).map(|rank| Rank(rank as u32));
    let votes = Votes { stop: bucket[2] > 0.0, regroup: bucket[3] > 0.0 };
    Ok(Total { loss: bucket[0], rows: bucket[1] as u64, votes, not_finite })
}

impl At<'_> {
    /// Whether this is the last step of some `count` that belong together, or of the epoch.
    fn closes(&self, count: u64) -> bool {
        let next = self.step + 1;
        next == self.steps.steps() || next.is_multiple_of(count.max(1))
    }

    /// The step, counted from 1, before which no rank may pass without all others: the next one
    /// with a checkpoint, or the last.
    fn next_meeting(&self) -> u64 {
        let steps = self.steps.steps();
        let begin = u64::from(self.state.epoch) * steps;
        match self.plan.checkpoint_steps {
            Some(every) => ((begin + self.state.step) / every.max(1) + 1) * every.max(1) - begin,
            None => steps,
        }
        .min(steps)
    }

    /// Exchanges accounts since the state's step, and checks that all rows are there.
    fn agree(&mut self, account: &Account) -> Result<Total, LearnError> {
        let started = Instant::now();
        let total = add_accounts(self.comm, account)?;
        self.phases.wait_s += started.elapsed().as_secs_f64();
        let expected = (self.state.step..=self.step).map(|step| self.steps.rows(step)).sum();
        if total.not_finite.is_none() && total.rows != expected {
            let (epoch, step) = (self.state.epoch + 1, self.step + 1);
            return Err(LearnError::Rows { epoch, step, got: total.rows, expected });
        }
        Ok(total)
    }

    /// The step size of the `ahead`-th update from the state on.
    fn learning_rate(&self, ahead: u64) -> f64 {
        let per_epoch = updates_per_epoch(self.plan.sync, self.steps.steps());
        optimizer::learning_rate(self.plan, self.state.updates + ahead, per_epoch)
    }

    /// Moves the state's place behind this step.
    fn advance(&mut self, updates: u64, total: &Total) {
        self.state.step = self.step + 1;
        self.state.updates += updates;
        self.state.epoch_loss += total.loss;
        self.state.epoch_rows += total.rows;
    }
}

/// What a sum of gradients is multiplied by: to their mean over `rows`, then, where its L2 norm is
/// longer than `clip_norm`, down to that. `norm` is that of the sum.
fn gradient_scale(rows: u64, clip_norm: Option<f64>, norm: impl FnOnce() -> f64) -> f32 {
    let mut scale = 1.0 / rows.max(1) as f64;
    if let Some(most) = clip_norm {
        // As PyTorch's clip_grad_norm_.
        scale *= (most / (norm() * scale + 1e-6)).min(1.0);
    }
    scale as f32
}

fn multiply(numbers: &mut [f32], factor: f32) {
    for number in numbers {
        *number *= factor;
    }
}

/// Whether no number is NaN or infinite. Looks at all of them: without an early exit the loop
/// vectorises.
pub(super) fn all_finite(numbers: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    numbers.iter().fold(true, |finite, number| finite & (number.to_bits() & EXPONENT != EXPONENT))
}

/// In f64, in lanes that the compiler can vectorise; the same order on every rank.
fn sum_of_squares(numbers: &[f32]) -> f64 {
    let (chunks, rest) = numbers.as_chunks::<8>();
    let mut lanes = [0.0_f64; 8];
    for chunk in chunks {
        for (lane, number) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*number) * f64::from(*number);
        }
    }
    let rest: f64 = rest.iter().map(|number| f64::from(*number).powi(2)).sum();
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
pub(super) mod tests {
    use std::{thread, time::Duration};

    use super::*;
    use crate::learn::in_process;

    /// Runs `work` on every rank's own thread; results by rank.
    pub(super) fn fleet<T: Send>(world: u32, work: impl Fn(&mut dyn Communicator) -> T + Sync) -> Vec<T> {
        let work = &work;
        thread::scope(|scope| {
            let ranks = in_process(world, Duration::from_mins(1));
            let threads: Vec<_> = ranks.into_iter().map(|mut rank| scope.spawn(move || work(rank.as_mut()))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn accounts_add_up_and_name_the_first_rank_that_is_not_finite() {
        let check = |nan: &[u32], stop: &[u32], expected: Total| {
            let totals = fleet(4, |comm| {
                let rank = comm.rank().0;
                let finite = !nan.contains(&rank);
                let loss = if finite { f64::from(rank) } else { f64::NAN };
                let votes = Votes { stop: stop.contains(&rank), regroup: rank == 3 };
                let account = Account { loss, rows: 10, votes, finite };
                add_accounts(comm, &account).unwrap()
            });
            assert!(totals.iter().all(|total| *total == expected), "{totals:?}");
        };
        let votes = |stop| Votes { stop, regroup: true };
        check(&[], &[], Total { loss: 6.0, rows: 40, votes: votes(false), not_finite: None });
        check(&[3, 2], &[1], Total { loss: 1.0, rows: 40, votes: votes(true), not_finite: Some(Rank(2)) });
    }

    #[test]
    fn gradients_are_averaged_then_clipped() {
        let norm = || (36.0_f64 + 64.0).sqrt();
        let check = |clip_norm, expected: f32| assert!((gradient_scale(2, clip_norm, norm) - expected).abs() < 1e-6);
        check(None, 0.5);
        check(Some(10.0), 0.5);
        check(Some(0.5), 0.05);
    }

    #[test]
    fn what_is_not_finite_is_found() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!all_finite(&[0.0, bad, 1.0]));
        }
        assert!(all_finite(&[f32::MAX, f32::MIN, f32::MIN_POSITIVE / 2.0]));
    }

    #[test]
    fn the_sum_of_squares_takes_every_number() {
        let numbers: Vec<f32> = (0..19).map(|number| number as f32).collect();
        let expected = (0..19).map(|number| f64::from(number * number)).sum::<f64>();
        assert!((sum_of_squares(&numbers) - expected).abs() < 1e-12);
    }
}
