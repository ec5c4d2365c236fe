//! Why rows could not become features; every variant names the column, and the row where
//! there is one.

use arrow::{datatypes::DataType, error::ArrowError};

use crate::remedy::{Remedied, Remedy};

/// Why rows could not become features. Rows count from 1 within their file.
#[derive(Debug, thiserror::Error)]
pub enum FeatureError {
    /// A value is NULL or NaN, and the file does not say what to do.
    #[error(
        "{file}, row {row}: column `{column}` is NULL or NaN; fill it with `missing: mean`, `median` or \
         `{{constant: 0}}`, or leave such rows out with `missing: reject`"
    )]
    Missing {
        /// The file.
        file: String,
        /// From 1, within the file.
        row: u64,
        /// The column, with the element of a list: `pixels[17]`.
        column: String,
    },
    /// A value is infinite, or too large for a 32-bit float.
    #[error(
        "{file}, row {row}: column `{column}` is {value}, not a finite 32-bit number after scaling; replace it in a \
         transform"
    )]
    NotFinite {
        /// The file.
        file: String,
        /// From 1, within the file.
        row: u64,
        /// The column, with the element of a list.
        column: String,
        /// The value before scaling.
        value: f64,
    },
    /// A list of another width.
    #[error("{file}, row {row}: column `{column}` has {found} elements, others have {expected}")]
    Ragged {
        /// The file.
        file: String,
        /// From 1, within the file.
        row: u64,
        /// The column.
        column: String,
        /// Elements of this row.
        found: usize,
        /// Elements of a row as learned.
        expected: usize,
    },
    /// Nothing to learn from.
    #[error("column `{column}` has no value in any row, so there is nothing to learn {what} from; leave it out")]
    NoValues {
        /// The column, with the element of a list.
        column: String,
        /// What was to be learned.
        what: &'static str,
    },
    /// More features than a model can have.
    #[error("the feature columns have {width} numbers per row; a model has {limit} at most")]
    TooWide {
        /// Numbers per row.
        width: usize,
        /// `limits::MAX_FEATURES`.
        limit: usize,
    },
    /// A column that the features were fitted on is not there.
    #[error("{file}: no column `{column}`, which the features are made of")]
    NoColumn {
        /// The file.
        file: String,
        /// The column.
        column: String,
    },
    /// A column has a type that the features were not fitted on.
    #[error("{file}: column `{column}` is {found}, the features were fitted on {expected}")]
    WrongType {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// Its type here.
        found: DataType,
        /// What it should be.
        expected: String,
    },
    /// Arrow could not convert a column.
    #[error("{file}: column `{column}` cannot be converted")]
    Arrow {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// What Arrow says.
        #[source]
        source: ArrowError,
    },
    /// A task of ours ended without a result.
    #[error("learning the features stopped in mid-work")]
    Stopped(#[source] tokio::task::JoinError),
}

impl Remedied for FeatureError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::TooWide { .. } => Remedy::FixFile,
            Self::Stopped(_) => Remedy::ReportBug,
            _ => Remedy::FixData,
        }
    }
}
