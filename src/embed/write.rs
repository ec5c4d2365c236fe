//! Encoding a data set into Parquet files, in parallel, in bounded memory.
//!
//! ```text
//!   parts (a queue) ──▶ executor: read ──few batches──▶ encode (a thread of its own) ──bytes──▶ upload
//!                  └──▶ executor: ...
//! ```
//!
//! The executors are polled by the one task that called, so they borrow what they need and are
//! gone when it is; the work itself is done on blocking threads, the reading in tasks that end
//! with their executor.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use futures::{StreamExt, future::try_join_all, stream::BoxStream};
use object_store::buffered::BufWriter;
use sha2::{Digest, Sha256};
use tokio::{
    io::AsyncWriteExt,
    sync::mpsc,
    task::{JoinError, JoinSet, spawn_blocking},
};

use super::{
    EmbedError, ManifestFile,
    cut::{Part, cut},
    encoder::{Encoder, Layout},
};
use crate::{
    data::{DataError, Dataset, Rows, read},
    learn::{LearnError, Model, Step},
    limits,
    pipeline::EmbeddingPlan,
    storage::{Location, Storage, StorageError},
};

/// What to encode.
pub struct EmbedJob<'a> {
    /// The table.
    pub plan: &'a EmbeddingPlan,
    /// The rows: key columns, carried columns and feature columns.
    pub dataset: &'a Arc<Dataset>,
    /// The model.
    pub model: &'a Model,
    /// Makes a replica with the model's parameters; called once per executor.
    pub replica: &'a (dyn Fn() -> Result<Box<dyn Step>, LearnError> + Send + Sync),
    /// Executors that encode at the same time.
    pub executors: u32,
    /// Folder to write to; emptied first.
    pub staging: &'a Location,
}

/// Files that are complete but not published.
#[derive(Clone, Debug)]
pub struct Written {
    /// Their folder.
    pub staging: Location,
    /// The files, in order of their rows.
    pub files: Vec<ManifestFile>,
    /// Rows of all files.
    pub rows: u64,
    /// Width of the embedding.
    pub latent: u64,
    /// SHA-256 (hex) of the files' names and bytes: whether another attempt wrote the same.
    pub digest: String,
}

/// Encodes every row of the data set. Files hold the rows in the data set's order; which rows
/// go to which file depends on the data set alone, so a rerun gives the same files.
/// `progress` is told the rows done so far; `stop` is looked at between batches.
pub async fn embed(
    storage: &Storage,
    job: &EmbedJob<'_>,
    stop: &AtomicBool,
    progress: &(dyn Fn(u64) + Send + Sync),
) -> Result<Written, EmbedError> {
    let (model, dataset) = (job.model, job.dataset);
    let latent = model.shape.net.latent;
    let layout = Layout::new(job.plan, &dataset.schema, model.features.clone(), latent, &model.fingerprint())?;
    storage.remove(job.staging).await?;
    let parts = cut(dataset);
    let work = Work {
        storage,
        job,
        stop,
        progress,
        layout: Arc::new(layout),
        columns: columns(job),
        queue: Mutex::new(parts.iter().enumerate().collect()),
        rows_done: AtomicU64::new(0),
    };
    let executors = parts.len().min(job.executors.max(1) as usize);
    let mut done: Vec<_> = try_join_all((0..executors).map(|_| work.executor())).await?.into_iter().flatten().collect();
    done.sort_by_key(|done| done.number);
    let digest = digest(&done);
    let files: Vec<ManifestFile> = done.into_iter().map(|done| done.file).collect();
    let rows = files.iter().map(|file| file.rows).sum();
    counted(job.staging, rows, dataset.rows())?;
    Ok(Written { staging: job.staging.clone(), files, rows, latent: latent as u64, digest })
}

