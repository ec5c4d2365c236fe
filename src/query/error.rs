//! Why a store cannot be queried.

use std::{error::Error, sync::Arc};

use arrow::error::ArrowError;
use datafusion::error::DataFusionError;
use parquet::errors::ParquetError;

use crate::{
    data::DataError,
    embed::EmbedError,
    limits,
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
    Embed(Box<EmbedError>),
    /// Run records cannot be read.
    #[error(transparent)]
    Runs(#[from] RunsError),
    /// Rows of a source cannot be read.
    #[error(transparent)]
    Data(Box<DataError>),
    /// A source of an earlier run is gone or has changed its form.
    #[error("source {table} of pipeline {pipeline} cannot be read")]
    Source {
        /// The source.
        table: String,
        /// Whose source it is.
        pipeline: String,
        /// Why.
        source: Box<DataError>,
    },
    /// The session cannot be set up.
    #[error("the query engine cannot be set up")]
    Session(#[from] DataFusionError),
    /// A statement cannot be planned or answered.
    #[error("the query cannot be answered")]
    Statement(#[source] Box<DataFusionError>),
    /// A statement needs more memory than a session has.
    #[error(
        "the query needs more than the {} MiB that a session has; name fewer columns, or take fewer rows at a time",
        limits::MEMORY_BYTES >> 20
    )]
    Memory(#[source] Box<DataFusionError>),
    /// A statement compares vectors that have nothing to do with each other.
    #[error(
        "{function} compares embeddings of {first_table} (model {first_model}) with embeddings of {second_table} \
         (model {second_model}), which share no space; embed both tables with one model, \
         or force it with --mix-models"
    )]
    MixedModels {
        /// The function.
        function: &'static str,
        /// A table.
        first_table: String,
        /// The fingerprint of its model, shortened.
        first_model: String,
        /// A table of another model.
        second_table: String,
        /// The fingerprint of that one, shortened.
        second_model: String,
    },
    /// There is no such table.
    #[error("there is no table {name:?}; {hint}")]
    NoTable {
        /// The name.
        name: String,
        /// A name that is meant, or those there are.
        hint: String,
    },
    /// A stored table was to be dropped or replaced.
    #[error("{table} is stored; a session can neither drop nor replace it")]
    Stored {
        /// The table.
        table: String,
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
        source: ParquetError,
    },
}

impl Remedied for QueryError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Storage(error) => error.remedy(),
            Self::Embed(error) => error.remedy(),
            Self::Runs(error) => error.remedy(),
            Self::Data(error) | Self::Source { source: error, .. } => error.remedy(),
            Self::Session(_) => Remedy::ReportBug,
            Self::Statement(error) => own_remedy(error).unwrap_or_else(|| engine_remedy(error)),
            Self::Memory(_)
            | Self::MixedModels { .. }
            | Self::NoTable { .. }
            | Self::Stored { .. }
            | Self::NoVersion { .. } => Remedy::FixCommand,
            Self::MissingFile { .. } | Self::ChangedFile { .. } | Self::BadFile { .. } => Remedy::FixData,
        }
    }
}

/// What an error of ours says that the engine shares with others and so cannot give away.
fn own_remedy(error: &DataFusionError) -> Option<Remedy> {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let own = (error.downcast_ref().map(QueryError::remedy))
            .or_else(|| error.downcast_ref().map(DataError::remedy))
            .or_else(|| error.downcast_ref().map(StorageError::remedy));
        if own.is_some() {
            return own;
        }
        cause = error.source();
    }
    None
}

/// What an error of the engine itself says.
fn engine_remedy(error: &DataFusionError) -> Remedy {
    match error.find_root() {
        DataFusionError::Internal(_) | DataFusionError::ExecutionJoin(_) => Remedy::ReportBug,
        DataFusionError::ObjectStore(_) | DataFusionError::IoError(_) => Remedy::CheckStorage,
        DataFusionError::SQL(..)
        | DataFusionError::Plan(_)
        | DataFusionError::SchemaError(..)
        | DataFusionError::NotImplemented(_)
        | DataFusionError::Configuration(_) => Remedy::FixCommand,
        _ => Remedy::FixData,
    }
}

impl QueryError {
    /// An error of the engine: ours where ours is at its root.
    pub fn of(error: DataFusionError) -> Self {
        own(error).unwrap_or_else(|error| match error.find_root() {
            DataFusionError::ResourcesExhausted(_) => Self::Memory(Box::new(error)),
            _ => Self::Statement(Box::new(error)),
        })
    }
}

