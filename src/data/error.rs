//! Why data could not be used; every variant names the file, table or column.

use std::error::Error;

use arrow::datatypes::DataType;
use datafusion::error::DataFusionError;

use super::{features::FeatureError, feed::FeedError};
use crate::{
    pipeline::Faults,
    remedy::{Remedied, Remedy},
    storage::{Location, StorageError},
};

/// An error of a library, kept as the cause.
pub(super) type Cause = Box<dyn Error + Send + Sync>;

/// Why data could not be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be reached.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The pipeline file does not fit the data.
    #[error(transparent)]
    Faults(#[from] Faults),
    /// A source's path leads nowhere.
    #[error("source `{table}`: {location}: no such file or folder")]
    MissingPath {
        /// The source.
        table: String,
        /// Its path.
        location: Location,
    },
    /// A source has no files.
    #[error("source `{table}`: no data files at {location} (hidden and temporary files do not count)")]
    NoFiles {
        /// The source.
        table: String,
        /// Its path.
        location: Location,
    },
    /// A source has files, but none of them tells its columns.
    #[error("source `{table}`: no column is known, for its files are empty; first file {file}")]
    NoColumns {
        /// The source.
        table: String,
        /// The first file.
        file: Location,
    },
    /// A file's name does not tell its format.
    #[error("source `{table}`: the name of {file} does not tell its format; set `sources.{table}.format`")]
    UnknownFormat {
        /// The source.
        table: String,
        /// The file.
        file: Location,
    },
    /// Files of several formats in one source.
    #[error(
        "source `{table}`: files of different formats, such as {first} and {second}; make them two sources, \
         narrow the path by a glob such as `*.parquet`, or set `sources.{table}.format` if the names mislead"
    )]
    MixedFormats {
        /// The source.
        table: String,
        /// The first file.
        first: Location,
        /// The first file of another format.
        second: Location,
    },
    /// A file without the least content of its format.
    #[error("{file}: an empty file of 0 bytes is not {format}; was its writer stopped?")]
    EmptyFile {
        /// The file.
        file: Location,
        /// What it should be.
        format: &'static str,
    },
    /// A file that is not what its format demands: truncated, damaged, or still being written.
    #[error("{file}: cannot be decoded; truncated, damaged, or still being written")]
    Corrupt {
        /// The file.
        file: Location,
        /// What the decoder found.
        source: Cause,
    },
    /// A file cannot be read now.
    #[error("{file}: cannot be read")]
    Unreadable {
        /// The file.
        file: Location,
        /// What the store said.
        source: Cause,
    },
    /// A file is not any more what it was when the run first looked.
    #[error("{file}: changed under the run: {change}")]
    Changed {
        /// The file.
        file: Location,
        /// How it changed.
        change: String,
    },
    /// A column has types in two files that have no common type.
    #[error(
        "source `{table}`: column `{column}` is {first_type} in {first} but {second_type} in {second}; \
         rewrite one of them, or declare the type in `sources.{table}.columns`"
    )]
    Drift {
        /// The source.
        table: String,
        /// The column.
        column: String,
        /// Its type in `first`.
        first_type: Box<DataType>,
        /// A file.
        first: Location,
        /// Its type in `second`.
        second_type: Box<DataType>,
        /// A file that does not fit `first`.
        second: Location,
    },
    /// Two files lie under different `key=value` folders.
    #[error("source `{table}`: {first} lies under folders of [{first_keys}] but {second} under [{second_keys}]")]
    PartitionKeys {
        /// The source.
        table: String,
        /// A file.
        first: Location,
        /// The keys of its folders.
        first_keys: String,
        /// A file under other keys.
        second: Location,
        /// The keys of its folders.
        second_keys: String,
    },
    /// A `key=value` folder's value does not fit the declared type.
    #[error("source `{table}`: `{value}` in the path of {file} is not of the type {data_type} declared for `{column}`")]
    PartitionValue {
        /// The source.
        table: String,
        /// The partition column.
        column: String,
        /// The folder's value.
        value: String,
        /// The declared type.
        data_type: Box<DataType>,
        /// The file.
        file: Location,
    },
    /// One column name twice in one file.
    #[error("{file}: two columns are named `{column}`")]
    DuplicateColumn {
        /// The file.
        file: Location,
        /// The column.
        column: String,
    },
    /// A line of a CSV file does not fit.
    #[error("{file}, line {line}: {message}")]
    CsvLine {
        /// The file.
        file: Location,
        /// The record's line, from 1, counting one line per record.
        line: u64,
        /// What does not fit, and the way out.
        message: String,
    },
    /// Rows cannot become features.
    #[error(transparent)]
    Feature(#[from] FeatureError),
    /// A feed gave out.
    #[error(transparent)]
    Feed(#[from] FeedError),
    /// DataFusion could not plan or run a query.
    #[error("table `{table}`: the query failed")]
    Query {
        /// The source or transform.
        table: String,
        /// What the engine said.
        source: Box<DataFusionError>,
    },
    /// A query needs more memory than the run has.
    #[error("table `{table}`: the query needs more memory than `run.memory` allows; raise it")]
    Memory {
        /// The source or transform.
        table: String,
        /// What the engine said.
        source: Box<DataFusionError>,
    },
    /// Staged rows cannot be written.
    #[error("{file}: cannot be written")]
    Unwritable {
        /// The file.
        file: Location,
        /// What the writer said.
        source: Cause,
    },
}

impl Remedied for DataError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Storage(error) => error.remedy(),
            Self::Faults(error) => error.remedy(),
            Self::UnknownFormat { .. } | Self::Memory { .. } => Remedy::FixFile,
            Self::MissingPath { .. }
            | Self::NoFiles { .. }
            | Self::NoColumns { .. }
            | Self::MixedFormats { .. }
            | Self::EmptyFile { .. }
            | Self::Corrupt { .. }
            | Self::Changed { .. }
            | Self::Drift { .. }
            | Self::PartitionKeys { .. }
            | Self::PartitionValue { .. }
            | Self::DuplicateColumn { .. }
            | Self::CsvLine { .. } => Remedy::FixData,
            Self::Query { source, .. } => query_remedy(source),
            Self::Unreadable { .. } => Remedy::CheckStorage,
            Self::Unwritable { .. } => Remedy::FixTarget,
            Self::Feature(error) => error.remedy(),
            Self::Feed(error) => error.remedy(),
        }
    }
}

