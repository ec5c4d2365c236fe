//! Rows dealt to partitions, and steps planned over them: pure functions, no I/O.

use std::{cmp::Reverse, collections::BinaryHeap, ops::Range};

use rayon::prelude::*;

use super::{
    prepare::Dataset,
    read::all_splits,
    shuffle::{Purpose, SplitMix64, Subset},
};
use crate::{
    ids::{PartitionId, Rank},
    limits,
    pipeline::{PartitionPlan, spec::PartitionBy},
};

/// Pieces that a partition gets at least, if there are rows enough: with fewer, shuffling them
/// from epoch to epoch changes little, and one odd row group makes a partition too full.
const PIECES_PER_PARTITION: u64 = 4;

/// Partitions change hands if the slowest rank then takes at most this part of its time.
const WORTH: f64 = 0.9;

/// The partitions of a rank, in order.
pub fn owned(owners: &[usize], rank: Rank) -> Vec<PartitionId> {
    (0..).zip(owners).filter(|(_, owner)| **owner == rank.0 as usize).map(|(id, _)| PartitionId(id)).collect()
}

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
        owned(&self.owners(world_size), rank)
    }

    /// The rank that owns each partition.
    pub fn owners(&self, world_size: u32) -> Vec<usize> {
        balance(&self.weights(), world_size as usize)
    }

    /// Rows to train on, by partition.
    pub fn weights(&self) -> Vec<u64> {
        self.partitions.iter().map(|partition| partition.train_rows).collect()
    }

    /// Other owners, where they would bring the slowest rank's time down by a tenth or more, and by
    /// `limits::REBALANCING` at least; `s_per_row` is what a row takes each rank. The largest
    /// partition first, each to the rank that is done with it first (Graham 1969, on machines of
    /// unlike speed).
    pub fn rebalanced(&self, owners: &[usize], s_per_row: &[f64]) -> Option<Vec<usize>> {
        let weights = self.weights();
        let slowest = |owners: &[usize]| {
            let mut busy_s = vec![0.0; s_per_row.len()];
            owners.iter().zip(&weights).for_each(|(owner, rows)| busy_s[*owner] += *rows as f64 * s_per_row[*owner]);
            busy_s.into_iter().fold(0.0, f64::max)
        };
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by_key(|partition| Reverse(weights[*partition]));
        let (mut rows, mut better) = (vec![0; s_per_row.len()], vec![0; weights.len()]);
        for partition in order {
            let done = |rank: &usize| (rows[*rank] + weights[partition]) as f64 * s_per_row[*rank];
            let first = (0..s_per_row.len()).min_by(|a, b| done(a).total_cmp(&done(b))).unwrap_or_default();
            rows[first] += weights[partition];
            better[partition] = first;
        }
        let (now_s, then_s) = (slowest(owners), slowest(&better));
        (then_s < WORTH * now_s && now_s - then_s >= limits::REBALANCING.as_secs_f64()).then_some(better)
    }
}