/// Unpacks the error of ours that a table handed through the engine.
fn own(error: DataFusionError) -> Result<QueryError, DataFusionError> {
    match error {
        DataFusionError::External(error) => own_cause(error).map_err(DataFusionError::External),
        DataFusionError::Context(context, error) => {
            own(*error).map_err(|error| DataFusionError::Context(context, Box::new(error)))
        }
        DataFusionError::Diagnostic(diagnostic, error) => {
            own(*error).map_err(|error| DataFusionError::Diagnostic(diagnostic, Box::new(error)))
        }
        DataFusionError::Shared(error) => Arc::try_unwrap(error).map_err(DataFusionError::Shared).and_then(own),
        DataFusionError::ParquetError(error) => match *error {
            ParquetError::External(error) => {
                own_cause(error).map_err(|error| DataFusionError::from(ParquetError::External(error)))
            }
            other => Err(DataFusionError::from(other)),
        },
        DataFusionError::ArrowError(error, trace) => match *error {
            ArrowError::ExternalError(error) => own_cause(error)
                .map_err(|error| DataFusionError::ArrowError(Box::new(ArrowError::ExternalError(error)), trace)),
            other => Err(DataFusionError::ArrowError(Box::new(other), trace)),
        },
        other => Err(other),
    }
}

/// An error of ours in a cause, or within an error of the engine in it.
fn own_cause(error: Box<dyn Error + Send + Sync>) -> Result<QueryError, Box<dyn Error + Send + Sync>> {
    let error = match error.downcast::<QueryError>() {
        Ok(own) => return Ok(*own),
        Err(error) => error,
    };
    let error = match error.downcast::<DataError>() {
        Ok(own) => return Ok(QueryError::Data(own)),
        Err(error) => error,
    };
    let error = match error.downcast::<StorageError>() {
        Ok(own) => return Ok(QueryError::Storage(*own)),
        Err(error) => error,
    };
    match error.downcast::<ParquetError>() {
        Ok(inner) => own(DataFusionError::ParquetError(inner)).map_err(Into::into),
        Err(error) => match error.downcast::<DataFusionError>() {
            Ok(inner) => own(*inner).map_err(Into::into),
            Err(error) => Err(error),
        },
    }
}

impl From<EmbedError> for QueryError {
    fn from(error: EmbedError) -> Self {
        Self::Embed(Box::new(error))
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

#[cfg(test)]
mod tests {
    use datafusion::common::Diagnostic;

    use super::*;

    fn no_table() -> QueryError {
        QueryError::NoTable { name: "t".to_owned(), hint: String::new() }
    }

    #[test]
    fn our_errors_are_found_wherever_the_engine_puts_them() {
        let ours = || DataFusionError::from(no_table());
        let location = Location::parse("/a", std::path::Path::new("/")).unwrap();
        let missing = || DataFusionError::External(Box::new(StorageError::NotFound(location.clone())));
        let shared = Arc::new(ours());
        let still_shared = Arc::clone(&shared);
        for (error, remedy) in [
            (ours(), Remedy::FixCommand),
            (ours().context("planning").context("again"), Remedy::FixCommand),
            (ours().with_diagnostic(Diagnostic::new_error("", None)), Remedy::FixCommand),
            (DataFusionError::Shared(Arc::new(ours())), Remedy::FixCommand),
            (DataFusionError::Shared(still_shared).context("join"), Remedy::FixCommand),
            (ArrowError::ExternalError(Box::new(ours())).into(), Remedy::FixCommand),
            (ParquetError::External(Box::new(no_table())).into(), Remedy::FixCommand),
            (
                ArrowError::ExternalError(Box::new(ParquetError::External(Box::new(no_table())))).into(),
                Remedy::FixCommand,
            ),
            (DataFusionError::External(Box::new(ours().context("x"))), Remedy::FixCommand),
            (missing().context("scan"), Remedy::FixData),
            (DataFusionError::Plan("no such function".to_owned()), Remedy::FixCommand),
            (DataFusionError::NotImplemented("x".to_owned()), Remedy::FixCommand),
            (DataFusionError::Internal("x".to_owned()).context("y"), Remedy::ReportBug),
            (ArrowError::DivideByZero.into(), Remedy::FixData),
            (DataFusionError::ResourcesExhausted("x".to_owned()).context("sort"), Remedy::FixCommand),
        ] {
            let text = error.to_string();
            assert_eq!(QueryError::of(error).remedy(), remedy, "{text}");
        }
        drop(shared);
        assert!(matches!(QueryError::of(ours().context("x")), QueryError::NoTable { .. }));
        assert!(matches!(QueryError::of(missing()), QueryError::Storage(_)));
    }
}
