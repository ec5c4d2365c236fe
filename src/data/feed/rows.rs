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

/// What is drawn from a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Draw {
    /// Its training rows in the order of an epoch.
    Epoch(u32),
    /// Its held-out rows in their order.
    HeldOut,
}

/// A partition's rows, decoded once: all, or the held-out ones.
#[derive(Debug)]
pub(super) struct Kept {
    x: Arc<Vec<f32>>,
    train: Vec<u32>,
    held_out: Vec<u32>,
}

impl Kept {
    /// The rows of a draw.
    pub fn draw(&self, draw: Draw, seed: u64, partition: PartitionId) -> Chunk {
        let order = match draw {
            Draw::Epoch(epoch) => {
                let mut order = self.train.clone();
                SplitMix64::new(seed, Purpose::Epoch, &[epoch.into(), partition.0.into()]).shuffle(&mut order);
                order
            }
            Draw::HeldOut => self.held_out.clone(),
        };
        Chunk { x: Arc::clone(&self.x), order }
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
    fn reader(self: &Arc<Self>, splits: Vec<Split>, wanted: Wanted) -> Reader {
        let stream = read(&self.storage, &self.plan.dataset, splits, &self.columns);
        Reader { source: Arc::clone(self), stream, wanted, open: None, scratch: Vec::new() }
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

    /// Sends the rows of a draw in chunks of `chunk_rows`, from the chunk that holds the row
    /// `from` of the draw; those of an epoch each in an order of its own. The next chunk is
    /// read only once the one before the last has been taken, so that two are in memory at most.
    pub async fn send_chunks(
        self: Arc<Self>,
        draw: Draw,
        partition: PartitionId,
        chunk_rows: usize,
        from: u64,
        chunks: mpsc::Sender<Result<Chunk, DataError>>,
    ) {
        let seed = self.plan.partitions.seed;
        let first = from / chunk_rows as u64;
        let mut found = first * chunk_rows as u64;
        let mut splits = self.splits(partition);
        let wanted = match draw {
            Draw::Epoch(epoch) => {
                SplitMix64::new(seed, Purpose::Epoch, &[epoch.into(), partition.0.into()]).shuffle(&mut splits);
                Wanted::Train
            }
            Draw::HeldOut => Wanted::HeldOut,
        };
        let expected = self.expected(partition, wanted);
        let mut reader = self.reader(self.skip(splits, found, wanted), wanted);
        for number in first.. {
            if found == expected {
                return;
            }
            let Ok(place) = chunks.reserve().await else { return };
            let rows = (expected - found).min(chunk_rows as u64) as usize;
            let mut x = Vec::with_capacity(rows * self.width);
            if let Err(error) = reader.fill(rows, &mut x).await {
                return place.send(Err(error));
            }
            let read = x.len() / self.width;
            found += read as u64;
            if read < rows {
                return place.send(Err(FeedError::Lost { partition, found, expected }.into()));
            }
            let mut order: Vec<u32> = (0..rows as u32).collect();
            if let Draw::Epoch(epoch) = draw {
                let parts = [epoch.into(), partition.0.into(), number];
                SplitMix64::new(seed, Purpose::Chunk, &parts).shuffle(&mut order);
            }
            place.send(Ok(Chunk { x: Arc::new(x), order }));
        }
    }

    /// The splits without their first `rows` wanted rows.
    fn skip(&self, splits: Vec<Split>, mut rows: u64, wanted: Wanted) -> Vec<Split> {
        let mut left = Vec::with_capacity(splits.len());
        for split in splits {
            let mut end = 0;
            if self.wants_all(wanted) {
                end = rows.min(split.len());
                rows -= end;
            }
            while rows > 0 && end < split.len() {
                rows -= u64::from(self.wants(wanted, split.first_row + end));
                end += 1;
            }
            if end < split.len() {
                left.push(split.part(end..split.len()));
            }
        }
        left
    }

    fn wants_all(&self, wanted: Wanted) -> bool {
        wanted == Wanted::All || (wanted == Wanted::Train && self.held_out.is_empty())
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
            rows -= self.take(&batch, rows, out)?;
        }
        Ok(())
    }

    /// Appends up to `rows` wanted rows of a batch and keeps its rest.
    fn take(&mut self, rows: &Rows, limit: usize, out: &mut Vec<f32>) -> Result<usize, DataError> {
        let Self { source, wanted, scratch, .. } = self;
        let file = source.plan.dataset.files[rows.file].entry.location.to_string();
        let all = rows.batch.num_rows();
        let (taken, end) = if source.wants_all(*wanted) {
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
            for place in &places {
                copy_row(scratch, *place as u32, source.width, out);
            }
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
