//! Batches for one rank, assembled ahead in the background, in an order that only seed,
//! epoch and partition decide.
//!
//! ```text
//!   fits in memory:   partition ──decoded once──▶ Kept ──permuted──┐
//!                                                                  ├─▶ step by step, in order of ──▶ channel ──▶ next_batch
//!   does not:         partition ──each epoch──▶ Chunk, Chunk ──────┘   partitions: one Batch         bounded
//!                     splits shuffled           rows shuffled; one is drawn from, one is filled
//! ```
//!
//! Which of the two it is depends on the whole run's rows and memory, never on the number of
//! executors; so the rows that meet in a step are the same for any fleet.

mod error;
mod memory;
mod rows;

use std::sync::Arc;

use datafusion::common::runtime::SpawnedTask;
use futures::future::try_join_all;
use tokio::{
    runtime::Handle,
    sync::{OnceCell, Semaphore, mpsc},
};

pub use error::FeedError;

use self::{
    memory::{Budget, Keep},
    rows::{Chunk, Draw, Kept, Source, Wanted, copy_row},
};
use super::{
    DataError, StepPlan,
    features::FittedFeatures,
    partition::{Partition, Partitions},
    prepare::Dataset,
};
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
    /// Memory for rows in flight of the whole run, all ranks together; a rank uses the share of
    /// its partitions. What fits is decoded once and kept; what does not is read again each
    /// epoch through bounded shuffle buffers. Row groups that are being read count too, unless
    /// they are so large that one per partition takes most of it; an Arrow batch per partition,
    /// in the middle of being decoded, comes on top.
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

impl Owned {
    fn new(partition: PartitionId) -> Arc<Self> {
        Arc::new(Self { partition, kept: OnceCell::new() })
    }
}

/// The feed of one rank. Cheap to clone.
#[derive(Clone)]
pub struct Feed {
    inner: Arc<Inner>,
    runtime: Handle,
}

#[derive(Clone)]
struct Inner {
    source: Arc<Source>,
    steps: StepPlan,
    budget: Budget,
    /// Who may decode a partition to be kept.
    loads: Arc<Semaphore>,
    /// In order.
    owned: Vec<Arc<Owned>>,
}

/// A partition of this rank, with its rows once they are decoded, if they are kept.
struct Owned {
    partition: PartitionId,
    kept: OnceCell<Arc<Kept>>,
}

impl Feed {
    /// A feed; must be called within a tokio runtime, on which it reads.
    pub fn new(storage: Storage, plan: FeedPlan) -> Self {
        let rows: Vec<u64> = plan.partitions.partitions.iter().map(|partition| partition.train_rows).collect();
        let steps = StepPlan::new(&rows, plan.batch);
        let mut owned = plan.owned.clone();
        owned.sort_unstable();
        let owned = owned.into_iter().map(Owned::new).collect();
        let source = Arc::new(Source::new(storage, plan));
        let FeedPlan { dataset, partitions, batch, memory_bytes, .. } = &source.plan;
        let budget = Budget::new(partitions, dataset.largest_row_group(), source.width, *batch, *memory_bytes);
        let loads = Arc::new(Semaphore::new(budget.loads));
        Self { inner: Arc::new(Inner { source, steps, budget, loads, owned }), runtime: Handle::current() }
    }

    /// How the rows are dealt.
    pub fn partitions(&self) -> &Partitions {
        &self.inner.source.plan.partitions
    }

    /// The feed of the same rows for other partitions; what is decoded of those that stay is kept.
    #[must_use]
    pub fn owning(&self, mut owned: Vec<PartitionId>) -> Self {
        owned.sort_unstable();
        let before = &self.inner.owned;
        let keep = |id| before.iter().find(|owned| owned.partition == id).map_or_else(|| Owned::new(id), Arc::clone);
        let inner = Inner { owned: owned.into_iter().map(keep).collect(), ..Inner::clone(&self.inner) };
        Self { inner: Arc::new(inner), runtime: self.runtime.clone() }
    }

    /// The batches of an epoch (from 0) from step `from_step` on: exactly
    /// `StepPlan::steps() - from_step` batches, the same ones whether or not the epoch is
    /// entered in the middle.
    pub fn epoch(&self, epoch: u32, from_step: u64) -> EpochFeed {
        let batches = self.inner.steps.steps().saturating_sub(from_step);
        let inner = Arc::clone(&self.inner);
        self.start(batches, move |out| async move { inner.send_epoch(epoch, from_step, out).await })
    }

