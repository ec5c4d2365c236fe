//! Which rank owns which part of the flat buffers, and how parts travel.
//!
//! ```text
//!   every rank owns one:   ranks 0 1 2 3       halves of an all-reduce
//!   servers own all:       ranks 0 1 │ 2 3     workers push to each server, servers broadcast
//!                          workers ──┘└── servers
//! ```

use std::ops::Range;

use crate::{
    ids::Rank,
    learn::{Checkpoint, CommError, Communicator, LearnError, Wire, shard},
};

/// Owners are all ranks from `first` on; those before it are workers that own nothing.
#[derive(Clone, Copy)]
pub(super) struct Ownership {
    first: u32,
    world: u32,
    /// Of a whole buffer.
    length: usize,
}

impl Ownership {
    /// One for each rank.
    pub fn of_all(comm: &dyn Communicator, length: usize) -> Self {
        Self { first: 0, world: comm.world_size(), length }
    }

    /// One for each of the last ranks.
    pub fn of_servers(comm: &dyn Communicator, servers: u32, length: usize) -> Self {
        let world = comm.world_size();
        Self { first: world.saturating_sub(servers), world, length }
    }

    pub fn workers(&self) -> u32 {
        self.first
    }

    pub fn owners(&self) -> impl Iterator<Item = Rank> + use<> {
        (self.first..self.world).map(Rank)
    }

    /// Whether the rank computes no gradients.
    pub fn only_owns(&self, rank: Rank) -> bool {
        self.first > 0 && rank.0 >= self.first
    }

    /// What the rank owns; empty for a worker.
    pub fn of(&self, rank: Rank) -> Range<usize> {
        match rank.0.checked_sub(self.first) {
            Some(owner) => shard(Rank(owner), self.world - self.first, self.length),
            None => 0..0,
        }
    }

    /// Makes each owner's part the sum over all ranks that compute gradients, in the order of
    /// ranks. What the rest then holds is left open.
    pub fn sum(&self, comm: &mut dyn Communicator, gradients: &mut [f32], wire: Wire) -> Result<(), CommError> {
        if self.first == 0 {
            return comm.reduce_scatter_sum(gradients, wire);
        }
        if !self.only_owns(comm.rank()) {
            // Messages travel as they are.
            wire.round(gradients);
            return self.owners().try_for_each(|owner| comm.send(owner, &gradients[self.of(owner)]));
        }
        let own = &mut gradients[self.of(comm.rank())];
        let mut part = Vec::new();
        for rank in (0..self.first).map(Rank) {
            comm.receive(rank, &mut part)?;
            check_length(rank, part.len(), own.len())?;
            if rank == Rank(0) {
                own.copy_from_slice(&part);
            } else {
                own.iter_mut().zip(&part).for_each(|(sum, number)| *sum += number);
            }
        }
        Ok(())
    }

    /// Gives every rank all parts.
    pub fn share(&self, comm: &mut dyn Communicator, parameters: &mut [f32]) -> Result<(), CommError> {
        if self.first == 0 {
            return comm.all_gather(parameters, Wire::F32);
        }
        self.owners().try_for_each(|owner| comm.broadcast(owner, &mut parameters[self.of(owner)]))
    }

    /// This rank's part of the optimizer's buffers, out of a state that is whole; frees the rest.
    pub fn take_moments(&self, rank: Rank, state: &mut Checkpoint) -> Vec<Vec<f32>> {
        let moments = std::mem::take(&mut state.moments);
        moments.into_iter().map(|moment| moment[self.of(rank)].to_vec()).collect()
    }

    /// Puts the optimizer's buffers together in rank 0's state; the others need no memory for them.
    pub fn gather_moments(
        &self,
        comm: &mut dyn Communicator,
        own: &[Vec<f32>],
        state: &mut Checkpoint,
    ) -> Result<(), LearnError> {
        state.moments.clear();
        for own in own {
            if comm.rank() != Rank(0) {
                comm.send(Rank(0), own)?;
                continue;
            }
            let (mut whole, mut part) = (vec![0.0; self.length], Vec::new());
            whole[self.of(Rank(0))].copy_from_slice(own);
            for rank in (1..self.world).map(Rank) {
                comm.receive(rank, &mut part)?;
                let place = self.of(rank);
                check_length(rank, part.len(), place.len())?;
                whole[place].copy_from_slice(&part);
            }
            state.moments.push(whole);
        }
        // A rank that is done with its training may leave only once all are.
        Ok(comm.barrier()?)
    }
}

/// Whether a message is as long as it must be.
pub(super) fn check_length(rank: Rank, got: usize, expected: usize) -> Result<(), CommError> {
    if got == expected { Ok(()) } else { Err(CommError::Mismatch { operation: "receive", rank, got, expected }) }
}
