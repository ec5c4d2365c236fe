//! Reading ranges of a data set's rows, in order; the one place where its files are opened.

use std::{collections::HashSet, sync::Arc};

use arrow::{
    array::{RecordBatch, RecordBatchOptions},
    datatypes::SchemaRef,
    error::ArrowError,
};
use futures::{StreamExt, TryStreamExt, stream, stream::BoxStream};
use parquet::arrow::{
    ParquetRecordBatchStreamBuilder, ProjectionMask,
    arrow_reader::{ArrowReaderMetadata, RowSelection, RowSelector},
};

use super::{
    DataError,
    file::SnapshotFile,
    parquet::{FileReader, decoder_metadata},
    partition::Split,
    prepare::Dataset,
};
use crate::{limits, storage::Storage};

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
    let reader = Reader {
        storage: storage.clone(),
        dataset: dataset.clone(),
        columns: columns.to_vec(),
        opened: None,
        checked: HashSet::new(),
    };
    stream::try_unfold((reader, splits.into_iter()), |(mut reader, mut splits)| async move {
        let Some(split) = splits.next() else { return Ok(None) };
        let rows = reader.split(&split)?;
        Ok::<_, DataError>(Some((rows, (reader, splits))))
    })
    .try_flatten()
    .boxed()
}

/// One split per row group, all rows in order.
pub fn all_splits(dataset: &Dataset) -> Vec<Split> {
    let mut first_row = 0;
    let mut splits = Vec::new();
    for (file, data_file) in dataset.files.iter().enumerate() {
        for (row_group, group) in data_file.row_groups.iter().enumerate() {
            splits.push(Split { file, row_group, rows: 0..group.rows, first_row });
            first_row += group.rows;
        }
    }
    splits
}

/// Where a stream of splits stands.
struct Reader {
    storage: Storage,
    dataset: Arc<Dataset>,
    columns: Vec<String>,
    /// The file of the last split: the next is often of the same.
    opened: Option<(usize, Opened)>,
    /// Files found unchanged; once per stream is enough.
    checked: HashSet<usize>,
}

/// A file with its footer in the decoder's form.
#[derive(Clone)]
struct Opened {
    file: SnapshotFile,
    metadata: ArrowReaderMetadata,
    mask: ProjectionMask,
    /// For each column asked for its place among the decoded.
    order: Arc<[usize]>,
    schema: SchemaRef,
}

impl Reader {
    fn split(&mut self, split: &Split) -> Result<BoxStream<'static, Result<Rows, DataError>>, DataError> {
        let opened = self.open(split.file)?;
        let checked = !self.checked.insert(split.file);
        let groups = &self.dataset.files[split.file].row_groups;
        let group_rows = groups[split.row_group].rows;
        let before: u64 = groups[..split.row_group].iter().map(|group| group.rows).sum();
        let reader = FileReader::new(opened.file.clone(), opened.metadata.metadata().clone(), checked);
        let mut builder = ParquetRecordBatchStreamBuilder::new_with_metadata(reader, opened.metadata.clone())
            .with_row_groups(vec![split.row_group])
            .with_projection(opened.mask.clone())
            .with_batch_size(limits::BATCH_ROWS);
        if split.rows != (0..group_rows) {
            let (skipped, selected) = (split.rows.start as usize, (split.rows.end - split.rows.start) as usize);
            builder = builder.with_row_selection(RowSelection::from(vec![
                RowSelector::skip(skipped),
                RowSelector::select(selected),
            ]));
        }
        let batches = builder.build().map_err(|error| opened.file.parquet_error(error))?;
        let (file, mut row_in_file, mut row) = (split.file, before + split.rows.start, split.first_row);
        let rows = batches.map(move |batch| {
            let batch = batch.map_err(|error| opened.file.parquet_error(error))?;
            let batch = opened.arrange(&batch).map_err(|error| opened.file.corrupt(error))?;
            let rows = Rows { file, row_in_file, row, batch };
            row_in_file += rows.batch.num_rows() as u64;
            row += rows.batch.num_rows() as u64;
            Ok(rows)
        });
        Ok(rows.boxed())
    }

    fn open(&mut self, place: usize) -> Result<Opened, DataError> {
        if let Some((last, opened)) = &self.opened
            && *last == place
        {
            return Ok(opened.clone());
        }
        let data_file = &self.dataset.files[place];
        let file = SnapshotFile::new(&self.storage, data_file.entry.clone())?;
        let metadata = decoder_metadata(&data_file.metadata).map_err(|error| file.parquet_error(error))?;
        let found = |name: &String| metadata.schema().index_of(name);
        let roots: Vec<usize> =
            self.columns.iter().map(found).collect::<Result<_, _>>().map_err(|error| file.corrupt(error))?;
        let mut decoded = roots.clone();
        decoded.sort_unstable();
        let order = roots.iter().filter_map(|root| decoded.binary_search(root).ok()).collect();
        let fields = self.columns.iter().map(|name| self.dataset.schema.field_with_name(name).cloned());
        let fields: Vec<_> = fields.collect::<Result<_, _>>().map_err(|error| file.corrupt(error))?;
        let opened = Opened {
            mask: ProjectionMask::roots(metadata.parquet_schema(), roots),
            file,
            metadata,
            order,
            schema: Arc::new(arrow::datatypes::Schema::new(fields)),
        };
        self.opened = Some((place, opened.clone()));
        Ok(opened)
    }
}

impl Opened {
    /// The decoded columns, which come in the file's order, as asked for.
    fn arrange(&self, batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
        let columns = self.order.iter().map(|&place| batch.column(place).clone()).collect();
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        RecordBatch::try_new_with_options(self.schema.clone(), columns, &options)
    }
}
