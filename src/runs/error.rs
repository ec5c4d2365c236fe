//! Why a run's state could not be read, written or owned.

use crate::{
    remedy::{Remedied, Remedy},
    storage::{Location, StorageError},
};

/// Why a run's state could not be read, written or owned.
#[derive(Debug, thiserror::Error)]
pub enum RunsError {
    /// The store failed.
    #[error("the run's state cannot be reached")]
    Storage(#[from] StorageError),
    /// A file is not what this version writes.
    #[error("{location}: not written by this version of emberflow")]
    Unreadable {
        /// The file.
        location: Location,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A state could not be turned into JSON.
    #[error("the run's state cannot be written as JSON")]
    Encode(#[source] serde_json::Error),
    /// Another process works on the run.
    #[error("{folder}: {owner} is working on this run; wait for it, or stop it first")]
    Live {
        /// The run's folder.
        folder: Location,
        /// That process.
        owner: String,
    },
    /// A later attempt took the run over while this one stood still.
    #[error("{folder}: a later attempt has taken this run over")]
    Fenced {
        /// The run's folder.
        folder: Location,
    },
}

impl Remedied for RunsError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Storage(error) => error.remedy(),
            Self::Unreadable { .. } => Remedy::CheckStorage,
            Self::Encode(_) => Remedy::ReportBug,
            Self::Live { .. } | Self::Fenced { .. } => Remedy::TryAgain,
        }
    }
}