    /// This rank's held-out rows in batches of at most `batch` rows, in a fixed order. No batch
    /// has rows of two partitions, so that they are the same for any number of executors.
    pub fn held_out(&self) -> EpochFeed {
        let plan = &self.inner.source.plan;
        let rows = |owned: &Owned| plan.partitions.partitions[owned.partition.0 as usize].held_out_rows;
        let batches = self.inner.owned.iter().map(|owned| rows(owned).div_ceil(plan.batch.max(1) as u64)).sum();
        let inner = Arc::clone(&self.inner);
        self.start(batches, move |out| async move { inner.send_held_out(out).await })
    }

    fn start<F, W>(&self, batches: u64, work: F) -> EpochFeed
    where
        F: FnOnce(Outlet) -> W + Send + 'static,
        W: Future<Output = Result<(), DataError>> + Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(self.inner.budget.prefetch);
        let (spare_sender, spare) = mpsc::unbounded_channel();
        let outlet = Outlet { batches: sender.clone(), spare };
        let _runtime = self.runtime.enter();
        let task = SpawnedTask::spawn(async move {
            if let Err(error) = work(outlet).await {
                // Nobody listens any more: the feed was dropped.
                let _ = sender.send(Err(error)).await;
            }
        });
        EpochFeed { batches: receiver, spare: spare_sender, left: batches, rows: 0, _task: task }
    }
}

/// Batches in order. Dropping it stops the reading.
pub struct EpochFeed {
    batches: mpsc::Receiver<Result<Batch, DataError>>,
    /// Used buffers on their way back; no more than there were batches.
    spare: mpsc::UnboundedSender<Vec<f32>>,
    left: u64,
    rows: u64,
    _task: SpawnedTask<()>,
}

impl EpochFeed {
    /// The next batch, or `None` after the last; blocks, so call it from a thread of its own,
    /// not from a tokio worker. The wait is bounded by the deadlines of the storage calls that
    /// it may be waiting for.
    pub fn next_batch(&mut self) -> Result<Option<Batch>, DataError> {
        if self.left == 0 {
            return Ok(None);
        }
        match self.batches.blocking_recv() {
            Some(Ok(batch)) => {
                self.left -= 1;
                self.rows += batch.rows as u64;
                Ok(Some(batch))
            }
            Some(Err(error)) => {
                self.left = 0;
                Err(error)
            }
            None => Err(FeedError::Stopped { left: std::mem::take(&mut self.left) }.into()),
        }
    }

    /// Gives a used batch back, so that a later one needs no new memory.
    pub fn recycle(&self, batch: Batch) {
        // Nobody assembles any more: the buffer is simply freed.
        let _ = self.spare.send(batch.x);
    }

    /// Rows given so far.
    pub fn rows(&self) -> u64 {
        self.rows
    }
}

/// Where assembled batches go.
struct Outlet {
    batches: mpsc::Sender<Result<Batch, DataError>>,
    spare: mpsc::UnboundedReceiver<Vec<f32>>,
}

impl Outlet {
    /// An empty buffer for some numbers.
    fn buffer(&mut self, numbers: usize) -> Vec<f32> {
        let mut x = self.spare.try_recv().unwrap_or_default();
        x.clear();
        x.reserve_exact(numbers);
        x
    }

    /// Waits until there is room; false if nobody listens any more.
    async fn send(&self, x: Vec<f32>, rows: usize) -> bool {
        self.batches.send(Ok(Batch { x, rows })).await.is_ok()
    }
}

impl Inner {
    async fn send_epoch(&self, epoch: u32, from_step: u64, mut out: Outlet) -> Result<(), DataError> {
        let mut counts = self.steps.counts();
        let mut before = vec![0; self.partitions().len()];
        for counts in counts.by_ref().take(from_step as usize) {
            before.iter_mut().zip(counts).for_each(|(before, count)| *before += count as u64);
        }
        let skipped = |owned: &Owned| before[owned.partition.0 as usize];
        let cursors = self.owned.iter().map(|owned| self.cursor(owned, Draw::Epoch(epoch), skipped(owned)));
        let mut cursors = try_join_all(cursors).await?;
        for counts in counts {
            let rows = self.owned.iter().map(|owned| counts[owned.partition.0 as usize]).sum();
            let mut x = out.buffer(rows * self.source.width);
            for (owned, cursor) in self.owned.iter().zip(&mut cursors) {
                cursor.take(counts[owned.partition.0 as usize], self.source.width, &mut x).await?;
            }
            if !out.send(x, rows).await {
                break;
            }
        }
        Ok(())
    }

