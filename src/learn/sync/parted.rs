//! A model that is spread over the ranks: each has the gradients of its own part when it comes
//! here, and updates that part alone. No gradients are exchanged.

use std::{mem, time::Instant};

use super::{At, Strategy, Taken, gradient_scale, multiply, norm_of_parts};
use crate::{
    ids::Rank,
    learn::{Checkpoint, CommError, Communicator, LearnError, Parts, optimizer},
};

pub(super) struct Parted {
    parts: Parts,
    rank: Rank,
    /// The own part; the state's copy follows.
    parameters: Vec<f32>,
    /// The optimizer's buffers of the own part.
    moments: Vec<Vec<f32>>,
}

impl Parted {
    /// Takes the own part of the optimizer's buffers out of the state, and frees the rest.
    pub fn new(parts: Parts, comm: &dyn Communicator, state: &mut Checkpoint) -> Self {
        let rank = comm.rank();
        let parameters = parts.take(rank, &state.parameters);
        let moments = mem::take(&mut state.moments).iter().map(|moment| parts.take(rank, moment)).collect();
        Self { parts, rank, parameters, moments }
    }

    /// Gives rank 0 a buffer of which each rank has its own part.
    fn gather(&self, comm: &mut dyn Communicator, own: &[f32], whole: &mut [f32]) -> Result<(), LearnError> {
        if self.rank != Rank(0) {
            return Ok(comm.send(Rank(0), own)?);
        }
        self.parts.put(self.rank, own, whole);
        let mut part = Vec::new();
        for rank in (1..comm.world_size()).map(Rank) {
            comm.receive(rank, &mut part)?;
            let (got, expected) = (part.len(), self.parts.len(rank));
            if got != expected {
                return Err(CommError::Mismatch { operation: "receive", rank, got, expected }.into());
            }
            self.parts.put(rank, &part, whole);
        }
        Ok(())
    }
}

impl Strategy for Parted {
    fn step(&mut self, at: &mut At<'_>) -> Result<Taken, LearnError> {
        let total = at.agree(&at.account.clone())?;
        if let Some(rank) = total.not_finite {
            return Ok(Taken::NotFinite(rank));
        }
        let started = Instant::now();
        let mut gradients = self.parts.take(self.rank, at.gradients);
        let norm = norm_of_parts(at.comm, &gradients)?;
        at.phases.communicate_s += started.elapsed().as_secs_f64();
        let Some(norm) = norm else { return Ok(Taken::NotFinite(Rank(0))) };
        let started = Instant::now();
        multiply(&mut gradients, gradient_scale(total.rows, at.plan.clip_norm, || norm));
        let (learning_rate, updates) = (at.learning_rate(0), at.state.updates);
        optimizer::update(at.plan, learning_rate, updates, &mut self.parameters, &gradients, &mut self.moments);
        self.parts.put(self.rank, &self.parameters, &mut at.state.parameters);
        at.replica.write_parameters(&at.state.parameters);
        at.advance(1, &total);
        at.phases.update_s += started.elapsed().as_secs_f64();
        Ok(Taken::Updated(total.votes))
    }

    /// Gives rank 0 all parts, of the best epoch's parameters too.
    fn settle(&mut self, comm: &mut dyn Communicator, state: &mut Checkpoint) -> Result<(), LearnError> {
        self.gather(comm, &self.parameters, &mut state.parameters)?;
        state.moments.clear();
        for own in &self.moments {
            let mut whole = if self.rank == Rank(0) { vec![0.0; state.parameters.len()] } else { Vec::new() };
            self.gather(comm, own, &mut whole)?;
            state.moments.extend((self.rank == Rank(0)).then_some(whole));
        }
        if let Some((_, best)) = &mut state.best {
            let own = self.parts.take(self.rank, best);
            self.gather(comm, &own, best)?;
        }
        // A rank that is done with its training may leave only once all are.
        Ok(comm.barrier()?)
    }
}
