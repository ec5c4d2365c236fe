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

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use bytes::Bytes;
use futures::{StreamExt, future::try_join_all, stream::BoxStream};
use object_store::buffered::BufWriter;
use serde::{Deserialize, Serialize};
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

/// One file that is complete, not published.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WrittenPart {
    /// Its place among the files.
    pub number: usize,
    /// The file.
    pub file: ManifestFile,
    /// SHA-256 (hex) of its bytes.
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
    storage.remove(job.staging).await?;
    let embedder = Embedder::new(storage, job, stop, progress)?;
    let queue = Mutex::new(0..embedder.parts.len());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let executors = embedder.parts.len().min(job.executors.max(1) as usize);
    let done = try_join_all((0..executors).map(|_| embedder.executor(&next))).await?;
    embedder.gather(done.into_iter().flatten().collect())
}

/// Encodes the files of one embedding table, each by whoever is free.
pub struct Embedder<'a> {
    storage: &'a Storage,
    job: &'a EmbedJob<'a>,
    stop: &'a AtomicBool,
    progress: &'a (dyn Fn(u64) + Send + Sync),
    layout: Arc<Layout>,
    columns: Vec<String>,
    parts: Vec<Part>,
    rows_done: AtomicU64,
}

/// How many files a data set's embeddings make.
pub fn parts(dataset: &Dataset) -> usize {
    cut(dataset).len()
}

impl<'a> Embedder<'a> {
    /// An embedder; see `embed`. Nothing is read or written yet.
    pub fn new(
        storage: &'a Storage,
        job: &'a EmbedJob<'a>,
        stop: &'a AtomicBool,
        progress: &'a (dyn Fn(u64) + Send + Sync),
    ) -> Result<Self, EmbedError> {
        let (model, dataset) = (job.model, job.dataset);
        let latent = model.shape.net.latent;
        let layout = Layout::new(job.plan, &dataset.schema, model.features.clone(), latent, &model.fingerprint())?;
        Ok(Self {
            storage,
            job,
            stop,
            progress,
            layout: Arc::new(layout),
            columns: columns(job),
            parts: cut(dataset),
            rows_done: AtomicU64::new(0),
        })
    }

    /// Writes files until `next` gives no further number.
    pub async fn executor(&self, next: &(dyn Fn() -> Option<usize> + Sync)) -> Result<Vec<WrittenPart>, EmbedError> {
        let mut replica = Replica { step: (self.job.replica)()?, x: Vec::new() };
        let mut files = Vec::new();
        while let Some(number) = next() {
            let Some(part) = self.parts.get(number) else { break };
            let (file, digest, used) = self.write(part, replica).await?;
            replica = used;
            files.push(WrittenPart { number, file, digest: hex(&digest) });
        }
        Ok(files)
    }

    /// All files together; fails if a row is missing.
    fn gather(&self, files: Vec<WrittenPart>) -> Result<Written, EmbedError> {
        gather(self.job.staging, self.job.dataset, self.job.model.shape.net.latent, files)
    }
}

/// All files of a data set together; fails if a row is missing.
pub fn gather(
    staging: &Location,
    dataset: &Dataset,
    latent: usize,
    mut files: Vec<WrittenPart>,
) -> Result<Written, EmbedError> {
    files.sort_by_key(|part| part.number);
    let mut digest = Sha256::new();
    for part in &files {
        digest.update(&part.file.name);
        digest.update(&part.digest);
    }
    let digest = hex(&digest.finalize());
    let files: Vec<ManifestFile> = files.into_iter().map(|part| part.file).collect();
    let rows = files.iter().map(|file| file.rows).sum();
    counted(staging, rows, dataset.rows())?;
    Ok(Written { staging: staging.clone(), files, rows, latent: latent as u64, digest })
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a text cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
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

type RowStream = BoxStream<'static, Result<Rows, DataError>>;

/// What an executor keeps from batch to batch.
struct Replica {
    step: Box<dyn Step>,
    x: Vec<f32>,
}

impl Embedder<'_> {
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
