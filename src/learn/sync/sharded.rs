//! Each rank owns the update of its part of the parameters: gradients are reduce-scattered, the
//! part is updated, parameters are all-gathered (Rajbhandari et al., "`ZeRO`", 2020, stage 1). The
//! optimizer's memory falls by the number of ranks.

use std::{mem, ops::Range, time::Instant};

use super::{At, Strategy, Taken, gradient_scale, multiply, norm_of_parts, reducer::Reducer};
use crate::{
    ids::Rank,
    learn::{Checkpoint, Communicator, LearnError, Wire, optimizer, shard},
    pipeline::spec::Compression,
};

pub(super) struct Sharded {
    own: Range<usize>,
    reducer: Reducer,
    /// The optimizer's buffers of the own part.
    moments: Vec<Vec<f32>>,
}

impl Sharded {
    /// Takes the own part of the optimizer's buffers out of the state, and frees the rest.
    pub fn new(comm: &dyn Communicator, compression: Compression, state: &mut Checkpoint) -> Self {
        let own = shard(comm.rank(), comm.world_size(), state.parameters.len());
        let moments = mem::take(&mut state.moments);
        let moments = moments.into_iter().map(|moment| moment[own.clone()].to_vec()).collect();
        Self { own, reducer: Reducer::new(compression), moments }
    }
}

impl Strategy for Sharded {
    fn step(&mut self, at: &mut At<'_>) -> Result<Taken, LearnError> {
        let total = at.agree(&at.account.clone())?;
        if let Some(rank) = total.not_finite {
            return Ok(Taken::NotFinite(rank));
        }
        let started = Instant::now();
        at.comm.reduce_scatter_sum(at.gradients, self.reducer.wire())?;
        let gradients = &mut at.gradients[self.own.clone()];
        let norm = norm_of_parts(at.comm, gradients)?;
        at.phases.communicate_s += started.elapsed().as_secs_f64();
        let Some(norm) = norm else { return Ok(Taken::NotFinite(Rank(0))) };
        let started = Instant::now();
        multiply(gradients, gradient_scale(total.rows, at.plan.clip_norm, || norm));
        let learning_rate = at.learning_rate(0);
        let gradients = &at.gradients[self.own.clone()];
        let Checkpoint { parameters, updates, .. } = &mut *at.state;
        let own = &mut parameters[self.own.clone()];
        optimizer::update(at.plan, learning_rate, *updates, own, gradients, &mut self.moments);
        let updated = Instant::now();
        at.comm.all_gather(parameters, Wire::F32)?;
        at.phases.communicate_s += updated.elapsed().as_secs_f64();
        at.replica.write_parameters(parameters);
        at.advance(1, &total);
        at.phases.update_s += (updated - started).as_secs_f64();
        Ok(Taken::Updated(total.votes))
    }

    /// Gives rank 0 all parts; the others need no memory for them.
    fn settle(&mut self, comm: &mut dyn Communicator, state: &mut Checkpoint) -> Result<(), LearnError> {
        let (world, length) = (comm.world_size(), state.parameters.len());
        state.moments.clear();
        for own in &self.moments {
            if comm.rank() != Rank(0) {
                comm.send(Rank(0), own)?;
                continue;
            }
            let (mut whole, mut part) = (vec![0.0; length], Vec::new());
            whole[self.own.clone()].copy_from_slice(own);
            for rank in (1..world).map(Rank) {
                comm.receive(rank, &mut part)?;
                let place = shard(rank, world, length);
                if part.len() != place.len() {
                    let (got, expected) = (part.len(), place.len());
                    let mismatch = crate::learn::CommError::Mismatch { operation: "receive", rank, got, expected };
                    return Err(mismatch.into());
                }
                whole[place].copy_from_slice(&part);
            }
            state.moments.push(whole);
        }
        // A rank that is done with its training may leave only once all are.
        Ok(comm.barrier()?)
    }
}
