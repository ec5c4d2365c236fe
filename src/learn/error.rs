//! Why training failed.

use crate::{
    data::DataError,
    ids::Rank,
    remedy::{Remedied, Remedy},
    storage::StorageError,
};

use super::comm::CommError;

/// Why training failed.
#[derive(Debug, thiserror::Error)]
pub enum LearnError {
    /// The rows could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A rank did not answer.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A checkpoint or model could not be read or written.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The loss or a gradient is not finite.
    #[error("rank {rank}, epoch {epoch}, step {step}: the loss is not finite; {blame}")]
    NotFinite {
        /// Where it showed first.
        rank: Rank,
        /// From 1.
        epoch: u32,
        /// Within the epoch, from 1.
        step: u64,
        /// Feature columns to blame, or what else to look at.
        blame: String,
    },
    /// Told to stop; a checkpoint is on storage.
    #[error("stopped on request; the same command resumes")]
    Interrupted,
}

impl Remedied for LearnError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Data(error) => error.remedy(),
            Self::Comm(error) => error.remedy(),
            Self::Storage(error) => error.remedy(),
            Self::NotFinite { .. } => Remedy::FixData,
            Self::Interrupted => Remedy::Interrupted,
        }
    }
}
