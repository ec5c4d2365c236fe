//! Each owner updates its part of the parameters alone: gradients are summed at the owners, parts
//! are updated, parameters go to all (Rajbhandari et al., "ZeRO", 2020, stage 1). The optimizer's
//! memory is spread over the owners.
//!
//! Every rank is an owner, or further ranks are: parameter servers that move in step (Li et al.,
//! "Scaling distributed machine learning with the parameter server", 2014).

use std::time::Instant;

use super::{
    At, Strategy, Taken, all_finite, gradient_scale, multiply, parts::Parts, reducer::Reducer, sum_of_squares,
};
use crate::{
    ids::Rank,
    learn::{Checkpoint, Communicator, LearnError, optimizer},
    pipeline::spec::Compression,
};

pub(super) struct Sharded {
    parts: Parts,
    reducer: Reducer,
    /// The optimizer's buffers of the own part.
    moments: Vec<Vec<f32>>,
}

impl Sharded {
    /// Takes the own part of the optimizer's buffers out of the state, and frees the rest.
    pub fn new(parts: Parts, rank: Rank, compression: Compression, state: &mut Checkpoint) -> Self {
        Self { parts, reducer: Reducer::new(compression), moments: parts.take_moments(rank, state) }
    }
}

impl Strategy for Sharded {
    fn step(&mut self, at: &mut At<'_>) -> Result<Taken, LearnError> {
        let own = self.parts.of(at.comm.rank());
        let total = at.agree(&at.account.clone())?;
        if let Some(rank) = total.not_finite {
            return Ok(Taken::NotFinite(rank));
        }
        let started = Instant::now();
        self.parts.sum(at.comm, at.gradients, self.reducer.wire())?;
        let gradients = &mut at.gradients[own.clone()];
        // Each sees its own part only.
        let mut seen = [f64::from(!all_finite(gradients)), sum_of_squares(gradients)];
        if seen[0] > 0.0 {
            seen[1] = 0.0;
        }
        at.comm.all_reduce_sum_f64(&mut seen)?;
        at.phases.communicate_s += started.elapsed().as_secs_f64();
        if seen[0] > 0.0 {
            return Ok(Taken::NotFinite(Rank(0)));
        }
        let started = Instant::now();
        multiply(gradients, gradient_scale(total.rows, at.plan.clip_norm, || seen[1].sqrt()));
        let learning_rate = at.learning_rate(0);
        let gradients = &at.gradients[own.clone()];
        let Checkpoint { parameters, updates, .. } = &mut *at.state;
        optimizer::update(at.plan, learning_rate, *updates, &mut parameters[own], gradients, &mut self.moments);
        let updated = Instant::now();
        self.parts.share(at.comm, parameters)?;
        at.phases.communicate_s += updated.elapsed().as_secs_f64();
        if !self.parts.only_owns(at.comm.rank()) {
            at.replica.write_parameters(parameters);
        }
        at.advance(1, &total);
        at.phases.update_s += (updated - started).as_secs_f64();
        Ok(Taken::Updated(total.votes))
    }

    fn settle(&mut self, comm: &mut dyn Communicator, state: &mut Checkpoint) -> Result<(), LearnError> {
        self.parts.gather_moments(comm, &self.moments, state)
    }
}
