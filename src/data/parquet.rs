//! Parquet files of a snapshot: footers read once, bytes read only while the file is still
//! the one that was listed.

use std::{ops::Range, sync::Arc};

use arrow::datatypes::{DataType, Schema, SchemaRef, TimeUnit};
use bytes::Bytes;
use datafusion::{
    datasource::{
        listing::PartitionedFile,
        physical_plan::{ParquetFileReaderFactory, parquet::Int96Coercer},
    },
    physical_plan::metrics::ExecutionPlanMetricsSet,
};
use futures::{FutureExt, TryStreamExt, future::BoxFuture};
use parquet::{
    arrow::{
        ParquetRecordBatchStreamBuilder,
        arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
        async_reader::AsyncFileReader,
        parquet_to_arrow_schema,
    },
    errors::{ParquetError, Result as ParquetResult},
    file::metadata::{ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData},
};

use super::{DataError, file::SnapshotFile, prepare::RowGroup};
use crate::limits;

/// The footer of a file.
pub(super) async fn footer(file: &SnapshotFile) -> Result<Arc<ParquetMetaData>, DataError> {
    if file.entry().size_bytes == 0 {
        return Err(DataError::EmptyFile { file: file.location().clone(), format: "Parquet" });
    }
    let mut fetch = FooterReader(file.clone());
    ParquetMetaDataReader::new()
        .with_prefetch_hint(Some(limits::FOOTER_BYTES))
        .load_and_finish(&mut fetch, file.entry().size_bytes)
        .await
        .map(Arc::new)
        .map_err(|error| file.parquet_error(error))
}

/// Ranges of a file, for the footer's reader.
struct FooterReader(SnapshotFile);

impl parquet::arrow::async_reader::MetadataFetch for &mut FooterReader {
    fn fetch(&mut self, range: Range<u64>) -> BoxFuture<'_, ParquetResult<Bytes>> {
        async move { self.0.range(range).await.map_err(external) }.boxed()
    }
}

fn external(error: DataError) -> ParquetError {
    ParquetError::External(Box::new(error))
}

/// The file's columns. Timestamps of 96 bits are read as microseconds, for as nanoseconds
/// the year 9999 does not fit.
pub(super) fn arrow_schema(metadata: &ParquetMetaData) -> ParquetResult<SchemaRef> {
    let file = metadata.file_metadata();
    let schema = parquet_to_arrow_schema(file.schema_descr(), file.key_value_metadata())?;
    let coerced = Int96Coercer::new(file.schema_descr(), &schema, &TimeUnit::Microsecond).coerce();
    Ok(Arc::new(coerced.unwrap_or(schema).with_metadata(std::collections::HashMap::new())))
}

/// The footer in the form that decoders take.
pub(super) fn decoder_metadata(metadata: &Arc<ParquetMetaData>) -> ParquetResult<ArrowReaderMetadata> {
    let options = ArrowReaderOptions::new().with_schema(arrow_schema(metadata)?);
    ArrowReaderMetadata::try_new(metadata.clone(), options)
}

/// Decodes all rows of a file for nothing but the errors.
pub(super) async fn decode_all(file: &SnapshotFile, metadata: &Arc<ParquetMetaData>) -> Result<(), DataError> {
    let reader = FileReader::new(file.clone(), metadata.clone(), false);
    let decode = async {
        let builder = ParquetRecordBatchStreamBuilder::new_with_metadata(reader, decoder_metadata(metadata)?);
        let mut rows = builder.with_batch_size(limits::BATCH_ROWS).build()?;
        while rows.try_next().await?.is_some() {}
        Ok(())
    };
    decode.await.map_err(|error| file.parquet_error(error))
}

/// Reads a file with its footer at hand; looks once whether the file is still the one listed.
pub(super) struct FileReader {
    file: SnapshotFile,
    metadata: Arc<ParquetMetaData>,
    checked: bool,
}

