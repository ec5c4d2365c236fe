//! A store as a DataFusion catalog.

use datafusion::prelude::SessionContext;

use crate::{
    remedy::{Remedied, Remedy},
    storage::{Location, Storage},
};

/// A session in which
///
/// * each embedding table of the store stands under its name (latest version) and as
///   `"table@7"` (that version),
/// * each source of the latest run of each pipeline stands under its name, where no embedding
///   table has it,
/// * `runs`, `run_metrics` and `epochs` tell what ran,
/// * the distance functions of `register_functions` are there; unless `mix_models`, they
///   refuse to compare vectors of different models.
pub async fn open(storage: &Storage, store: &Location, mix_models: bool) -> Result<SessionContext, QueryError> {
    let _ = (storage, store, mix_models);
    unimplemented!()
}

/// Why a store cannot be queried.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// The store failed.
    #[error(transparent)]
    Storage(#[from] crate::storage::StorageError),
}

impl Remedied for QueryError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Storage(error) => error.remedy(),
        }
    }
}
