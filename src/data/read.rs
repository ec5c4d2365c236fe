//! Reading ranges of a data set's rows, in order; the one place where its files are opened.

use std::sync::Arc;

use arrow::array::RecordBatch;
use futures::stream::BoxStream;

use super::{DataError, partition::Split, prepare::Dataset};
use crate::storage::Storage;

/// Some consecutive rows.
#[derive(Clone, Debug)]
pub struct Rows {
    /// The columns asked for, in the order asked for.
    pub batch: RecordBatch,
    /// Index into `Dataset::files`.
    pub file: usize,
    /// The first row's place within its file, for error messages.
    pub row_in_file: u64,
    /// The first row's identity (its place in the data set).
    pub row: u64,
}

/// The rows of some splits, in order, in batches of at most `limits::BATCH_ROWS` that never
/// cross a split. A file that changed since the snapshot, is truncated or gone is an error
/// that names it.
pub fn read(
    storage: &Storage,
    dataset: &Arc<Dataset>,
    splits: Vec<Split>,
    columns: &[String],
) -> BoxStream<'static, Result<Rows, DataError>> {
    let _ = (storage, dataset, splits, columns);
    unimplemented!()
}

/// One split per row group, all rows in order.
pub fn all_splits(dataset: &Dataset) -> Vec<Split> {
    let _ = dataset;
    unimplemented!()
}
