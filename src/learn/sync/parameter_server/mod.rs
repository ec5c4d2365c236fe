//! Parameter servers that apply each worker's gradient at once (Dean et al., "Large scale
//! distributed deep networks", 2012), within a bound on how far workers part (Ho et al., "More
//! effective distributed ML via a stale synchronous parallel parameter server", 2013). Servers
//! that move in step are `sharded`.
//!
//! ```text
//!   workers: ranks 0 1 2            servers: ranks 3 4, each with a part of the parameters
//!   step ── Push: mean gradient ──▶ θ ← θ − α nᵢ/n · rule(∇Jᵢ(θ')), at once
//!   next ◀─ Answer: parameters ──── unless the worker is too far ahead of the slowest
//!   .. until all meet: at the end of the epoch, for a checkpoint, or because somebody asks to
//! ```
//!
//! `nᵢ` of the step's `n` rows are the worker's, so a step's pushes together go as far as one
//! synchronous update does. θ' is what the worker pulled before; how many updates others made
//! since is its staleness.
//!
//! All meet at the same step, so that a state between two meetings is one between two steps and
//! rows are counted as everywhere. Where the meeting is only the first server decides: it knows how
//! far each worker can get before it hears of it.

mod message;
mod pace;
mod server;
mod worker;

use std::time::Instant;

use serde::{Deserialize, Serialize};

pub(super) use self::{server::Server, worker::Worker};
use super::{Account, At, Taken, all_finite, parts::Parts};
use crate::{ids::Rank, learn::LearnError};

/// How old parameters were when gradients made from them were applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staleness {
    /// Gradients applied.
    pub pushes: u64,
    /// Updates that others made since the parameters were pulled, over all pushes.
    pub total: u64,
    /// The most for one push.
    pub max: u64,
}

impl Staleness {
    /// Updates by others, mean over pushes.
    pub fn mean(&self) -> f64 {
        self.total as f64 / self.pushes.max(1) as f64
    }

    /// Takes another server's in.
    pub fn add(&mut self, other: &Self) {
        self.pushes += other.pushes;
        self.total += other.total;
        self.max = self.max.max(other.max);
    }
}

/// All ranks exchange what they have, at the same step: `account` since the last meeting, and how
/// many gradients of this rank were applied. Parameters are then those of the servers, everywhere.
fn meet(at: &mut At<'_>, parts: &Parts, account: &Account, applied: u64) -> Result<Taken, LearnError> {
    let total = at.agree(account)?;
    if let Some(rank) = total.not_finite {
        return Ok(Taken::NotFinite(rank));
    }
    let started = Instant::now();
    let mut updates = [applied as f64];
    at.comm.all_reduce_sum_f64(&mut updates)?;
    parts.share(at.comm, &mut at.state.parameters)?;
    at.phases.communicate_s += started.elapsed().as_secs_f64();
    if !all_finite(&at.state.parameters) {
        return Ok(Taken::NotFinite(Rank(0)));
    }
    at.advance(updates[0] as u64, &total);
    Ok(Taken::Updated(total.votes))
}
