//! The rows of a partition as f32: all at once and kept, or chunk by chunk.

use std::sync::Arc;

use futures::{TryStreamExt, stream::BoxStream};
use tokio::sync::mpsc;

use super::{FeedError, FeedPlan};
use crate::{
    data::{
        DataError,
        partition::Split,
        read::{Rows, read},
        shuffle::{Purpose, SplitMix64, Subset},
    },
    ids::PartitionId,
    storage::Storage,
};

/// Rows in memory and an order to draw them in.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Row-major.
    pub x: Arc<Vec<f32>>,
    /// Indices of rows.
    pub order: Vec<u32>,
}

/// A partition's rows, decoded once: all, or the held-out ones.
#[derive(Debug)]
pub(super) struct Kept {
    x: Arc<Vec<f32>>,
    train: Vec<u32>,
    /// Indices of the rows held out, in their order.
    pub held_out: Vec<u32>,
}

impl Kept {
    /// The training rows in the order of an epoch.
    pub fn epoch(&self, seed: u64, epoch: u32, partition: PartitionId) -> Chunk {
        let mut order = self.train.clone();
        SplitMix64::new(seed, Purpose::Epoch, &[epoch.into(), partition.0.into()]).shuffle(&mut order);
        Chunk { x: Arc::clone(&self.x), order }
    }

    /// Appends a row.
    pub fn copy_row(&self, index: u32, width: usize, out: &mut Vec<f32>) {
        copy_row(&self.x, index, width, out);
    }
}

/// Appends a row of a row-major matrix.
pub(super) fn copy_row(x: &[f32], index: u32, width: usize, out: &mut Vec<f32>) {
    let start = index as usize * width;
    out.extend_from_slice(&x[start..start + width]);
}

/// Which rows of a partition are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    All,
    Train,
    HeldOut,
}

/// Gives a partition's rows.
pub(super) struct Source {
    storage: Storage,
    pub plan: FeedPlan,
    columns: Vec<String>,
    pub width: usize,
    held_out: Subset,
}

impl Source {
    pub fn new(storage: Storage, plan: FeedPlan) -> Self {
        let (columns, width) = (plan.features.columns(), plan.features.width());
        let held_out = Subset::new(plan.partitions.seed, Purpose::HoldOut, plan.partitions.validation);
        Self { storage, plan, columns, width, held_out }
    }

    /// The splits of a partition.
    fn splits(&self, partition: PartitionId) -> Vec<Split> {
        self.plan.partitions.partitions[partition.0 as usize].splits.clone()
    }

    /// Rows of a partition that are wanted.
    fn expected(&self, partition: PartitionId, wanted: Wanted) -> u64 {
        let partition = &self.plan.partitions.partitions[partition.0 as usize];
        match wanted {
            Wanted::All => partition.train_rows + partition.held_out_rows,
            Wanted::Train => partition.train_rows,
            Wanted::HeldOut => partition.held_out_rows,
        }
    }

    /// Reads the wanted rows of some splits, in order.
    pub fn reader(self: &Arc<Self>, splits: Vec<Split>, wanted: Wanted) -> Reader {
        let stream = read(&self.storage, &self.plan.dataset, splits, &self.columns);
        Reader { source: Arc::clone(self), stream, wanted, open: None, scratch: Vec::new() }
    }

    /// Reads the held-out rows of a partition, in order.
    pub fn held_out(self: &Arc<Self>, partition: PartitionId) -> Reader {
        self.reader(self.splits(partition), Wanted::HeldOut)
    }

    /// Decodes a partition, all of it or the rows held out.
    pub async fn keep(self: Arc<Self>, partition: PartitionId, wanted: Wanted) -> Result<Kept, DataError> {
        let expected = self.expected(partition, wanted);
        let mut x = Vec::with_capacity(expected as usize * self.width);
        if expected > 0 {
            let mut reader = self.reader(self.splits(partition), wanted);
            reader.fill(usize::MAX, &mut x).await?;
        }
        let found = (x.len() / self.width) as u64;
        if found != expected {
            return Err(FeedError::Lost { partition, found, expected }.into());
        }
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        let identities =
            self.plan.partitions.partitions[partition.0 as usize].splits.iter().flat_map(Split::identities);
        let identities = identities.filter(|row| self.wants(wanted, *row));
        for (index, row) in (0..).zip(identities) {
            if self.held_out.contains(row) { held_out.push(index) } else { train.push(index) }
        }
        Ok(Kept { x: Arc::new(x), train, held_out })
    }

    /// Sends an epoch's training rows in chunks of `chunk_rows`, each in an order of its own,
    /// from the chunk that holds the training row `from`. The next chunk is read only once the
    /// one before the last has been taken, so that two are in memory at most.
    pub async fn send_chunks(
        self: Arc<Self>,
        epoch: u32,
        partition: PartitionId,
        chunk_rows: usize,
        from: u64,
        chunks: mpsc::Sender<Result<Chunk, DataError>>,
    ) {
        let mut splits = self.splits(partition);
        let parts = [epoch.into(), partition.0.into()];
        SplitMix64::new(self.plan.partitions.seed, Purpose::Epoch, &parts).shuffle(&mut splits);
        let first = from / chunk_rows as u64;
        let mut found = first * chunk_rows as u64;
        let expected = self.expected(partition, Wanted::Train);
        let mut reader = self.reader(skip_rows(splits, found, &self.held_out), Wanted::Train);
        for number in first.. {
            if found == expected {
                return;
            }
            let Ok(place) = chunks.reserve().await else { return };
            let rows = (expected - found).min(chunk_rows as u64) as usize;
            let chunk = self.chunk(&mut reader, rows, &[epoch.into(), partition.0.into(), number]).await;
            let read = chunk.as_ref().map_or(rows, |chunk| chunk.order.len());
            let failed = chunk.is_err();
            found += read as u64;
            place.send(if read == rows { chunk } else { Err(FeedError::Lost { partition, found, expected }.into()) });
            if failed || read < rows {
                return;
            }
        }
    }

