//! What the driver and an executor process tell each other: JSON in frames, over one connection
//! that the executor opens. Row data and gradients never pass here.
//!
//! ```text
//!   executor                                driver
//!     Hello ──────────────────────────────▶  one more
//!     ◀───────────────────────── Work        a stage's work; nothing begins yet
//!     Ready, how far its state is ────────▶
//!     ◀───────────────────────── Train       a generation: rank, peers, whose state counts
//!     Event .. (rank 0) ──────────────────▶
//!     Trained, or Left with the reason ───▶  all left: the next generation
//!     ◀───────────────────────── Write       one file of embeddings
//!     Written ────────────────────────────▶
//! ```

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{RunError, training::TrainWork};
use crate::{
    data::DatasetFiles,
    embed::WrittenPart,
    ids::{Generation, Rank},
    learn::{CommError, LearnError, Trained},
    pipeline::{EmbeddingPlan, spec::DeviceKind},
    remedy::{self, Remedied, Remedy},
    storage::Location,
    telemetry::Event,
};

/// What the driver says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToExecutor {
    /// The driver lives.
    Alive,
    /// Get this ready.
    Work(Arc<Work>),
    /// Take part in a generation.
    Train(Assignment),
    /// Leave the generation now, in the middle of whatever it waits for.
    Leave(Generation),
    /// Vote for a checkpoint and an end.
    Stop,
    /// Vote for leaving, so that others can join.
    Regroup,
    /// Keep the own state as the checkpoint.
    Save,
    /// Write one file of embeddings.
    Write(usize),
    /// There is no more to do.
    Goodbye,
}

/// The work of a stage.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Work {
    /// Tells works of a run apart.
    pub number: u64,
    pub kind: WorkKind,
}

/// What a stage does.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum WorkKind {
    Train(Box<TrainWork>),
    Embed(Box<EmbedWork>),
}

/// The encoding of one table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct EmbedWork {
    pub table: EmbeddingPlan,
    pub dataset: DatasetFiles,
    /// The saved model's folder.
    pub model: Location,
    pub staging: Location,
    pub device: DeviceKind,
    pub seed: u64,
}

/// An executor's part in a generation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Assignment {
    pub generation: Generation,
    pub rank: Rank,
    /// Where each rank listens for the others, by rank.
    pub peers: Vec<String>,
    /// The rank whose state all go on with.
    pub source: Rank,
    /// Whether that rank takes it from storage.
    pub from_storage: bool,
    /// Threads to compute with.
    pub threads: usize,
}

/// What an executor says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromExecutor {
    /// It lives.
    Alive,
    /// The first word.
    Hello(Hello),
    /// The work of that number is ready; its state is so many updates along, if it has one.
    Ready { work: u64, updates: Option<u64> },
    /// Something happened in its generation.
    Event(Event),
    /// It has trained to the end.
    Trained { generation: Generation, trained: Box<Trained> },
    /// It has left its generation; its state is so many updates along.
    Left { generation: Generation, updates: u64, failure: Failure },
    /// Its state is on storage.
    Saved,
    /// A file is complete.
    Written(WrittenPart),
    /// It cannot do what it was asked for.
    Failed(Failure),
}

/// An executor introduces itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub host: String,
    pub pid: u32,
    /// Where it listens for other executors.
    pub address: String,
    pub cores: usize,
}

/// An error on its way to the driver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Failure {
    /// Causes included.
    pub message: String,
    pub remedy: Remedy,
    /// How little it tells of the cause; see `blame`.
    pub blame: u8,
    pub reason: Reason,
}

/// Why an executor left its generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reason {
    /// All voted to.
    Asked,
    /// It missed another rank, or was told to leave in mid-work.
    Missed(Option<Rank>),
    /// For a reason of its own.
    Failed,
}

impl Failure {
    pub fn new(error: &RunError) -> Self {
        let reason = match error {
            RunError::Learn(LearnError::Regroup | LearnError::Interrupted) => Reason::Asked,
            RunError::Learn(LearnError::Comm(
                CommError::Late { rank, .. } | CommError::Gone { rank, .. } | CommError::Unreachable { rank, .. },
            )) => Reason::Missed(Some(*rank)),
            RunError::Learn(LearnError::Comm(CommError::Aborted { .. })) => Reason::Missed(None),
            _ => Reason::Failed,
        };
        Self { message: remedy::causes(error).join(": "), remedy: error.remedy(), blame: blame(error), reason }
    }
}

/// How little an error tells of the cause: 0 first.
pub(super) fn blame(error: &RunError) -> u8 {
    match error {
        RunError::Learn(LearnError::NotFinite { blame, .. }) if !blame.is_empty() => 0,
        RunError::Learn(LearnError::Comm(_)) => 3,
        RunError::Learn(LearnError::Interrupted | LearnError::Regroup) => 2,
        _ => 1,
    }
}
