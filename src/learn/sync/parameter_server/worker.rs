//! A worker: pushes each step's gradient to all servers and takes what they answer.

use std::{mem, time::Instant};

use super::{
    meet,
    message::{Answer, Push},
};
use crate::{
    learn::{
        Checkpoint, Communicator, LearnError, Wire,
        sync::{Account, At, Strategy, Taken, gradient_scale, multiply, ownership::Ownership, sum_of_squares},
    },
    pipeline::spec::Compression,
};

pub(in super::super) struct Worker {
    parts: Ownership,
    wire: Wire,
    /// Since the last meeting.
    account: Account,
    /// Gradients of this worker that were applied since.
    applied: u64,
    /// Whether somebody asks all to meet.
    hurry: bool,
    /// As last pulled.
    parameters: Vec<f32>,
    /// Empty buffers, one for each of the optimizer's: servers have their content.
    moments: Vec<Vec<f32>>,
    message: Vec<f32>,
}

impl Worker {
    /// Frees the optimizer's buffers.
    pub fn new(parts: Ownership, comm: &dyn Communicator, compression: Compression, state: &mut Checkpoint) -> Self {
        Self {
            parts,
            wire: if compression == Compression::Bf16 { Wire::Bf16 } else { Wire::F32 },
            account: Account::default(),
            applied: 0,
            hurry: false,
            parameters: state.parameters.clone(),
            moments: parts.take_moments(comm.rank(), state),
            message: Vec::new(),
        }
    }

    fn push(&mut self, at: &mut At<'_>) -> Result<(), LearnError> {
        // What is not finite is not applied; all meet, and learn of it there.
        let rows = if at.account.finite { at.account.rows } else { 0 };
        if rows > 0 {
            let scale = gradient_scale(rows, at.plan.clip_norm, || sum_of_squares(at.gradients).sqrt());
            // Of all workers' rows: the mean of all workers' pushes is then that over all rows.
            let weight = f64::from(self.parts.workers()) * rows as f64 / at.steps.rows(at.step).max(1) as f64;
            multiply(at.gradients, scale * weight as f32);
            self.wire.round(at.gradients);
            self.applied += 1;
        }
        for server in self.parts.owners() {
            let gradient = if rows > 0 { &at.gradients[self.parts.of(server)] } else { &[] };
            let push = Push { finished: at.step + 1, applies: rows > 0, hurry: self.hurry, leaves: false, gradient };
            push.write(&mut self.message);
            at.comm.send(server, &self.message)?;
        }
        Ok(())
    }

    /// Takes the servers' answers; gives the steps after which all meet.
    fn pull(&mut self, at: &mut At<'_>) -> Result<u64, LearnError> {
        let mut meeting = at.steps.steps();
        for server in self.parts.owners() {
            at.comm.receive(server, &mut self.message)?;
            let part = self.parts.of(server);
            let answer = Answer::read(server, &self.message, part.len())?;
            meeting = meeting.min(answer.meeting);
            self.hurry |= answer.hurry;
            self.parameters[part].copy_from_slice(answer.parameters);
        }
        Ok(meeting)
    }

    fn leave(&mut self, at: &mut At<'_>) -> Result<(), LearnError> {
        for server in self.parts.owners() {
            let push = Push { finished: at.step + 1, applies: false, hurry: false, leaves: true, gradient: &[] };
            push.write(&mut self.message);
            at.comm.send(server, &self.message)?;
        }
        Ok(())
    }
}

impl Strategy for Worker {
    fn step(&mut self, at: &mut At<'_>) -> Result<Taken, LearnError> {
        self.account.add(&at.account);
        let Account { votes, finite, .. } = self.account;
        self.hurry |= votes.stop || votes.regroup || !finite;
        let started = Instant::now();
        self.push(at)?;
        let meeting = self.pull(at)?;
        at.phases.communicate_s += started.elapsed().as_secs_f64();
        if at.step + 1 < meeting {
            at.replica.write_parameters(&self.parameters);
            return Ok(Taken::Alone);
        }
        self.leave(at)?;
        self.hurry = false;
        let taken = meet(at, &self.parts, &mem::take(&mut self.account), mem::take(&mut self.applied))?;
        at.replica.write_parameters(&at.state.parameters);
        Ok(taken)
    }

    fn settle(&mut self, comm: &mut dyn Communicator, state: &mut Checkpoint) -> Result<(), LearnError> {
        self.parts.gather_moments(comm, &self.moments, state)
    }
}
