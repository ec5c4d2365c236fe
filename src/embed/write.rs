//! Encoding a data set into Parquet files, in parallel, in bounded memory.

use super::{EmbedError, ManifestFile};
use crate::{
    data::Dataset,
    learn::{Model, Step},
    pipeline::EmbeddingPlan,
    storage::{Location, Storage},
};

/// What to encode.
pub struct EmbedJob<'a> {
    /// The table.
    pub plan: &'a EmbeddingPlan,
    /// The rows: key columns, carried columns and feature columns.
    pub dataset: &'a std::sync::Arc<Dataset>,
    /// The model.
    pub model: &'a Model,
    /// Makes a replica with the model's parameters; called once per executor.
    pub replica: &'a (dyn Fn() -> Result<Box<dyn Step>, crate::learn::LearnError> + Send + Sync),
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
}

/// Encodes every row of the data set. Files hold the rows in the data set's order; which rows
/// go to which file depends on the data set alone, so a rerun gives the same files.
/// `progress` is told the rows done so far; `stop` is looked at between batches.
pub async fn embed(
    storage: &Storage,
    job: &EmbedJob<'_>,
    stop: &std::sync::atomic::AtomicBool,
    progress: &(dyn Fn(u64) + Send + Sync),
) -> Result<Written, EmbedError> {
    let _ = (storage, job, stop, progress);
    unimplemented!()
}
