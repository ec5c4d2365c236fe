//! The record of one run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    ids::{Attempt, Fingerprint, RunId, Version},
    pipeline::spec::{Compression, CsvSpec, SyncStrategy},
    storage::{Location, Storage, StorageError},
    telemetry::Ledger,
};

use super::RunsError;

/// What one run was asked and what came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunRecord {
    /// Version of this format; 1.
    pub format: u32,
    /// The run.
    pub run_id: RunId,
    /// The pipeline's name.
    pub pipeline: String,
    /// The pipeline file's path, as the user wrote it.
    pub file: String,
    /// `PipelinePlan::spec_hash`.
    pub spec_hash: String,
    /// Parameter values.
    pub params: BTreeMap<String, String>,
    /// Emberflow's version.
    pub code_version: String,
    /// Where the latest attempt ran.
    pub host: String,
    /// The latest attempt.
    pub attempt: Attempt,
    /// How far it is.
    pub status: RunStatus,
    /// Start of the first attempt, milliseconds since 1970 UTC.
    pub started_ms: i64,
    /// End, milliseconds since 1970 UTC.
    pub ended_ms: Option<i64>,
    /// Executors of the latest attempt.
    pub executors: u32,
    /// `cpu`, `wgpu` or `cuda`.
    pub device: String,
    /// Seed of everything random.
    pub seed: u64,
    /// Sources by table name.
    pub sources: BTreeMap<String, SourceRecord>,
    /// Models, as far as trained.
    pub models: Vec<ModelRecord>,
    /// Embedding tables, as far as committed.
    pub embeddings: Vec<EmbeddingRecord>,
    /// Where the rows went.
    pub ledgers: Vec<Ledger>,
    /// What was decided of what the file leaves open.
    #[serde(default)]
    pub decisions: Vec<DecisionRecord>,
    /// Measured figures by name, unit last: `train_s`, `train_rows_per_s`, `feed_wait_s`...
    pub metrics: BTreeMap<String, f64>,
    /// Why it failed.
    pub error: Option<ErrorRecord>,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// At work, or killed.
    Running,
    /// Done, outputs committed.
    Succeeded,
    /// Ended with an error.
    Failed,
    /// Stopped by a signal; the same command resumes it.
    Interrupted,
    /// There was no input, and `--empty skip` was given.
    Skipped,
}

impl RunStatus {
    /// As records and tables name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
            Self::Skipped => "skipped",
        }
    }
}

/// A source as a run read it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SourceRecord {
    /// File, folder or glob.
    pub location: Location,
    /// `parquet`, `csv` or `arrow`.
    pub format: String,
    /// Declared columns: name and SQL type; older records lack them.
    #[serde(default)]
    pub columns: BTreeMap<String, String>,
    /// How CSV is read.
    #[serde(default)]
    pub csv: CsvSpec,
    /// Files.
    pub files: u64,
    /// Their bytes.
    pub size_bytes: u64,
}

/// A trained model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Its name.
    pub name: String,
    /// Its fingerprint.
    pub fingerprint: Fingerprint,
    /// Its folder.
    pub location: Location,
    /// Trainable numbers.
    pub parameters: u64,
    /// Features of a row.
    pub features: u64,
    /// Width of the embedding.
    pub latent: u64,
    /// Training rows of each partition.
    pub partition_rows: Vec<u64>,
    /// One entry per epoch.
    pub epochs: Vec<EpochRecord>,
    /// One entry per executor that was there at the end; older records lack them.
    #[serde(default)]
    pub ranks: Vec<RankRecord>,
}

/// What one executor did in a training: of the last attempt, since it last joined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankRecord {
    /// Its rank.
    pub rank: u32,
    /// Rows that it trained on, over all epochs.
    pub rows: u64,
    /// Seconds that it waited for its feed.
    pub feed_wait_s: f64,
    /// Seconds of forward and backward.
    pub compute_s: f64,
    /// Seconds that it waited for slower executors.
    pub wait_s: f64,
    /// Seconds of exchange.
    pub communicate_s: f64,
    /// Seconds of updating parameters.
    pub update_s: f64,
    /// Bytes that it put on the wire.
    pub bytes_sent: u64,
    /// Processor seconds, where it is a process.
    pub cpu_s: f64,
    /// The most memory that it held, bytes, where it is a process.
    pub peak_memory_bytes: u64,
}

