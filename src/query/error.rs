//! Why a store cannot be queried.

use datafusion::error::DataFusionError;

use crate::{
    data::DataError,
    embed::EmbedError,
    remedy::{Remedied, Remedy},
    runs::RunsError,
    storage::{Location, StorageError},
};

/// Why a store cannot be queried. Within a query it travels as
/// `DataFusionError::External`.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// The store failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Manifests cannot be read.
    #[error(transparent)]
    Embed(#[from] EmbedError),
    /// Run records cannot be read.
    #[error(transparent)]
    Runs(#[from] RunsError),
    /// A source of an earlier run is gone or has changed its form.
    #[error("source {table} of pipeline {pipeline} cannot be read")]
    Source {
        /// The source.
        table: String,
        /// Whose source it is.
        pipeline: String,
        /// Why.
        source: DataError,
    },
    /// The session cannot be set up.
    #[error("the query engine cannot be set up")]
    Session(#[from] DataFusionError),
    /// A statement cannot be planned or answered.
    #[error("the query cannot be answered")]
    Statement(#[source] Box<DataFusionError>),
    /// There is no such table.
    #[error("there is no table {name:?}; {hint}")]
    NoTable {
        /// The name.
        name: String,
        /// A name that is meant, or those there are.
        hint: String,
    },
    /// There is no such version.
    #[error("table {table} has no version {version}; it has {there}")]
    NoVersion {
        /// The table.
        table: String,
        /// The version.
        version: u64,
        /// Those there are.
        there: String,
    },
    /// A file of a version is gone.
    #[error(
        "{file}: this file of table {table}, version {version}, is gone; query another version, or run the pipeline again"
    )]
    MissingFile {
        /// The file.
        file: Location,
        /// The table.
        table: String,
        /// The version.
        version: u64,
    },
    /// A file of a version is not the one that was published.
    #[error(
        "{file}: this file of table {table}, version {version}, has {size_bytes} bytes, not the {expected_bytes} that were published"
    )]
    ChangedFile {
        /// The file.
        file: Location,
        /// The table.
        table: String,
        /// The version.
        version: u64,
        /// Its length.
        size_bytes: u64,
        /// Its length when it was published.
        expected_bytes: u64,
    },
    /// A file of a version is no Parquet file.
    #[error("{file}: this file of table {table} cannot be read as Parquet")]
    BadFile {
        /// The file.
        file: Location,
        /// The table.
        table: String,
        /// Why.
        source: parquet::errors::ParquetError,
    },
}

impl Remedied for QueryError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Storage(error) => error.remedy(),
            Self::Embed(error) => error.remedy(),
            Self::Runs(error) => error.remedy(),
            Self::Source { source, .. } => source.remedy(),
            Self::Session(_) => Remedy::ReportBug,
            Self::Statement(error) => match error.find_root() {
                DataFusionError::Internal(_) => Remedy::ReportBug,
                DataFusionError::ObjectStore(_) | DataFusionError::IoError(_) => Remedy::CheckStorage,
                DataFusionError::SQL(..) | DataFusionError::Plan(_) | DataFusionError::SchemaError(..) => {
                    Remedy::FixCommand
                }
                _ => Remedy::FixData,
            },
            Self::NoTable { .. } | Self::NoVersion { .. } => Remedy::FixCommand,
            Self::MissingFile { .. } | Self::ChangedFile { .. } | Self::BadFile { .. } => Remedy::FixData,
        }
    }
}

impl From<QueryError> for DataFusionError {
    fn from(error: QueryError) -> Self {
        match error {
            QueryError::Session(error) => error,
            error => Self::External(Box::new(error)),
        }
    }
}
