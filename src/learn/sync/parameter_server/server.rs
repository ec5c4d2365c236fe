//! A server: applies what workers push to its part of the parameters, and answers.

use std::time::Instant;

use super::{
    Staleness, meet,
    message::{Answer, Push},
    pace::Pace,
};
use crate::{
    ids::{Rank, Step},
    learn::{
        Checkpoint, CommError, Communicator, LearnError, optimizer,
        sync::{Account, At, Strategy, Taken, parts::Parts},
    },
    pipeline::{Optimizer, TrainPlan},
};

pub(in super::super) struct Server {
    parts: Parts,
    /// Steps that a worker may be ahead of the slowest.
    ahead: u64,
    /// Of one worker's update.
    plan: TrainPlan,
    /// The own part, with the updates since the last meeting.
    parameters: Vec<f32>,
    /// The optimizer's buffers of the own part.
    moments: Vec<Vec<f32>>,
    /// By worker.
    staleness: Vec<Staleness>,
    /// What is sent in place of the parameters.
    predicted: Vec<f32>,
    message: Vec<f32>,
}

impl Server {
    /// Takes the own part of the optimizer's buffers out of the state, and frees the rest.
    pub fn new(parts: Parts, ahead: u64, plan: &TrainPlan, comm: &dyn Communicator, state: &mut Checkpoint) -> Self {
        let parameters = state.parameters[parts.of(comm.rank())].to_vec();
        Self {
            parts,
            ahead,
            plan: one_of(plan, parts.workers()),
            moments: parts.take_moments(comm.rank(), state),
            staleness: vec![Staleness::default(); parts.workers() as usize],
            predicted: parameters.clone(),
            parameters,
            message: Vec::new(),
        }
    }

    /// Serves until all workers have gone to the meeting; gives the steps behind them.
    fn serve(&mut self, at: &mut At<'_>) -> Result<u64, LearnError> {
        let workers = self.parts.workers();
        let mut pace = Pace::new(workers as usize, at.state.step, self.ahead, at.next_meeting());
        let first = self.parts.owners().next() == Some(at.comm.rank());
        // Updates since the last meeting, and how many each worker has seen.
        let (mut updates, mut seen) = (0, vec![0; workers as usize]);
        let mut hurry = false;
        let mut message = Vec::new();
        loop {
            if let Some(steps) = pace.met() {
                return Ok(steps);
            }
            let started = Instant::now();
            let worker = at.comm.receive_any(&mut message)?;
            at.phases.wait_s += started.elapsed().as_secs_f64();
            if worker.0 >= workers {
                let (got, expected) = (message.len(), 0);
                return Err(CommError::Mismatch { operation: "receive", rank: worker, got, expected }.into());
            }
            let index = worker.0 as usize;
            let push = Push::read(worker, &message, self.parameters.len())?;
            if push.leaves {
                pace.leave(index);
                continue;
            }
            if push.applies {
                let staleness = updates - seen[index];
                self.staleness[index].add(&Staleness { pushes: 1, total: staleness, max: staleness });
                self.apply(at, &push, updates);
                updates += 1;
            }
            pace.finish(index, push.finished);
            hurry |= push.hurry || at.control.votes().any();
            if hurry && first {
                pace.hurry();
            }
            for index in pace.release() {
                seen[index] = updates;
                self.predict(at, index, pace.finished(index), updates);
                self.answer(at, Rank(index as u32), pace.meeting(), hurry)?;
            }
        }
    }

    fn apply(&mut self, at: &mut At<'_>, push: &Push<'_>, updates: u64) {
        let started = Instant::now();
        let learning_rate = self.learning_rate(at, push.finished.saturating_sub(1));
        let updates = at.state.updates + updates;
        optimizer::update(&self.plan, learning_rate, updates, &mut self.parameters, push.gradient, &mut self.moments);
        at.phases.update_s += started.elapsed().as_secs_f64();
    }

    /// Looks as many updates ahead as others usually make before this worker's next push arrives, and
    /// that one more, as Nesterov's momentum does. What a lone worker has is never stale.
    fn predict(&mut self, at: &mut At<'_>, worker: usize, step: u64, updates: u64) {
        let started = Instant::now();
        let learning_rate = self.learning_rate(at, step);
        let updates = at.state.updates + updates;
        let ahead = if self.staleness.len() > 1 { self.staleness[worker].mean() + 1.0 } else { 0.0 };
        let Self { plan, parameters, moments, predicted, .. } = self;
        optimizer::predict(plan, learning_rate, updates, ahead, parameters, moments, predicted);
        at.phases.update_s += started.elapsed().as_secs_f64();
    }

    /// By its place, not by the number of updates: several are made for one step.
    fn learning_rate(&self, at: &At<'_>, step: u64) -> f64 {
        let steps = at.steps.steps();
        optimizer::learning_rate(&self.plan, u64::from(at.state.epoch) * steps + step, steps)
    }

    fn answer(&mut self, at: &mut At<'_>, worker: Rank, meeting: u64, hurry: bool) -> Result<(), LearnError> {
        let started = Instant::now();
        Answer { meeting, hurry, parameters: &self.predicted }.write(&mut self.message);
        at.comm.send(worker, &self.message)?;
        at.phases.communicate_s += started.elapsed().as_secs_f64();
        Ok(())
    }
}

impl Strategy for Server {
    /// All steps up to the next meeting.
    fn step(&mut self, at: &mut At<'_>) -> Result<Taken, LearnError> {
        let steps = self.serve(at)?;
        at.step = steps.saturating_sub(1);
        at.comm.at_step(Step(u64::from(at.state.epoch) * at.steps.steps() + at.step));
        at.state.parameters[self.parts.of(at.comm.rank())].copy_from_slice(&self.parameters);
        let account = Account { votes: at.control.votes(), ..Account::default() };
        meet(at, &self.parts, &account, 0)
    }

    fn settle(&mut self, comm: &mut dyn Communicator, state: &mut Checkpoint) -> Result<(), LearnError> {
        self.parts.gather_moments(comm, &self.moments, state)
    }

    fn staleness(&self) -> Option<Staleness> {
        let mut all = Staleness::default();
        self.staleness.iter().for_each(|worker| all.add(worker));
        Some(all)
    }
}

/// A training whose updates are each one worker's of so many, and together go as far as one of
/// `plan`'s. Adam's step goes with the root of the batch, and its memory is longer, which makes
/// what is predicted from it steadier (measured on MNIST; docs/training.md).
fn one_of(plan: &TrainPlan, workers: u32) -> TrainPlan {
    let share = 1.0 / f64::from(workers.max(1));
    let mut plan = plan.clone();
    match &mut plan.optimizer {
        Optimizer::Sgd { .. } => plan.learning_rate *= share,
        Optimizer::Adam { betas, .. } | Optimizer::Adamw { betas, .. } => {
            plan.learning_rate *= share.sqrt();
            *betas = betas.map(|beta| beta.powf(share.powf(1.5)));
        }
    }
    // Decoupled, it goes with the step size alone.
    if matches!(plan.optimizer, Optimizer::Adamw { .. }) {
        plan.weight_decay *= share.sqrt();
    }
    plan
}