fn digest(files: &[Done]) -> String {
    let mut digest = Sha256::new();
    for done in files {
        digest.update(&done.file.name);
        digest.update(done.digest);
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The columns to read: those carried along and those of the features, each once.
fn columns(job: &EmbedJob<'_>) -> Vec<String> {
    let mut columns: Vec<String> = Vec::new();
    for column in job.plan.key.iter().chain(&job.plan.columns).cloned().chain(job.model.features.columns()) {
        if !columns.contains(&column) {
            columns.push(column);
        }
    }
    columns
}

fn counted(location: &Location, written: u64, expected: u64) -> Result<(), EmbedError> {
    if written == expected {
        return Ok(());
    }
    Err(EmbedError::Rows { location: location.clone(), written, expected })
}

/// What the executors share.
struct Work<'a> {
    storage: &'a Storage,
    job: &'a EmbedJob<'a>,
    stop: &'a AtomicBool,
    progress: &'a (dyn Fn(u64) + Send + Sync),
    layout: Arc<Layout>,
    columns: Vec<String>,
    queue: Mutex<VecDeque<(usize, &'a Part)>>,
    rows_done: AtomicU64,
}

/// A file that is complete.
struct Done {
    /// Its place among the files.
    number: usize,
    file: ManifestFile,
    digest: [u8; 32],
}

type RowStream = BoxStream<'static, Result<Rows, DataError>>;

/// What an executor keeps from batch to batch.
struct Replica {
    step: Box<dyn Step>,
    x: Vec<f32>,
}

impl Work<'_> {
    /// Writes files until there are none left.
    async fn executor(&self) -> Result<Vec<Done>, EmbedError> {
        let mut replica = Replica { step: (self.job.replica)()?, x: Vec::new() };
        let mut files = Vec::new();
        while let Some((number, part)) = self.next_part() {
            let (file, digest, used) = self.write(part, replica).await?;
            replica = used;
            files.push(Done { number, file, digest });
        }
        Ok(files)
    }

    fn next_part(&self) -> Option<(usize, &Part)> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Writes one file; gives its digest too, and the replica back.
    async fn write(&self, part: &Part, replica: Replica) -> Result<(ManifestFile, [u8; 32], Replica), EmbedError> {
        let location = self.job.staging.join(&part.name);
        let (store, path) = self.storage.open(&location)?;
        let mut upload = BufWriter::new(store, path).with_max_concurrency(limits::UPLOAD_PARTS);
        let encoder = Encoder::new(Arc::clone(&self.layout), location.clone())?;
        let (mut encoder, replica) = self.fill(part, &location, &mut upload, encoder, replica).await?;
        let (end, encoder) = self.blocking(move || Ok((encoder.finish()?, encoder))).await?;
        put(&mut upload, &location, end).await?;
        upload.shutdown().await.map_err(|error| StorageError::new(&location, error))?;
        counted(&location, encoder.rows(), part.rows())?;
        let file = ManifestFile { name: part.name.clone(), rows: encoder.rows(), size_bytes: encoder.size_bytes() };
        Ok((file, encoder.digest(), replica))
    }

    /// Reads, encodes and uploads the rows of one file, but for the file's end.
    async fn fill(
        &self,
        part: &Part,
        location: &Location,
        upload: &mut BufWriter,
        mut encoder: Encoder,
        mut replica: Replica,
    ) -> Result<(Encoder, Replica), EmbedError> {
        let dataset = self.job.dataset;
        let (sender, mut batches) = mpsc::channel(limits::PREFETCH_BATCHES);
        let mut reader = JoinSet::new();
        reader.spawn(read_ahead(read(self.storage, dataset, part.splits.clone(), &self.columns), sender));
        while let Some(rows) = batches.recv().await {
            if self.stop.load(Ordering::Relaxed) {
                return Err(LearnError::Interrupted.into());
            }
            let rows: Rows = rows?;
            let count = rows.batch.num_rows() as u64;
            let from = dataset.files.get(rows.file).map(|file| file.entry.location.to_string()).unwrap_or_default();
            let encode = move || {
                let Replica { step, x } = &mut replica;
                let bytes = encoder.encode(step.as_mut(), &rows, &from, x)?;
                Ok((bytes, encoder, replica))
            };
            let bytes;
            (bytes, encoder, replica) = self.blocking(encode).await?;
            put(upload, location, bytes).await?;
            (self.progress)(self.rows_done.fetch_add(count, Ordering::Relaxed) + count);
        }
        // It has ended; if by a panic, say so rather than that rows are missing.
        while let Some(ended) = reader.join_next().await {
            ended.map_err(|source| self.broken(source))?;
        }
        Ok((encoder, replica))
    }

    /// Runs work that keeps a core busy.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, EmbedError> + Send + 'static,
    ) -> Result<T, EmbedError> {
        spawn_blocking(work).await.map_err(|source| self.broken(source))?
    }

    fn broken(&self, source: JoinError) -> EmbedError {
        EmbedError::Executor { table: self.job.plan.name.clone(), source }
    }
}

/// Reads while the batch before is encoded; ends when nobody listens.
async fn read_ahead(mut rows: RowStream, sender: mpsc::Sender<Result<Rows, DataError>>) {
    while let Some(batch) = rows.next().await {
        if sender.send(batch).await.is_err() {
            return;
        }
    }
}

async fn put(upload: &mut BufWriter, location: &Location, bytes: Bytes) -> Result<(), EmbedError> {
    if bytes.is_empty() {
        return Ok(());
    }
    upload.put(bytes).await.map_err(|error| StorageError::new(location, error).into())
}
