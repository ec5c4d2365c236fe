//! Why embeddings could not be written.

use crate::{
    data::DataError,
    learn::LearnError,
    remedy::{Remedied, Remedy},
    storage::StorageError,
};

/// Why embeddings could not be written.
#[derive(Debug, thiserror::Error)]
pub enum EmbedError {
    /// The rows could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The encoder failed.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// The files could not be written.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl Remedied for EmbedError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Data(error) => error.remedy(),
            Self::Learn(error) => error.remedy(),
            Self::Storage(error) => error.remedy(),
        }
    }
}
