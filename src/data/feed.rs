//! Batches for one rank, assembled ahead in the background, in an order that only seed,
//! epoch and partition decide.

use std::sync::Arc;

use super::{DataError, features::FittedFeatures, partition::Partitions, prepare::Dataset};
use crate::{ids::PartitionId, storage::Storage};

/// What a feed is to give.
#[derive(Clone)]
pub struct FeedPlan {
    /// The rows.
    pub dataset: Arc<Dataset>,
    /// How rows become numbers.
    pub features: Arc<FittedFeatures>,
    /// How rows are dealt.
    pub partitions: Arc<Partitions>,
    /// The partitions of this rank.
    pub owned: Vec<PartitionId>,
    /// Rows of one step over all ranks.
    pub batch: usize,
    /// Memory for this rank's rows in flight. What fits is decoded once and kept; what does
    /// not is read again each epoch through bounded shuffle buffers.
    pub memory_bytes: u64,
}

/// Rows of one rank for one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// `rows * width` numbers, row-major.
    pub x: Vec<f32>,
    /// Rows; may be 0 where this rank has none for the step.
    pub rows: usize,
}

/// The feed of one rank.
pub struct Feed {}

impl Feed {
    /// A feed; must be called within a tokio runtime, on which it reads.
    pub fn new(storage: Storage, plan: FeedPlan) -> Self {
        let _ = (storage, plan);
        unimplemented!()
    }

    /// The batches of an epoch (from 0) from step `from_step` on: exactly
    /// `StepPlan::steps() - from_step` batches, the same ones whether or not the epoch is
    /// entered in the middle.
    pub fn epoch(&self, epoch: u32, from_step: u64) -> EpochFeed {
        let _ = (epoch, from_step);
        unimplemented!()
    }

    /// This rank's held-out rows in batches of at most `batch` rows, in a fixed order.
    pub fn held_out(&self) -> EpochFeed {
        unimplemented!()
    }
}

/// Batches in order. Dropping it stops the reading.
pub struct EpochFeed {}

impl EpochFeed {
    /// The next batch, or `None` after the last; blocks, so call it from a thread of its own,
    /// not from a tokio worker.
    pub fn next_batch(&mut self) -> Result<Option<Batch>, DataError> {
        unimplemented!()
    }
}
