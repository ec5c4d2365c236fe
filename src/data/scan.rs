//! Sources as DataFusion tables, over a snapshot of their files taken once.

use std::collections::BTreeMap;

use arrow::datatypes::SchemaRef;
use datafusion::prelude::SessionContext;

use super::DataError;
use crate::{
    pipeline::PipelinePlan,
    storage::{FileEntry, Storage},
};

/// The files of every source, as they were when the run first looked.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Snapshot {
    /// Files by source name, sorted by location.
    pub sources: BTreeMap<String, Vec<FileEntry>>,
}

impl Snapshot {
    /// Lists every source that a transform, model or embedding reads.
    pub async fn take(storage: &Storage, plan: &PipelinePlan) -> Result<Self, DataError> {
        let _ = (storage, plan);
        unimplemented!()
    }

    /// Fails with the name of the first file that changed, vanished or grew since.
    pub async fn verify(&self, storage: &Storage) -> Result<(), DataError> {
        let _ = storage;
        unimplemented!()
    }
}

/// The DataFusion session of a run: every source as a table, every transform as a view.
#[derive(Clone)]
pub struct Engine {
    session: SessionContext,
}

impl Engine {
    /// Opens the snapshot's files (their footers only). A source without files becomes an
    /// error, but for `Snapshot`s that the caller has checked for emptiness before.
    pub async fn open(storage: &Storage, plan: &PipelinePlan, snapshot: &Snapshot) -> Result<Self, DataError> {
        let _ = (storage, plan, snapshot);
        unimplemented!()
    }

    /// The session.
    pub fn session(&self) -> &SessionContext {
        &self.session
    }

    /// The columns of a source or transform.
    pub async fn schema(&self, table: &str) -> Result<SchemaRef, DataError> {
        let _ = table;
        unimplemented!()
    }
}
