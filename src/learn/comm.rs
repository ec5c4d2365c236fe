//! Communicators: how ranks exchange flat f32 buckets. They know numbers and ranks, not models.

use std::time::Duration;

use crate::{
    ids::Rank,
    remedy::{Remedied, Remedy},
};

/// A rank's end of the exchange. Every call is collective, has a deadline, and fails with the
/// rank to blame.
pub trait Communicator: Send {
    /// This rank.
    fn rank(&self) -> Rank;

    /// How many ranks there are.
    fn world_size(&self) -> u32;

    /// Replaces the bucket by its sum over all ranks; the same bits on every rank, and in
    /// every run (ranks are added in order).
    fn all_reduce_sum(&mut self, bucket: &mut [f32]) -> Result<(), CommError>;

    /// The same in f64, for losses and counts.
    fn all_reduce_sum_f64(&mut self, bucket: &mut [f64]) -> Result<(), CommError>;

    /// Replaces the bucket by that of rank `root`.
    fn broadcast(&mut self, root: Rank, bucket: &mut [f32]) -> Result<(), CommError>;

    /// Waits for all ranks.
    fn barrier(&mut self) -> Result<(), CommError>;
}

/// Communicators between threads, by rank.
pub fn in_process(world_size: u32, deadline: Duration) -> Vec<Box<dyn Communicator>> {
    let _ = (world_size, deadline);
    unimplemented!()
}

/// Why an exchange failed.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// A rank did not come in time.
    #[error("{operation}: rank {rank} did not arrive within {} s", deadline.as_secs())]
    Late {
        /// The operation.
        operation: &'static str,
        /// The rank to blame.
        rank: Rank,
        /// How long was waited.
        deadline: Duration,
    },
    /// A rank ended before the others.
    #[error("{operation}: rank {rank} ended")]
    Gone {
        /// The operation.
        operation: &'static str,
        /// The rank to blame.
        rank: Rank,
    },
    /// Ranks disagree on what they exchange.
    #[error("{operation}: rank {rank} brought {got} numbers, not {expected}")]
    Mismatch {
        /// The operation.
        operation: &'static str,
        /// The rank to blame.
        rank: Rank,
        /// What it brought.
        got: usize,
        /// What this rank brought.
        expected: usize,
    },
}

impl Remedied for CommError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Late { .. } | Self::Gone { .. } => Remedy::TryAgain,
            Self::Mismatch { .. } => Remedy::ReportBug,
        }
    }
}
