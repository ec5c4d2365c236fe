//! Columns to feature vectors: resolved against a schema, fitted once over all rows, saved
//! with the model.

use arrow::{array::RecordBatch, datatypes::Schema};

use super::{DataError, prepare::Dataset};
use crate::{
    pipeline::{ModelPlan, Origin},
    storage::Storage,
};

/// The feature columns of a model, resolved against a table's columns; not yet fitted.
#[derive(Clone, Debug)]
pub struct FeatureLayout {}

impl FeatureLayout {
    /// Resolves patterns, checks that each column exists and can be a feature. Faults point
    /// into the pipeline file (`models.<name>.features[i]`).
    pub fn resolve(model: &ModelPlan, schema: &Schema, origin: &Origin) -> Result<Self, DataError> {
        let _ = (model, schema, origin);
        unimplemented!()
    }

    /// The columns, each once.
    pub fn columns(&self) -> Vec<String> {
        unimplemented!()
    }

    /// The columns in which a missing value rejects the row.
    pub fn reject_missing(&self) -> Vec<String> {
        unimplemented!()
    }

    /// Features of a row, where that is known without reading rows (no variable-size lists).
    pub fn width(&self) -> Option<usize> {
        unimplemented!()
    }
}

/// Feature columns with everything learned from the rows: saved as JSON with the model.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct FittedFeatures {}

impl FittedFeatures {
    /// Features of a row.
    pub fn width(&self) -> usize {
        unimplemented!()
    }

    /// The columns read, each once.
    pub fn columns(&self) -> Vec<String> {
        unimplemented!()
    }

    /// The columns in which a missing value rejects the row.
    pub fn reject_missing(&self) -> Vec<String> {
        unimplemented!()
    }

    /// The name of each feature: `price`, `pixels[17]`, `price is missing`.
    pub fn names(&self) -> Vec<String> {
        unimplemented!()
    }

    /// Appends the batch's rows to `out`, row-major, `width` numbers each. `file` and
    /// `first_row` (the batch's first row within that file) are for error messages. A missing
    /// value under `missing: error`, an infinity, a list of another width are errors that
    /// name file, row and column.
    pub fn encode(&self, batch: &RecordBatch, file: &str, first_row: u64, out: &mut Vec<f32>) -> Result<(), DataError> {
        let _ = (batch, file, first_row, out);
        unimplemented!()
    }
}

/// Learns scaling and fill values in one pass over all rows; bounded memory. `progress` is
/// told the rows done so far.
pub async fn fit(
    storage: &Storage,
    layout: &FeatureLayout,
    dataset: &std::sync::Arc<Dataset>,
    progress: &(dyn Fn(u64) + Send + Sync),
) -> Result<FittedFeatures, DataError> {
    let _ = (storage, layout, dataset, progress);
    unimplemented!()
}
