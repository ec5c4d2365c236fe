//! What of a data set is kept and what is read again, within a budget: a function of the whole
//! run's rows and memory, so that it is the same for any number of executors.

use crate::{data::partition::Partitions, limits};

/// Bytes of a row's place in an order, next to its features.
const ORDER_BYTES: u64 = size_of::<u32>() as u64;

/// How the budget is spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Budget {
    pub keep: Keep,
    /// Rows of one shuffle buffer, at least 1; a partition has two: one is drawn from, one is
    /// filled. Of no meaning where all rows are kept.
    pub chunk_rows: usize,
    /// Batches assembled ahead, at least 1.
    pub prefetch: usize,
    /// Partitions of a rank that are decoded at the same time to be kept, at least 1.
    pub loads: usize,
}

/// Which rows are decoded once and kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// All.
    All,
    /// The held-out ones, which are needed in the same order after every epoch.
    HeldOut,
    /// None.
    Nothing,
}

impl Budget {
    /// Spends `memory_bytes` on rows of `width` features. Whoever reads holds a row group: of
    /// `group_bytes` at most.
    pub fn new(partitions: &Partitions, group_bytes: u64, width: usize, batch: usize, memory_bytes: u64) -> Self {
        let row_bytes = (width * size_of::<f32>()) as u64;
        let batch_bytes = row_bytes.saturating_mul(batch as u64).max(1);
        // A quarter at most goes into batches: those in the channel, the one that is assembled
        // and the one that is trained on.
        let in_flight = (memory_bytes / 4 / batch_bytes).clamp(3, limits::PREFETCH_BATCHES as u64 + 2);
        let prefetch = in_flight as usize - 2;
        let left = memory_bytes.saturating_sub(in_flight.saturating_mul(batch_bytes)).max(memory_bytes / 4);
        let loads = (memory_bytes / 4 / group_bytes.max(1)).clamp(1, limits::MAX_PARTITIONS.into()) as usize;

        let bytes = |rows: u64| rows.saturating_mul(row_bytes + ORDER_BYTES);
        // An epoch's order is a second set of places.
        let all = bytes(partitions.train_rows() + partitions.held_out_rows()) + partitions.train_rows() * ORDER_BYTES;
        let countable = |rows: u64| u32::try_from(rows).is_ok();
        let rows = partitions.partitions.iter().map(|partition| partition.train_rows + partition.held_out_rows);
        if all <= left && rows.clone().all(countable) {
            return Self { keep: Keep::All, chunk_rows: 1, prefetch, loads };
        }
        let readers = rows.filter(|rows| *rows > 0).count().max(1) as u64;
        let left = left.saturating_sub(readers.saturating_mul(group_bytes)).max(left / 4);
        let held_out = bytes(partitions.held_out_rows());
        let (keep, left) = if held_out <= left / 4 { (Keep::HeldOut, left - held_out) } else { (Keep::Nothing, left) };
        let chunk_rows = (left / (2 * readers) / (row_bytes + ORDER_BYTES)).clamp(1, u64::from(u32::MAX)) as usize;
        Self { keep, chunk_rows, prefetch, loads }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::partition::Partition;

    fn partitions(rows: &[(u64, u64)]) -> Partitions {
        let partition = |(train_rows, held_out_rows): &(u64, u64)| Partition {
            splits: Vec::new(),
            train_rows: *train_rows,
            held_out_rows: *held_out_rows,
        };
        Partitions { partitions: rows.iter().map(partition).collect(), validation: 0.0, seed: 0 }
    }

    #[test]
    fn keeps_what_fits_and_never_spends_more() {
        let check = |rows: &[(u64, u64)], batch, memory_bytes: u64, keep| {
            let budget = Budget::new(&partitions(rows), 1000, 100, batch, memory_bytes);
            assert_eq!(budget.keep, keep, "{rows:?} in {memory_bytes}");
            let readers = rows.iter().filter(|rows| rows.0 + rows.1 > 0).count() as u64;
            let used = readers * (2 * budget.chunk_rows as u64 * 404 + 1000);
            let kept: u64 = if keep == Keep::HeldOut { rows.iter().map(|rows| rows.1 * 404).sum() } else { 0 };
            let batches = (budget.prefetch as u64 + 2) * batch as u64 * 400;
            assert!(keep == Keep::All || used + kept + batches <= memory_bytes, "{budget:?}");
        };
        check(&[(1000, 0); 8], 256, 8 << 20, Keep::All);
        check(&[(1000, 0); 8], 256, 3 << 20, Keep::HeldOut);
        check(&[(900, 100); 8], 256, 3 << 20, Keep::HeldOut);
        check(&[(500, 500); 8], 256, 3 << 20, Keep::Nothing);
        check(&[(0, 0), (100_000, 0), (0, 0)], 64, 3 << 20, Keep::HeldOut);
        check(&[], 256, 3 << 20, Keep::All);
    }

    #[test]
    fn a_budget_too_small_for_anything_still_moves() {
        let budget = Budget::new(&partitions(&[(1 << 40, 0)]), 1 << 30, 1 << 20, 8192, 1 << 20);
        assert_eq!(budget, Budget { keep: Keep::HeldOut, chunk_rows: 1, prefetch: 1, loads: 1 });
    }
}
