//! Rows dealt to partitions, and steps planned over them: pure functions, no I/O.

use std::ops::Range;

use super::prepare::Dataset;
use crate::{ids::PartitionId, pipeline::PartitionPlan};

/// A range of rows of one row group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Index into `Dataset::files`.
    pub file: usize,
    /// Index into `DataFile::row_groups`.
    pub row_group: usize,
    /// Rows within the row group.
    pub rows: Range<u64>,
    /// Place of the split's first row in the data set: `first_row + i` is a row's identity.
    pub first_row: u64,
}

/// The rows of one partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Partition {
    /// In order.
    pub splits: Vec<Split>,
    /// Rows to train on.
    pub train_rows: u64,
    /// Rows held out.
    pub held_out_rows: u64,
}

/// All partitions of a data set, by `PartitionId`.
#[derive(Clone, Debug, PartialEq)]
pub struct Partitions {
    /// One entry per partition; some may be empty.
    pub partitions: Vec<Partition>,
    /// Fraction of the rows held out.
    pub validation: f64,
    /// The seed of hold-out and shuffle.
    pub seed: u64,
}

impl Partitions {
    /// Rows to train on.
    pub fn train_rows(&self) -> u64 {
        self.partitions.iter().map(|partition| partition.train_rows).sum()
    }

    /// Rows held out.
    pub fn held_out_rows(&self) -> u64 {
        self.partitions.iter().map(|partition| partition.held_out_rows).sum()
    }

    /// Training rows of the fullest partition over the mean; 1 is even.
    pub fn skew(&self) -> f64 {
        unimplemented!()
    }

    /// The partitions that a rank of a fleet of `world_size` owns: balanced in rows.
    pub fn owned_by(&self, rank: crate::ids::Rank, world_size: u32) -> Vec<PartitionId> {
        let _ = (rank, world_size);
        unimplemented!()
    }
}

/// Deals a data set's rows. A pure function of its arguments: `random` deals row groups (cut
/// where there are fewer than a few per partition) by seed, balanced in rows; `round_robin`
/// deals them in turn; `hash` takes the partition of each file as prepared.
pub fn deal(dataset: &Dataset, plan: &PartitionPlan, validation: f64, seed: u64) -> Partitions {
    let _ = (dataset, plan, validation, seed);
    unimplemented!()
}

/// Whether a row is held out: a hash of seed and row identity falls below the fraction.
pub fn is_held_out(seed: u64, row: u64, validation: f64) -> bool {
    let _ = (seed, row, validation);
    unimplemented!()
}

/// How many rows of each partition meet in each step of an epoch: every training row once,
/// `batch` rows per step (the last may have fewer), drawn from all partitions in proportion
/// to their rows. Independent of who owns which partition, so any number of executors gives
/// the same steps.
#[derive(Clone, Debug)]
pub struct StepPlan {}

impl StepPlan {
    /// A plan over the partitions' training rows.
    pub fn new(partition_rows: &[u64], batch: usize) -> Self {
        let _ = (partition_rows, batch);
        unimplemented!()
    }

    /// Steps of one epoch.
    pub fn steps(&self) -> u64 {
        unimplemented!()
    }

    /// Rows of step `step` (of an epoch, from 0) over all partitions: the batch, or the rest.
    pub fn rows(&self, step: u64) -> u64 {
        let _ = step;
        unimplemented!()
    }

    /// The rows that each partition gives to each step, in order of steps.
    pub fn counts(&self) -> impl Iterator<Item = Vec<usize>> + Send + 'static {
        std::iter::empty()
    }
}