/// What was decided of a training that the file leaves to Emberflow.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DecisionRecord {
    /// The model.
    pub model: String,
    /// Executors that train it.
    pub executors: u32,
    /// How they keep one model.
    pub sync: SyncStrategy,
    /// How gradients travel.
    pub compression: Compression,
    /// Partitions that rows are dealt to.
    #[serde(default)]
    pub partitions: u32,
    /// By this strategy, what each number of executors that could be chosen is expected to do.
    #[serde(default)]
    pub speeds: Vec<ExpectedSpeed>,
    /// Rows per second that are expected.
    pub rows_per_s: f64,
    /// Rows per second of one executor, as measured.
    pub single_rows_per_s: f64,
    /// The reason.
    pub why: String,
}

/// How fast so many executors are expected to be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpectedSpeed {
    /// Executors.
    pub executors: u32,
    /// Rows per second.
    pub rows_per_s: f64,
}

/// One epoch of training.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EpochRecord {
    /// From 1.
    pub epoch: u32,
    /// Mean over rows and features.
    pub loss: f64,
    /// The same over the held-out rows.
    pub held_out_loss: Option<f64>,
    /// Step size at the epoch's end.
    pub learning_rate: f64,
    /// Rows trained on.
    pub rows: u64,
    /// Seconds.
    pub elapsed_s: f64,
}

/// A committed embedding table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EmbeddingRecord {
    /// Table name.
    pub table: String,
    /// Its version.
    pub version: Version,
    /// Its rows.
    pub rows: u64,
    /// The version's folder.
    pub location: Location,
    /// The model's fingerprint.
    pub fingerprint: Fingerprint,
}

/// Why a run failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ErrorRecord {
    /// The message, causes included.
    pub message: String,
    /// The exit code.
    pub exit_code: u8,
    /// Whether the same command may succeed later.
    pub retryable: bool,
}

/// `<store>/_runs/<run-id>`.
pub fn run_folder(store: &Location, run_id: &RunId) -> Location {
    store.join(&format!("_runs/{run_id}"))
}

/// The record of a run, if there is one.
pub async fn read_run(storage: &Storage, store: &Location, run_id: &RunId) -> Result<Option<RunRecord>, RunsError> {
    let location = run_folder(store, run_id).join("record.json");
    match storage.read(&location).await {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map(Some).map_err(|source| RunsError::Unreadable { location, source })
        }
        Err(StorageError::NotFound(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Writes the record, whole.
pub async fn write_run(storage: &Storage, store: &Location, record: &RunRecord) -> Result<(), RunsError> {
    let location = run_folder(store, &record.run_id).join("record.json");
    let bytes = serde_json::to_vec_pretty(record).map_err(RunsError::Encode)?;
    Ok(storage.replace(&location, bytes.into()).await?)
}

/// All runs of a store, the latest start first.
pub async fn list_runs(storage: &Storage, store: &Location) -> Result<Vec<RunRecord>, RunsError> {
    let mut runs = Vec::new();
    for name in storage.children(&store.join("_runs")).await? {
        if let Some(run_id) = RunId::new(&name)
            && let Some(run) = read_run(storage, store, &run_id).await?
        {
            runs.push(run);
        }
    }
    runs.sort_by(|a, b| b.started_ms.cmp(&a.started_ms).then_with(|| a.run_id.cmp(&b.run_id)));
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_without_its_later_fields_is_read() {
        let old = r#"{ "location": "file:///t", "format": "csv", "files": 1, "size_bytes": 2 }"#;
        let source: SourceRecord = serde_json::from_str(old).unwrap();
        assert!(source.columns.is_empty());
        assert_eq!(source.csv, CsvSpec::default());
    }
}