impl FileReader {
    /// A reader; `checked` if the file was looked at already.
    pub(super) fn new(file: SnapshotFile, metadata: Arc<ParquetMetaData>, checked: bool) -> Self {
        Self { file, metadata, checked }
    }

    async fn check_once(&mut self) -> Result<(), DataError> {
        if !self.checked {
            self.file.check().await?;
            self.checked = true;
        }
        Ok(())
    }
}

impl AsyncFileReader for FileReader {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, ParquetResult<Bytes>> {
        async move {
            self.check_once().await.map_err(external)?;
            self.file.range(range).await.map_err(external)
        }
        .boxed()
    }

    fn get_byte_ranges(&mut self, ranges: Vec<Range<u64>>) -> BoxFuture<'_, ParquetResult<Vec<Bytes>>> {
        async move {
            self.check_once().await.map_err(external)?;
            self.file.ranges(&ranges).await.map_err(external)
        }
        .boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        _options: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, ParquetResult<Arc<ParquetMetaData>>> {
        let metadata = self.metadata.clone();
        async move { Ok(metadata) }.boxed()
    }
}

/// What a `PartitionedFile` carries so that scans find the footer again.
#[derive(Clone, Debug)]
pub(super) struct OpenedFile {
    /// The file.
    pub(super) file: SnapshotFile,
    /// Its footer.
    pub(super) metadata: Arc<ParquetMetaData>,
}

/// Gives scans the footers read at the start.
#[derive(Debug)]
pub(super) struct ReaderFactory;

impl ParquetFileReaderFactory for ReaderFactory {
    fn create_reader(
        &self,
        _partition: usize,
        file: PartitionedFile,
        _metadata_size_hint: Option<usize>,
        _metrics: &ExecutionPlanMetricsSet,
    ) -> datafusion::error::Result<Box<dyn AsyncFileReader + Send>> {
        let opened = file.extension::<OpenedFile>().ok_or_else(|| {
            datafusion::error::DataFusionError::Internal(format!("{} was not opened before its scan", file.path()))
        })?;
        Ok(Box::new(FileReader::new(opened.file.clone(), opened.metadata.clone(), false)))
    }
}

/// The row groups with the decoded size of some columns.
pub(super) fn row_groups(metadata: &ParquetMetaData, schema: &Schema, columns: &[String]) -> Vec<RowGroup> {
    let roots: Vec<usize> = columns.iter().filter_map(|name| schema.index_of(name).ok()).collect();
    let size = |group: &RowGroupMetaData| -> u64 {
        let descriptor = metadata.file_metadata().schema_descr();
        (0..group.num_columns())
            .filter(|&leaf| roots.contains(&descriptor.get_column_root_idx(leaf)))
            .map(|leaf| leaf_bytes(group, leaf, schema.field(descriptor.get_column_root_idx(leaf)).data_type()))
            .sum()
    };
    let group = |group: &RowGroupMetaData| RowGroup { rows: group.num_rows().max(0) as u64, size_bytes: size(group) };
    metadata.row_groups().iter().map(group).collect()
}

/// Bytes of one leaf column, decoded: as many values as the footer says, by their width.
fn leaf_bytes(group: &RowGroupMetaData, leaf: usize, root: &DataType) -> u64 {
    let column = group.column(leaf);
    let values = column.num_values().max(0) as u64;
    // Dictionaries make the encoded size of text a weak guide; writers that know better say so.
    let text = || column.unencoded_byte_array_data_bytes().unwrap_or(0).max(column.uncompressed_size()).max(0) as u64;
    value_width(root).map_or_else(|| values * 4 + text(), |width| values * width)
}

/// Width of one value of a column or of a list's items, where all have one.
fn value_width(data_type: &DataType) -> Option<u64> {
    match data_type {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            value_width(item.data_type())
        }
        DataType::FixedSizeBinary(width) => u64::try_from(*width).ok(),
        DataType::Struct(_) => None,
        DataType::Boolean => Some(1),
        DataType::Dictionary(_, values) => value_width(values),
        other => other.primitive_width().map(|width| width as u64),
    }
}
