//! Why embeddings could not be written or found.

use crate::{
    data::DataError,
    ids::{RunId, Version},
    learn::LearnError,
    remedy::{Remedied, Remedy},
    storage::{Location, StorageError},
};

/// Why embeddings could not be written or found.
#[derive(Debug, thiserror::Error)]
pub enum EmbedError {
    /// The rows could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The encoder failed.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// The files could not be read or written.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A carried column has the name of a column that is added.
    #[error(
        "embeddings.{table}: the carried column {column:?} has the name of a column that is added; rename it in a transform"
    )]
    ReservedColumn {
        /// The table.
        table: String,
        /// The column.
        column: String,
    },
    /// A carried column is not among the rows.
    #[error("embeddings.{table}: a column cannot be carried along")]
    Columns {
        /// The table.
        table: String,
        /// Which one and why.
        source: arrow::error::ArrowError,
    },
    /// The table belongs to another pipeline.
    #[error(
        "table {table} at {location} was written by pipeline {owner:?}, not by {pipeline:?}; \
         give the table another name, or the pipeline another store"
    )]
    OtherPipeline {
        /// The table.
        table: String,
        /// Its folder.
        location: Location,
        /// Who writes it.
        owner: String,
        /// Who wanted to.
        pipeline: String,
    },
    /// Another run published the version that this one was about to publish.
    #[error("table {table}: run {other} published version {version} at the same time; start this run again")]
    Conflict {
        /// The table.
        table: String,
        /// The version.
        version: Version,
        /// The run that was first.
        other: RunId,
    },
    /// No free version was found.
    #[error("{location}: the folders of the next {tried} versions are all taken; remove those that no manifest names")]
    NoFreeVersion {
        /// The table's folder.
        location: Location,
        /// How many were tried.
        tried: u64,
    },
    /// A manifest is no manifest.
    #[error("{location}: this manifest cannot be read")]
    BadManifest {
        /// The manifest.
        location: Location,
        /// Why.
        source: serde_json::Error,
    },
    /// A manifest of the future.
    #[error("{location}: manifest format {format} is newer than this version of Emberflow knows; upgrade")]
    NewManifest {
        /// The manifest.
        location: Location,
        /// Its format.
        format: u32,
    },
    /// Rows do not become Parquet.
    #[error("{location}: the rows could not be encoded as Parquet")]
    Parquet {
        /// The file.
        location: Location,
        /// Why.
        source: parquet::errors::ParquetError,
    },
    /// The encoder gave too many or too few numbers.
    #[error("table {table}: the encoder gave {got} numbers for {rows} rows, not {expected}")]
    Width {
        /// The table.
        table: String,
        /// Rows of the batch.
        rows: usize,
        /// Numbers that came.
        got: usize,
        /// Numbers that were due.
        expected: usize,
    },
    /// Rows were lost or doubled on the way.
    #[error("{location}: {written} rows were written, but there are {expected}")]
    Rows {
        /// The file or folder.
        location: Location,
        /// Rows written.
        written: u64,
        /// Rows of the input.
        expected: u64,
    },
    /// An executor broke down.
    #[error("table {table}: an executor broke down")]
    Executor {
        /// The table.
        table: String,
        /// Why.
        source: tokio::task::JoinError,
    },
}

impl Remedied for EmbedError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Data(error) => error.remedy(),
            Self::Learn(error) => error.remedy(),
            Self::Storage(error) => error.remedy(),
            Self::ReservedColumn { .. } | Self::Columns { .. } | Self::OtherPipeline { .. } => Remedy::FixFile,
            Self::Conflict { .. } => Remedy::TryAgain,
            Self::NoFreeVersion { .. } | Self::BadManifest { .. } | Self::NewManifest { .. } => Remedy::CheckStorage,
            Self::Parquet { .. } | Self::Width { .. } | Self::Rows { .. } | Self::Executor { .. } => Remedy::ReportBug,
        }
    }
}