    async fn chunk(&self, reader: &mut Reader, rows: usize, parts: &[u64]) -> Result<Chunk, DataError> {
        let mut x = Vec::with_capacity(rows * self.width);
        reader.fill(rows, &mut x).await?;
        let mut order: Vec<u32> = (0..(x.len() / self.width) as u32).collect();
        SplitMix64::new(self.plan.partitions.seed, Purpose::Chunk, parts).shuffle(&mut order);
        Ok(Chunk { x: Arc::new(x), order })
    }

    fn wants(&self, wanted: Wanted, row: u64) -> bool {
        match wanted {
            Wanted::All => true,
            Wanted::Train => !self.held_out.contains(row),
            Wanted::HeldOut => self.held_out.contains(row),
        }
    }
}

/// Encoded rows of some splits, as many at a time as asked for.
pub(super) struct Reader {
    source: Arc<Source>,
    stream: BoxStream<'static, Result<Rows, DataError>>,
    wanted: Wanted,
    /// What is left of the last batch.
    open: Option<Rows>,
    scratch: Vec<f32>,
}

impl Reader {
    /// Appends up to `rows` wanted rows; fewer only at the end.
    pub async fn fill(&mut self, mut rows: usize, out: &mut Vec<f32>) -> Result<(), DataError> {
        while rows > 0 {
            let batch = match self.open.take() {
                Some(batch) => batch,
                None => match self.stream.try_next().await? {
                    Some(batch) => batch,
                    None => return Ok(()),
                },
            };
            rows -= self.take(batch, rows, out)?;
        }
        Ok(())
    }

    /// Appends up to `rows` wanted rows of a batch and keeps its rest.
    fn take(&mut self, rows: Rows, limit: usize, out: &mut Vec<f32>) -> Result<usize, DataError> {
        let Self { source, wanted, scratch, .. } = self;
        let file = source.plan.dataset.files[rows.file].entry.location.to_string();
        let all = rows.batch.num_rows();
        let everything = *wanted == Wanted::All || (*wanted == Wanted::Train && source.held_out.is_empty());
        let (taken, end) = if everything {
            let end = all.min(limit);
            source.plan.features.encode(&rows.batch.slice(0, end), &file, rows.row_in_file, out)?;
            (end, end)
        } else {
            let places = (0..all).filter(|place| source.wants(*wanted, rows.row + *place as u64));
            let places: Vec<usize> = places.take(limit).collect();
            let end = if places.len() == limit { places[limit - 1] + 1 } else { all };
            // Wanted and unwanted rows alternate; encoding them together and copying is
            // cheaper than encoding many short runs.
            scratch.clear();
            source.plan.features.encode(&rows.batch.slice(0, end), &file, rows.row_in_file, scratch)?;
            places.iter().for_each(|place| copy_row(scratch, *place as u32, source.width, out));
            (places.len(), end)
        };
        self.open = (end < all).then(|| Rows {
            batch: rows.batch.slice(end, all - end),
            file: rows.file,
            row_in_file: rows.row_in_file + end as u64,
            row: rows.row + end as u64,
        });
        Ok(taken)
    }
}

/// The splits without their first `rows` training rows.
fn skip_rows(splits: Vec<Split>, mut rows: u64, held_out: &Subset) -> Vec<Split> {
    let mut left = Vec::with_capacity(splits.len());
    for split in splits {
        if rows == 0 {
            left.push(split);
            continue;
        }
        let mut end = 0;
        if held_out.is_empty() {
            end = rows.min(split.len());
            rows -= end;
        } else {
            while rows > 0 && end < split.len() {
                rows -= u64::from(!held_out.contains(split.first_row + end));
                end += 1;
            }
        }
        if end < split.len() {
            left.push(split.part(end..split.len()));
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipping_counts_training_rows_only() {
        let splits: Vec<Split> = [(40, 30), (0, 40), (70, 30)]
            .map(|(first_row, rows)| Split { file: 0, row_group: 0, rows: 5..5 + rows, first_row })
            .to_vec();
        for fraction in [0.0, 0.3, 0.9] {
            let held_out = Subset::new(3, Purpose::HoldOut, fraction);
            let train = |splits: &[Split]| {
                let rows = splits.iter().flat_map(Split::identities);
                rows.filter(|row| !held_out.contains(*row)).collect::<Vec<_>>()
            };
            let all = train(&splits);
            for skip in 0..=all.len() {
                let left = skip_rows(splits.clone(), skip as u64, &held_out);
                assert_eq!(train(&left), all[skip..], "{fraction} {skip}");
                assert!(left.iter().all(|split| split.len() > 0));
            }
        }
    }
}