/// A query that was planned well fails on its rows, but for faults of the engine or the disk.
fn query_remedy(error: &DataFusionError) -> Remedy {
    match error.find_root() {
        DataFusionError::Internal(_) => Remedy::ReportBug,
        DataFusionError::IoError(_) => Remedy::FixTarget,
        DataFusionError::ObjectStore(_) => Remedy::CheckStorage,
        _ => Remedy::FixData,
    }
}

impl DataError {
    /// An error of the query engine: ours where ours is at its root, so that the file is named.
    pub fn query(table: &str, error: DataFusionError) -> Self {
        match own(error) {
            Ok(own) => own,
            Err(error) => {
                let source = Box::new(error);
                match source.find_root() {
                    DataFusionError::ResourcesExhausted(_) => Self::Memory { table: table.to_owned(), source },
                    _ => Self::Query { table: table.to_owned(), source },
                }
            }
        }
    }
}

/// Unpacks the error of ours that a scan handed through the engine.
fn own(error: DataFusionError) -> Result<DataError, DataFusionError> {
    match error {
        DataFusionError::External(error) => {
            error.downcast::<DataError>().map(|own| *own).map_err(DataFusionError::External)
        }
        DataFusionError::Context(context, error) => {
            own(*error).map_err(|error| DataFusionError::Context(context, Box::new(error)))
        }
        DataFusionError::Shared(error) => {
            std::sync::Arc::try_unwrap(error).map_err(DataFusionError::Shared).and_then(own)
        }
        DataFusionError::ParquetError(error) => match *error {
            parquet::errors::ParquetError::External(error) => error
                .downcast::<DataError>()
                .map(|own| *own)
                .map_err(|error| DataFusionError::from(parquet::errors::ParquetError::External(error))),
            other => Err(DataFusionError::from(other)),
        },
        DataFusionError::ArrowError(error, trace) => match *error {
            arrow::error::ArrowError::ExternalError(error) => own_of_cause(error).map_err(|error| {
                DataFusionError::ArrowError(Box::new(arrow::error::ArrowError::ExternalError(error)), trace)
            }),
            other => Err(DataFusionError::ArrowError(Box::new(other), trace)),
        },
        other => Err(other),
    }
}

/// An error of ours in a cause, also one level down in an error of the engine.
fn own_of_cause(error: Cause) -> Result<DataError, Cause> {
    match error.downcast::<DataFusionError>() {
        Ok(inner) => own(*inner).map_err(Into::into),
        Err(error) => error.downcast::<DataError>().map(|own| *own),
    }
}
