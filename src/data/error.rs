//! Why data could not be used; every variant names the file, table or column.

use super::{features::FeatureError, feed::FeedError};
use crate::{
    pipeline::Faults,
    remedy::{Remedied, Remedy},
    storage::StorageError,
};

/// Why data could not be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be reached.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The pipeline file does not fit the data.
    #[error(transparent)]
    Faults(#[from] Faults),
    /// Rows cannot become features.
    #[error(transparent)]
    Feature(#[from] FeatureError),
    /// A feed gave out.
    #[error(transparent)]
    Feed(#[from] FeedError),
    /// DataFusion could not plan or run a query.
    #[error("{table}: the query failed")]
    Query {
        /// The source or transform.
        table: String,
        /// What DataFusion says.
        source: Box<datafusion::error::DataFusionError>,
    },
}

impl DataError {
    /// A query over `table` failed: a storage fault, bad data or an unplannable query.
    pub fn query(table: &str, error: datafusion::error::DataFusionError) -> Self {
        Self::Query { table: table.to_owned(), source: Box::new(error) }
    }
}

impl Remedied for DataError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Storage(error) => error.remedy(),
            Self::Faults(error) => error.remedy(),
            Self::Feature(error) => error.remedy(),
            Self::Feed(error) => error.remedy(),
            Self::Query { .. } => Remedy::FixData,
        }
    }
}
