//! Updates of each rank's own, then averages, for slow networks (Stich, "Local SGD converges fast
//! and communicates little", 2019).
//!
//! What is averaged is the change since the last average, weighted by the rows behind it, and the
//! optimizer's buffers with it; so at an average all ranks hold the same state. An outer momentum
//! takes the averaged change as a gradient (Nesterov's; Douillard et al., "`DiLoCo`", 2023).

use std::{mem, time::Instant};

use super::{Account, At, Strategy, Taken, all_finite, gradient_scale, multiply, reducer::Reducer, sum_of_squares};
use crate::{
    ids::Rank,
    learn::{Checkpoint, Communicator, LearnError, optimizer},
    pipeline::spec::{Compression, SyncStrategy},
};

pub(super) struct LocalSgd {
    /// Steps per average.
    steps: u64,
    outer_momentum: f32,
    outer_learning_rate: f32,
    reducer: Reducer,
    /// Of the steps since the last average.
    account: Account,
    /// Those steps.
    taken: u64,
    /// This rank's own since the last average; empty if there was no step.
    parameters: Vec<f32>,
    moments: Vec<Vec<f32>>,
}

/// Whether the strategy keeps a buffer of its own behind the optimizer's.
pub(super) fn has_velocity(strategy: SyncStrategy) -> bool {
    matches!(strategy, SyncStrategy::LocalSgd { outer_momentum, .. } if outer_momentum > 0.0)
}

impl LocalSgd {
    pub fn new(steps: u32, outer_momentum: f64, outer_learning_rate: f64, compression: Compression) -> Self {
        Self {
            steps: u64::from(steps),
            outer_momentum: outer_momentum as f32,
            outer_learning_rate: outer_learning_rate as f32,
            reducer: Reducer::new(compression),
            account: Account::default(),
            taken: 0,
            parameters: Vec::new(),
            moments: Vec::new(),
        }
    }

    /// An update of this rank alone.
    fn update(&mut self, at: &mut At<'_>) {
        let started = Instant::now();
        if self.taken == 0 {
            self.parameters.clone_from(&at.state.parameters);
            self.moments.clone_from(&at.state.moments);
            if self.outer_momentum > 0.0 {
                self.moments.pop();
            }
        }
        let rows = at.account.rows;
        if rows > 0 && at.account.finite {
            let scale = gradient_scale(rows, at.plan.clip_norm, || sum_of_squares(at.gradients).sqrt());
            multiply(at.gradients, scale);
            let (learning_rate, updates) = (at.learning_rate(self.taken), at.state.updates + self.taken);
            optimizer::update(at.plan, learning_rate, updates, &mut self.parameters, at.gradients, &mut self.moments);
            at.replica.write_parameters(&self.parameters);
        }
        self.taken += 1;
        at.phases.update_s += started.elapsed().as_secs_f64();
    }

    /// Replaces the own numbers by their averages.
    fn average(&mut self, at: &mut At<'_>, weight: f32) -> Result<(), LearnError> {
        let started = Instant::now();
        for (own, before) in self.parameters.iter_mut().zip(&at.state.parameters) {
            *own = weight * (*own - before);
        }
        at.comm.all_reduce_sum(&mut self.parameters, self.reducer.wire())?;
        for moment in &mut self.moments {
            multiply(moment, weight);
            at.comm.all_reduce_sum(moment, self.reducer.wire())?;
        }
        at.phases.communicate_s += started.elapsed().as_secs_f64();
        Ok(())
    }

    /// Makes the averages the state.
    fn take_over(&mut self, state: &mut Checkpoint) {
        let velocity = if self.outer_momentum > 0.0 { state.moments.pop() } else { None };
        mem::swap(&mut state.moments, &mut self.moments);
        let (momentum, learning_rate) = (self.outer_momentum, self.outer_learning_rate);
        if let Some(mut velocity) = velocity {
            for ((p, &change), v) in state.parameters.iter_mut().zip(&self.parameters).zip(&mut velocity) {
                *v = momentum * *v + change;
                *p += learning_rate * (change + momentum * *v);
            }
            state.moments.push(velocity);
        } else {
            for (p, &change) in state.parameters.iter_mut().zip(&self.parameters) {
                *p += learning_rate * change;
            }
        }
    }
}

impl Strategy for LocalSgd {
    fn step(&mut self, at: &mut At<'_>) -> Result<Taken, LearnError> {
        self.account.add(&at.account);
        self.update(at);
        if !at.closes(self.steps) {
            return Ok(Taken::Alone);
        }
        self.account.finite &= all_finite(&self.parameters);
        let own = mem::take(&mut self.account);
        let total = at.agree(&own)?;
        if let Some(rank) = total.not_finite {
            return Ok(Taken::NotFinite(rank));
        }
        self.average(at, (own.rows as f64 / total.rows.max(1) as f64) as f32)?;
        if !all_finite(&self.parameters) {
            return Ok(Taken::NotFinite(Rank(0)));
        }
        let started = Instant::now();
        self.take_over(at.state);
        at.replica.write_parameters(&at.state.parameters);
        at.advance(mem::take(&mut self.taken), &total);
        at.phases.update_s += started.elapsed().as_secs_f64();
        Ok(Taken::Updated(total.votes))
    }

    fn settle(&mut self, _comm: &mut dyn Communicator, _state: &mut Checkpoint) -> Result<(), LearnError> {
        Ok(())
    }
}
