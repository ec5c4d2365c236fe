//! Synchronous all-reduce: θ ← θ − α Σᵢ ∇Jᵢ(θ) / rows, the same on every rank.

use std::{mem, time::Instant};

use super::{Account, At, Strategy, Taken, all_finite, gradient_scale, multiply, reducer::Reducer, sum_of_squares};
use crate::{
    ids::Rank,
    learn::{Checkpoint, Communicator, LearnError, optimizer},
    pipeline::spec::Compression,
};

pub(super) struct AllReduce {
    /// Steps per exchange.
    batches: u64,
    reducer: Reducer,
    /// Of the steps since the last exchange.
    account: Account,
    /// Their gradients but for the last one's; empty if there are none.
    sum: Vec<f32>,
}

impl AllReduce {
    pub fn new(batches: u32, compression: Compression) -> Self {
        let reducer = Reducer::new(compression);
        Self { batches: u64::from(batches), reducer, account: Account::default(), sum: Vec::new() }
    }
}

impl Strategy for AllReduce {
    fn step(&mut self, at: &mut At<'_>) -> Result<Taken, LearnError> {
        self.account.add(&at.account);
        if !self.sum.is_empty() {
            at.gradients.iter_mut().zip(&self.sum).for_each(|(gradient, before)| *gradient += before);
        }
        if !at.closes(self.batches) {
            self.sum.clear();
            self.sum.extend_from_slice(at.gradients);
            return Ok(Taken::Alone);
        }
        self.sum.clear();
        let total = at.agree(&mem::take(&mut self.account))?;
        if let Some(rank) = total.not_finite {
            return Ok(Taken::NotFinite(rank));
        }
        let started = Instant::now();
        self.reducer.sum(at.comm, at.gradients)?;
        at.phases.communicate_s += started.elapsed().as_secs_f64();
        // Finite summands can overflow.
        if !all_finite(at.gradients) {
            return Ok(Taken::NotFinite(Rank(0)));
        }
        let started = Instant::now();
        let scale = gradient_scale(total.rows, at.plan.clip_norm, || sum_of_squares(at.gradients).sqrt());
        multiply(at.gradients, scale);
        let learning_rate = at.learning_rate(0);
        let Checkpoint { parameters, moments, updates, .. } = &mut *at.state;
        optimizer::update(at.plan, learning_rate, *updates, parameters, at.gradients, moments);
        at.replica.write_parameters(parameters);
        at.advance(1, &total);
        at.phases.update_s += started.elapsed().as_secs_f64();
        Ok(Taken::Updated(total.votes))
    }

    fn settle(&mut self, _comm: &mut dyn Communicator, _state: &mut Checkpoint) -> Result<(), LearnError> {
        Ok(())
    }
}
