//! Rows dealt to partitions, and steps planned over them: pure functions, no I/O.

use std::{cmp::Reverse, collections::BinaryHeap, ops::Range};

use rayon::prelude::*;

use super::{
    prepare::Dataset,
    shuffle::{Purpose, SplitMix64, Subset},
};
use crate::{
    ids::{PartitionId, Rank},
    pipeline::{PartitionPlan, spec::PartitionBy},
};

/// Pieces that a partition gets at least, if there are rows enough: with fewer, shuffling them
/// from epoch to epoch changes little, and one odd row group makes a partition too full.
const PIECES_PER_PARTITION: u64 = 4;

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

impl Split {
    /// Its number of rows.
    pub(super) fn len(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    /// The identities of its rows.
    pub(super) fn identities(&self) -> Range<u64> {
        self.first_row..self.first_row + self.len()
    }

    /// The rows `range`, counted from the split's first row.
    pub(super) fn part(&self, range: Range<u64>) -> Self {
        let rows = self.rows.start + range.start..self.rows.start + range.end;
        Self { rows, first_row: self.first_row + range.start, ..self.clone() }
    }
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
        let fullest = self.partitions.iter().map(|partition| partition.train_rows).max().unwrap_or(0);
        match self.train_rows() {
            0 => 1.0,
            total => fullest as f64 * self.partitions.len() as f64 / total as f64,
        }
    }

    /// The partitions that a rank of a fleet of `world_size` owns, in order: balanced in
    /// training rows, each partition owned by exactly one rank. Where there are more ranks than
    /// partitions, some own none.
    pub fn owned_by(&self, rank: Rank, world_size: u32) -> Vec<PartitionId> {
        let weights: Vec<u64> = self.partitions.iter().map(|partition| partition.train_rows).collect();
        let owners = balance(&weights, world_size as usize);
        (0..).zip(owners).filter(|(_, owner)| *owner == rank.0 as usize).map(|(id, _)| PartitionId(id)).collect()
    }
}

/// Deals a data set's rows. A pure function of its arguments: `random` deals row groups (cut
/// where there are fewer than a few per partition) by seed, balanced in rows; `round_robin`
/// deals them in turn; `hash` takes the partition of each file as prepared.
pub fn deal(dataset: &Dataset, plan: &PartitionPlan, validation: f64, seed: u64) -> Partitions {
    let count = plan.count.max(1) as usize;
    let mut dealt = vec![Vec::new(); count];
    match plan.by {
        PartitionBy::Hash => {
            for split in row_groups(dataset) {
                let partition = dataset.files[split.file].partition.map_or(0, |id| id.0 as usize);
                dealt[partition % count].push(split);
            }
        }
        PartitionBy::RoundRobin => {
            for (turn, piece) in pieces(dataset, count).into_iter().enumerate() {
                dealt[turn % count].push(piece);
            }
        }
        PartitionBy::Random => {
            let mut pieces = pieces(dataset, count);
            SplitMix64::new(seed, Purpose::Deal, &[]).shuffle(&mut pieces);
            let weights: Vec<u64> = pieces.iter().map(Split::len).collect();
            for (partition, piece) in balance(&weights, count).into_iter().zip(pieces) {
                dealt[partition].push(piece);
            }
            dealt.iter_mut().for_each(|splits| splits.sort_unstable_by_key(|split| split.first_row));
        }
    }
    let held_out = Subset::new(seed, Purpose::HoldOut, validation);
    let partitions = dealt.into_par_iter().map(|splits| counted(splits, &held_out)).collect();
    Partitions { partitions, validation, seed }
}

/// Whether a row is held out: a hash of seed and row identity falls below the fraction.
pub fn is_held_out(seed: u64, row: u64, validation: f64) -> bool {
    Subset::new(seed, Purpose::HoldOut, validation).contains(row)
}

/// One split per row group that has rows, in order.
fn row_groups(dataset: &Dataset) -> Vec<Split> {
    let mut splits = Vec::new();
    let mut first_row = 0;
    for (file, data_file) in dataset.files.iter().enumerate() {
        for (row_group, group) in data_file.row_groups.iter().enumerate().filter(|(_, group)| group.rows > 0) {
            splits.push(Split { file, row_group, rows: 0..group.rows, first_row });
            first_row += group.rows;
        }
    }
    splits
}