/// Deals a data set's rows. A pure function of its arguments: `random` deals row groups (or
/// equal pieces, where there are fewer than a few row groups per partition) by seed, balanced
/// in rows; `round_robin` deals the same in turn; `hash` takes the partition of each file as prepared.
pub fn deal(dataset: &Dataset, plan: &PartitionPlan, validation: f64, seed: u64) -> Partitions {
    let count = plan.count.max(1) as usize;
    let mut dealt = vec![Vec::new(); count];
    match plan.by {
        PartitionBy::Hash => {
            for split in all_splits(dataset) {
                let partition = dataset.files[split.file].partition.map_or(0, |id| id.0 as usize);
                dealt[partition % count].push(split);
            }
        }
        PartitionBy::RoundRobin => {
            for (turn, piece) in pieces(dataset, count).into_iter().enumerate() {
                dealt[turn % count].extend(piece);
            }
        }
        PartitionBy::Random => {
            let mut pieces = pieces(dataset, count);
            SplitMix64::new(seed, Purpose::Deal, &[]).shuffle(&mut pieces);
            let rows = |piece: &Vec<Split>| piece.iter().map(Split::len).sum();
            let weights: Vec<u64> = pieces.iter().map(rows).collect();
            for (partition, piece) in balance(&weights, count).into_iter().zip(pieces) {
                dealt[partition].extend(piece);
            }
            for splits in &mut dealt {
                splits.sort_unstable_by_key(|split| split.first_row);
            }
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

/// What is dealt: whole row groups where there are enough of them and none is a giant, for
/// reading a part of one may cost as much as reading all of it. Else the data set is cut into
/// `PIECES_PER_PARTITION * count` pieces of equal rows, each of one or more splits.
fn pieces(dataset: &Dataset, count: usize) -> Vec<Vec<Split>> {
    let groups: Vec<Split> = all_splits(dataset).into_iter().filter(|group| group.len() > 0).collect();
    let wanted = count as u64 * PIECES_PER_PARTITION;
    let total = dataset.rows();
    let giant = groups.iter().any(|group| group.len() > 2 * total.div_ceil(wanted));
    if groups.len() as u64 >= wanted && !giant {
        return groups.into_iter().map(|group| vec![group]).collect();
    }
    let edge = |piece: usize| (u128::from(total) * (piece as u128) / u128::from(wanted)) as u64;
    let mut pieces = vec![Vec::new(); wanted as usize];
    let mut piece = 0;
    for group in groups {
        let mut row = 0;
        while row < group.len() {
            while edge(piece + 1) <= group.first_row + row {
                piece += 1;
            }
            let end = group.len().min(edge(piece + 1) - group.first_row);
            pieces[piece].push(group.part(row..end));
            row = end;
        }
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

/// Consecutive ranges of the weights, `parts` of them, so that the heaviest is as light as can be;
/// none is empty unless there are fewer weights than parts.
pub fn consecutive(weights: &[u64], parts: usize) -> Vec<Range<usize>> {
    let (mut least, mut most) = (weights.iter().copied().max().unwrap_or(0), weights.iter().sum::<u64>());
    while least < most {
        let middle = least + (most - least) / 2;
        if fill(weights, parts, middle).last().is_none_or(|last| last.end == weights.len()) {
            most = middle;
        } else {
            least = middle + 1;
        }
    }
    fill(weights, parts, least)
}

/// Ranges that each take what comes next up to `limit`, but leave a weight to each that follows.
fn fill(weights: &[u64], parts: usize, limit: u64) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |part: usize| {
        let (start, last) = (end, weights.len().saturating_sub(parts - 1 - part));
        let mut load = 0;
        while end < weights.len() && (end == start || (end < last && load + weights[end] <= limit)) {
            load += weights[end];
            end += 1;
        }
        start..end
    };
    (0..parts).map(range).collect()
}

/// A place in `0..count` for each weight: the largest first, each to the place that has least
/// so far (then fewest, then lowest); equal weights keep their order. No two places differ by
/// more than the largest weight.
pub fn balance(weights: &[u64], count: usize) -> Vec<usize> {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parquet::{
        basic::Type,
        file::metadata::{FileMetaData, ParquetMetaData},
        schema::types::{SchemaDescriptor, Type as SchemaType},
    };
    use proptest::prelude::*;

    use super::*;
    use crate::{
        data::{DataFile, RowGroup},
        storage::FileEntry,
    };

    /// A data set of files with row groups of these sizes; the footers are empty.
    fn dataset(files: &[Vec<u64>]) -> Dataset {
        let field = SchemaType::primitive_type_builder("x", Type::FLOAT).build().unwrap();
        let root = SchemaType::group_type_builder("root").with_fields(vec![Arc::new(field)]).build().unwrap();
        let schema = Arc::new(SchemaDescriptor::new(Arc::new(root)));
        let metadata = Arc::new(ParquetMetaData::new(FileMetaData::new(2, 0, None, None, schema, None), vec![]));
        let file = |(index, groups): (usize, &Vec<u64>)| DataFile {
            entry: FileEntry {
                location: serde_json::from_value(format!("memory:///{index}").into()).unwrap(),
                size_bytes: 0,
                modified_ms: 0,
            },
            row_groups: groups.iter().map(|rows| RowGroup { rows: *rows, size_bytes: 0 }).collect(),
            partition: Some(PartitionId(index as u32 % 3)),
            metadata: Arc::clone(&metadata),
        };
        Dataset {
            schema: Arc::new(arrow::datatypes::Schema::empty()),
            files: files.iter().enumerate().map(file).collect(),
            rejected: std::collections::BTreeMap::new(),
        }
    }

    fn plan(by: PartitionBy, count: u32) -> PartitionPlan {
        PartitionPlan { by, columns: Vec::new(), count, choose: false }
    }

    fn identities(partitions: &Partitions) -> Vec<u64> {
        let mut rows: Vec<u64> = partitions
            .partitions
            .iter()
            .flat_map(|partition| partition.splits.iter().flat_map(Split::identities))
            .collect();
        rows.sort_unstable();
        rows
    }

    fn any_files() -> impl Strategy<Value = Vec<Vec<u64>>> {
        proptest::collection::vec(proptest::collection::vec(0_u64..300, 0..6), 0..8)
    }

    fn any_rule() -> impl Strategy<Value = PartitionBy> {
        prop_oneof![Just(PartitionBy::Random), Just(PartitionBy::RoundRobin), Just(PartitionBy::Hash)]
    }

    #[test]
    fn a_slow_rank_hands_partitions_over() {
        let partition = |train_rows| Partition { train_rows, ..Partition::default() };
        let partitions = Partitions { partitions: [100; 8].map(partition).to_vec(), validation: 0.0, seed: 0 };
        let owners = partitions.owners(2);
        assert_eq!(partitions.rebalanced(&owners, &[1.0, 1.05]), None, "not worth it");
        assert_eq!(partitions.rebalanced(&owners, &[1e-4, 3e-4]), None, "soon over");
        let better = partitions.rebalanced(&owners, &[1.0, 3.0]).unwrap();
        assert_eq!((owned(&better, Rank(0)).len(), owned(&better, Rank(1)).len()), (6, 2));
        assert_eq!(partitions.rebalanced(&better, &[1.0, 3.0]), None);
    }

    proptest! {
        #[test]
        fn every_row_is_dealt_once(
            files in any_files(), by in any_rule(), count in 1_u32..20, seed: u64, validation in 0.0_f64..0.9,
        ) {
            let dataset = dataset(&files);
            let partitions = deal(&dataset, &plan(by, count), validation, seed);
            prop_assert_eq!(partitions.partitions.len(), count as usize);
            prop_assert_eq!(identities(&partitions), (0..dataset.rows()).collect::<Vec<_>>());
            for partition in &partitions.partitions {
                prop_assert!(partition.splits.is_sorted_by_key(|split| split.first_row));
                let rows: Vec<u64> = partition.splits.iter().flat_map(Split::identities).collect();
                let held_out = rows.iter().filter(|row| is_held_out(seed, **row, validation)).count();
                prop_assert_eq!(partition.held_out_rows, held_out as u64);
                prop_assert_eq!(partition.train_rows + partition.held_out_rows, rows.len() as u64);
                for split in &partition.splits {
                    prop_assert!(split.rows.end <= dataset.files[split.file].row_groups[split.row_group].rows);
                }
            }
            prop_assert_eq!(&partitions, &deal(&dataset, &plan(by, count), validation, seed));
        }

        #[test]
        fn random_differs_by_one_piece_at_most(files in any_files(), count in 1_u32..20, seed: u64) {
            let dataset = dataset(&files);
            let partitions = deal(&dataset, &plan(PartitionBy::Random, count), 0.0, seed);
            let rows = partitions.partitions.iter().map(|partition| partition.train_rows);
            let pieces = pieces(&dataset, count as usize);
            let largest = pieces.iter().map(|piece| piece.iter().map(Split::len).sum::<u64>()).max().unwrap_or(0);
            let whole = pieces.iter().flatten().all(|split| split.rows.start == 0);
            let most = if whole { largest } else { 1 };
            prop_assert!(rows.clone().max().unwrap() - rows.min().unwrap() <= most);
        }

        #[test]
        fn consecutive_ranges_are_as_even_as_can_be(weights in proptest::collection::vec(0_u64..50, 1..9), parts in 1_usize..9) {
            let heaviest = |ranges: &[Range<usize>]| {
                ranges.iter().map(|range| weights[range.clone()].iter().sum::<u64>()).max().unwrap()
            };
            let ranges = consecutive(&weights, parts);
            prop_assert_eq!(ranges.len(), parts);
            prop_assert_eq!(ranges.iter().flat_map(Range::clone).collect::<Vec<_>>(), (0..weights.len()).collect::<Vec<_>>());
            prop_assert_eq!(ranges.iter().filter(|range| !range.is_empty()).count(), parts.min(weights.len()));
            // Every way to cut, as a mask of where.
            let best = (0..1_u32 << (weights.len() - 1)).filter(|cuts| (cuts.count_ones() as usize) < parts).map(|cuts| {
                let (mut most, mut load) = (0, 0);
                for (index, weight) in weights.iter().enumerate() {
                    load = if index > 0 && cuts >> (index - 1) & 1 == 1 { *weight } else { load + weight };
                    most = most.max(load);
                }
                most
            }).min().unwrap();
            prop_assert_eq!(heaviest(&ranges), best);
        }

        #[test]
        fn every_partition_has_one_owner(rows in proptest::collection::vec(0_u64..50, 0..20), world in 1_u32..30) {
            let partition = |rows: u64| Partition { train_rows: rows, ..Partition::default() };
            let partitions = Partitions {
                partitions: rows.iter().map(|rows| partition(*rows)).collect(), validation: 0.0, seed: 0,
            };
            let owned: Vec<_> = (0..world).map(|rank| partitions.owned_by(Rank(rank), world)).collect();
            let mut all: Vec<PartitionId> = owned.iter().flatten().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..rows.len() as u32).map(PartitionId).collect::<Vec<_>>());
            let load = owned.iter().map(|owned| owned.iter().map(|id| rows[id.0 as usize]).sum::<u64>());
            let most = rows.iter().copied().max().unwrap_or(0);
            prop_assert!(load.clone().max().unwrap() - load.min().unwrap() <= most);
        }

        #[test]
        fn steps_share_every_row_in_proportion(
            rows in proptest::collection::vec(prop_oneof![0_u64..4, 0_u64..200], 0..12), batch in 1_usize..50,
        ) {
            let plan = StepPlan::new(&rows, batch);
            let total: u64 = rows.iter().sum();
            prop_assert_eq!(plan.steps(), total.div_ceil(batch as u64));
            let mut given = vec![0_u64; rows.len()];
            let mut steps = 0;
            for counts in plan.counts() {
                prop_assert_eq!(counts.iter().sum::<usize>() as u64, plan.rows(steps));
                steps += 1;
                let until = (steps * batch as u64).min(total) as f64;
                for (partition, count) in counts.into_iter().enumerate() {
                    given[partition] += count as u64;
                    // Never a whole row ahead of its share.
                    let share = rows[partition] as f64 * until / total as f64;
                    prop_assert!((given[partition] as f64) < share + 1.0 + 1e-9);
                }
            }
            prop_assert_eq!(steps, plan.steps());
            prop_assert_eq!(given, rows);
        }
    }

    #[test]
    fn steps_of_equal_partitions_are_even() {
        let plan = StepPlan::new(&[5, 5, 5], 4);
        let counts: Vec<_> = plan.counts().collect();
        assert_eq!(counts, [vec![2, 1, 1], vec![1, 2, 1], vec![1, 1, 2], vec![1, 1, 1]]);
        assert_eq!((plan.rows(2), plan.rows(3), plan.rows(4)), (4, 3, 0));
        let large = StepPlan::new(&[u64::from(u32::MAX); 8], 1 << 20);
        assert_eq!(large.counts().flatten().sum::<usize>(), u32::MAX as usize * 8);
        assert_eq!(StepPlan::new(&[], 4).steps(), 0);
        assert_eq!(StepPlan::new(&[0, 0], 4).counts().count(), 0);
    }

    #[test]
    fn whole_row_groups_where_there_are_enough() {
        let check = |files: &[Vec<u64>], count, expected: usize| {
            let pieces = pieces(&dataset(files), count);
            assert_eq!(pieces.len(), expected, "{files:?}");
        };
        check(&[vec![100; 40]], 8, 40);
        // A last, short row group does not cut the others.
        check(&[vec![100; 39], vec![1]], 8, 40);
        check(&[vec![100]], 8, 32);
        check(&[vec![10; 7], vec![100]], 8, 32);
        check(&[vec![3]], 8, 3);
        check(&[vec![0], vec![]], 8, 0);
        // One giant among many.
        check(&[vec![1; 40], vec![10_000]], 8, 32);
    }

    #[test]
    fn hash_takes_the_partition_of_the_file_and_seeds_matter() {
        let files = dataset(&[vec![5, 5], vec![7], vec![9], vec![1]]);
        let rows = |partitions: &Partitions| -> Vec<u64> {
            partitions.partitions.iter().map(|partition| partition.train_rows).collect()
        };
        let hash = deal(&files, &plan(PartitionBy::Hash, 4), 0.0, 1);
        assert_eq!(rows(&hash), [11, 7, 9, 0]);
        assert!((hash.skew() - 11.0 * 4.0 / 27.0).abs() < 1e-12);
        let many = dataset(&[vec![10; 100]]);
        let dealt = |seed| deal(&many, &plan(PartitionBy::Random, 4), 0.0, seed);
        assert_ne!(dealt(1), Partitions { seed: 1, ..dealt(2) });
        assert_eq!(dealt(1).skew(), 1.0);
        assert_eq!(deal(&dataset(&[]), &plan(PartitionBy::Random, 4), 0.5, 1).skew(), 1.0);
    }
}
