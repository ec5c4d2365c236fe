//! A table as a `Dataset`: Parquet files whose row groups are known. A Parquet source is used
//! where it lies; anything else is written once, aside, in a reproducible order.

use std::{collections::BTreeMap, sync::Arc};

use arrow::datatypes::SchemaRef;

use super::{DataError, scan::Engine};
use crate::{
    ids::PartitionId,
    pipeline::{PartitionPlan, PipelinePlan},
    storage::{FileEntry, Location, Storage},
};

/// Rows in a fixed order, as Parquet files of one schema.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// The columns asked for (`Needs::columns`), by their types in the files.
    pub schema: SchemaRef,
    /// The files, in order.
    pub files: Vec<DataFile>,
    /// Rows left out on the way here, by reason (`missing value in column x`).
    pub rejected: BTreeMap<String, u64>,
}

/// One Parquet file of a data set.
#[derive(Clone, Debug)]
pub struct DataFile {
    /// Where it is, and as what it was snapshotted.
    pub entry: FileEntry,
    /// Its row groups, in order.
    pub row_groups: Vec<RowGroup>,
    /// The partition whose rows it holds, where the rows were dealt by hash.
    pub partition: Option<PartitionId>,
    /// The footer, read once.
    pub metadata: Arc<parquet::file::metadata::ParquetMetaData>,
}

/// One row group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowGroup {
    /// Its rows.
    pub rows: u64,
    /// Bytes of the needed columns, decoded.
    pub size_bytes: u64,
}

impl Dataset {
    /// Rows of all files.
    pub fn rows(&self) -> u64 {
        self.files.iter().flat_map(|file| &file.row_groups).map(|group| group.rows).sum()
    }
}

/// What is needed of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Needs {
    /// The columns, each once.
    pub columns: Vec<String>,
    /// Columns in which NULL or NaN rejects the row (counted by reason).
    pub reject_missing: Vec<String>,
    /// Deal rows by hash, one or more files per partition.
    pub hash: Option<PartitionPlan>,
}

/// The data set where it lies, footers read and nothing else; `None` where `prepare` would have
/// to write it first.
pub async fn in_place(
    storage: &Storage,
    plan: &PipelinePlan,
    engine: &Engine,
    table: &str,
    needs: &Needs,
) -> Result<Option<Dataset>, DataError> {
    let _ = (storage, plan, engine, table, needs);
    unimplemented!()
}

/// Gives the data set of a source or transform; what must be written goes to `staging` (a
/// folder of the run) and is found there again by a later attempt, whole or not at all.
pub async fn prepare(
    storage: &Storage,
    plan: &PipelinePlan,
    engine: &Engine,
    table: &str,
    needs: &Needs,
    staging: &Location,
) -> Result<Dataset, DataError> {
    let _ = (storage, plan, engine, table, needs, staging);
    unimplemented!()
}