/// What is dealt: row groups, the large ones cut into nearly equal pieces so that each of
/// `count` partitions can have its share. Reading a piece costs its whole row group on some
/// files, so where there are row groups enough only the very large ones are cut.
fn pieces(dataset: &Dataset, count: usize) -> Vec<Split> {
    let groups = row_groups(dataset);
    let wanted = count as u64 * PIECES_PER_PARTITION;
    let target = dataset.rows().div_ceil(wanted).max(1);
    let limit = if groups.len() as u64 >= wanted { 2 * target } else { target };
    let cut = |split: Split| {
        let parts = if split.len() > limit { split.len().div_ceil(target) } else { 1 };
        let edge = move |part: u64| (u128::from(part) * u128::from(split.len()) / u128::from(parts)) as u64;
        (0..parts).map(|part| split.part(edge(part)..edge(part + 1))).collect::<Vec<_>>()
    };
    groups.into_iter().flat_map(cut).collect()
}

/// A place in `0..count` for each weight: the largest first, each to the place that has least
/// so far (then fewest, then lowest); equal weights keep their order. No two places differ by
/// more than the largest weight.
fn balance(weights: &[u64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|index| Reverse(weights[*index]));
    let mut places: BinaryHeap<_> = (0..count).map(|place| Reverse((0_u64, 0_usize, place))).collect();
    let mut chosen = vec![0; weights.len()];
    for index in order {
        if let Some(mut least) = places.peek_mut() {
            let (weight, items, place) = &mut least.0;
            chosen[index] = *place;
            *weight += weights[index];
            *items += 1;
        }
    }
    chosen
}

fn counted(splits: Vec<Split>, held_out: &Subset) -> Partition {
    let rows: u64 = splits.iter().map(Split::len).sum();
    let held_out_rows = if held_out.is_empty() {
        0
    } else {
        splits.iter().flat_map(Split::identities).filter(|row| held_out.contains(*row)).count() as u64
    };
    Partition { splits, train_rows: rows - held_out_rows, held_out_rows }
}

/// How many rows of each partition meet in each step of an epoch: every training row once,
/// `batch` rows per step (the last may have fewer), drawn from all partitions in proportion
/// to their rows. Independent of who owns which partition, so any number of executors gives
/// the same steps.
#[derive(Clone, Debug)]
pub struct StepPlan {
    partition_rows: Vec<u64>,
    total: u64,
    batch: u64,
}

impl StepPlan {
    /// A plan over the partitions' training rows.
    pub fn new(partition_rows: &[u64], batch: usize) -> Self {
        let total = partition_rows.iter().sum();
        Self { partition_rows: partition_rows.to_vec(), total, batch: batch.max(1) as u64 }
    }

    /// Steps of one epoch.
    pub fn steps(&self) -> u64 {
        self.total.div_ceil(self.batch)
    }

    /// Rows of step `step` (of an epoch, from 0) over all partitions: the batch, or the rest.
    pub fn rows(&self, step: u64) -> u64 {
        self.batch.min(self.total.saturating_sub(step.saturating_mul(self.batch)))
    }

    /// The rows that each partition gives to each step, in order of steps.
    pub fn counts(&self) -> impl Iterator<Item = Vec<usize>> + Send + 'static + use<> {
        let plan = self.clone();
        let mut given = vec![0; plan.partition_rows.len()];
        (0..plan.steps()).map(move |step| plan.share(step, &mut given))
    }

    /// Shares one step's rows out, one by one to the partition that is furthest behind its
    /// share of the rows given so far (ties to the lower index); whole rows of arrears are
    /// given at once. Exact, in units of 1/total rows.
    fn share(&self, step: u64, given: &mut [u64]) -> Vec<usize> {
        let total = i128::from(self.total);
        let until = i128::from(step * self.batch + self.rows(step));
        let arrears = |partition: usize, given: u64| {
            i128::from(self.partition_rows[partition]) * until - i128::from(given) * total
        };
        let mut counts: Vec<u64> =
            given.iter().enumerate().map(|(p, given)| (arrears(p, *given) / total).max(0) as u64).collect();
        let mut spare = self.rows(step) as i64 - counts.iter().sum::<u64>() as i64;
        while spare != 0 {
            let left = |p: &usize| arrears(*p, given[*p] + counts[*p]);
            let mut order: Vec<usize> = (0..counts.len()).filter(|p| spare > 0 || counts[*p] > 0).collect();
            order.sort_by_key(|p| Reverse(left(p)));
            // Shares lag behind by less than a row each, so that one round settles it; only
            // where several fall due at once must some wait for the next step.
            if spare > 0 {
                order.iter().take(spare as usize).for_each(|p| counts[*p] += 1);
                spare -= order.len().min(spare as usize) as i64;
            } else {
                order.iter().rev().take(-spare as usize).for_each(|p| counts[*p] -= 1);
                spare += order.len().min(-spare as usize) as i64;
            }
        }
        given.iter_mut().zip(&counts).for_each(|(given, count)| *given += count);
        counts.into_iter().map(|count| count as usize).collect()
    }
}