    async fn send_held_out(&self, mut out: Outlet) -> Result<(), DataError> {
        for owned in &self.owned {
            let mut left = self.partitions()[owned.partition.0 as usize].held_out_rows as usize;
            if left == 0 {
                continue;
            }
            let mut cursor = self.cursor(owned, Draw::HeldOut, 0).await?;
            while left > 0 {
                let rows = left.min(self.source.plan.batch.max(1));
                left -= rows;
                let mut x = out.buffer(rows * self.source.width);
                cursor.take(rows, self.source.width, &mut x).await?;
                if !out.send(x, rows).await {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn partitions(&self) -> &[Partition] {
        &self.source.plan.partitions.partitions
    }

    /// A partition's rows, decoded by the first who asks.
    async fn kept(&self, owned: &Owned) -> Result<Arc<Kept>, DataError> {
        let wanted = if self.budget.keep == Keep::All { Wanted::All } else { Wanted::HeldOut };
        let partition = owned.partition;
        let decode = || async {
            // Fails only on a closed semaphore, which this one never is.
            let _permit = self.loads.acquire().await.ok();
            let task = SpawnedTask::spawn(Arc::clone(&self.source).keep(partition, wanted));
            let kept = task.join().await.map_err(|source| FeedError::Decode { partition, source })??;
            Ok::<_, DataError>(Arc::new(kept))
        };
        Ok(Arc::clone(owned.kept.get_or_try_init(decode).await?))
    }

    /// The rows of a draw from a partition, without the first `skip`.
    async fn cursor(&self, owned: &Owned, draw: Draw, skip: u64) -> Result<Cursor, DataError> {
        let (seed, partition) = (self.source.plan.partitions.seed, owned.partition);
        let kept = match draw {
            Draw::Epoch(_) => self.budget.keep == Keep::All,
            Draw::HeldOut => self.budget.keep != Keep::Nothing,
        };
        if kept {
            let chunk = self.kept(owned).await?.draw(draw, seed, partition);
            return Ok(Cursor { partition, chunk: Some(chunk), at: skip as usize, more: None });
        }
        let chunk_rows = self.budget.chunk_rows;
        let (sender, chunks) = mpsc::channel(1);
        let task = SpawnedTask::spawn(Arc::clone(&self.source).send_chunks(draw, partition, chunk_rows, skip, sender));
        let more = Some(Chunks { chunks, _task: task });
        Ok(Cursor { partition, chunk: None, at: (skip % chunk_rows as u64) as usize, more })
    }
}

/// A place in the rows of a draw.
struct Cursor {
    partition: PartitionId,
    chunk: Option<Chunk>,
    /// Within the order of the chunk, or of the first one to come.
    at: usize,
    more: Option<Chunks>,
}

/// Where further chunks come from, and the task that reads them.
struct Chunks {
    chunks: mpsc::Receiver<Result<Chunk, DataError>>,
    _task: SpawnedTask<()>,
}

impl Cursor {
    /// Appends the next `rows` rows.
    async fn take(&mut self, mut rows: usize, width: usize, out: &mut Vec<f32>) -> Result<(), DataError> {
        while rows > 0 {
            let Some(chunk) = &self.chunk else {
                self.chunk = Some(self.next_chunk(rows).await?);
                continue;
            };
            let end = chunk.order.len().min(self.at + rows);
            chunk.order[self.at..end].iter().for_each(|row| copy_row(&chunk.x, *row, width, out));
            rows -= end - self.at;
            self.at = end;
            if self.at == chunk.order.len() {
                // Freed before the next one is taken: there are never three.
                self.chunk = None;
                self.at = 0;
            }
        }
        Ok(())
    }

    async fn next_chunk(&mut self, missing: usize) -> Result<Chunk, DataError> {
        let next = match &mut self.more {
            Some(more) => more.chunks.recv().await,
            None => None,
        };
        let lost = || FeedError::Lost { partition: self.partition, found: 0, expected: missing as u64 };
        next.unwrap_or_else(|| Err(lost().into()))
    }
}
