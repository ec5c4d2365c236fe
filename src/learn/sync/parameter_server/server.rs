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
};

pub(in super::super) struct Server {
    parts: Parts,
    /// Steps that a worker may be ahead of the slowest.
    ahead: u64,
    /// The own part, with the updates since the last meeting.
    parameters: Vec<f32>,
    /// The optimizer's buffers of the own part.
    moments: Vec<Vec<f32>>,
    staleness: Staleness,
    message: Vec<f32>,
}

impl Server {
    /// Takes the own part of the optimizer's buffers out of the state, and frees the rest.
    pub fn new(parts: Parts, ahead: u64, comm: &dyn Communicator, state: &mut Checkpoint) -> Self {
        Self {
            parts,
            ahead,
            parameters: state.parameters[parts.of(comm.rank())].to_vec(),
            moments: parts.take_moments(comm.rank(), state),
            staleness: Staleness::default(),
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
            if push.rows > 0 {
                self.note_staleness(updates - seen[index]);
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
                self.answer(at, Rank(index as u32), pace.meeting(), hurry)?;
            }
        }
    }

    fn apply(&mut self, at: &mut At<'_>, push: &Push<'_>, updates: u64) {
        let started = Instant::now();
        let (step, steps) = (push.finished.saturating_sub(1), at.steps.steps());
        // By its place, not by the number of updates: several are made for one step.
        let place = u64::from(at.state.epoch) * steps + step;
        let share = push.rows as f64 / at.steps.rows(step).max(1) as f64;
        let learning_rate = share * optimizer::learning_rate(at.plan, place, steps);
        let updates = at.state.updates + updates;
        optimizer::update(at.plan, learning_rate, updates, &mut self.parameters, push.gradient, &mut self.moments);
        at.phases.update_s += started.elapsed().as_secs_f64();
    }

    fn note_staleness(&mut self, staleness: u64) {
        self.staleness.add(&Staleness { pushes: 1, total: staleness, max: staleness });
    }

    fn answer(&mut self, at: &mut At<'_>, worker: Rank, meeting: u64, hurry: bool) -> Result<(), LearnError> {
        let started = Instant::now();
        Answer { meeting, hurry, parameters: &self.parameters }.write(&mut self.message);
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
        Some(self.staleness)
    }
}
