//! A source as a DataFusion table over exactly the files of the snapshot.
//!
//! Parquet goes through DataFusion's own scan, with the footers read at the start. CSV and
//! Arrow IPC are streamed file by file. All formats share the rules: columns by name, missing
//! ones NULL, `key=value` folders as columns at the end.

use std::{collections::BTreeMap, fmt, ops::Range, sync::Arc};

use arrow::{
    array::{ArrayRef, RecordBatch, RecordBatchOptions, new_null_array},
    compute::{CastOptions, cast_with_options},
    datatypes::{DataType, Schema, SchemaRef},
};
use async_trait::async_trait;
use datafusion::{
    catalog::Session,
    common::{Statistics, config::TableParquetOptions, stats::Precision},
    datasource::{
        TableProvider, TableType,
        listing::PartitionedFile,
        physical_plan::{FileGroup, FileGroupPartitioner, FileScanConfigBuilder, ParquetSource},
        source::DataSourceExec,
        table_schema::TableSchema,
    },
    error::{DataFusionError, Result as QueryResult},
    execution::{SendableRecordBatchStream, TaskContext, object_store::ObjectStoreUrl},
    logical_expr::Expr,
    physical_plan::{
        ExecutionPlan,
        stream::RecordBatchStreamAdapter,
        streaming::{PartitionStream, StreamingTableExec},
    },
    scalar::ScalarValue,
};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use parquet::file::metadata::ParquetMetaData;

use super::{
    DataError, csv,
    file::SnapshotFile,
    hive::{PartitionColumns, partition_columns},
    ipc, parquet as parquet_files, schema,
};
use crate::{
    limits,
    pipeline::{
        SourcePlan,
        spec::{CsvSpec, FileFormat},
    },
    storage::{FileEntry, Storage},
};

/// Pieces smaller than this are not worth a stream of their own.
const MIN_PIECE_BYTES: usize = 1 << 20;

/// A source, opened.
#[derive(Debug)]
pub(super) struct SourceTable {
    name: Arc<str>,
    url: ObjectStoreUrl,
    columns: TableSchema,
    csv: CsvSpec,
    files: Vec<SourceFile>,
}

/// A file of a source, opened.
#[derive(Clone, Debug)]
pub(super) struct SourceFile {
    /// The file.
    pub(super) file: SnapshotFile,
    /// Values of the partition columns.
    folders: Vec<ScalarValue>,
    /// What the file itself tells.
    pub(super) content: Content,
}

/// What a file tells about itself.
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// A Parquet file's footer and its columns.
    Parquet(Arc<ParquetMetaData>, SchemaRef),
    /// A CSV file's columns, by guess.
    Csv(SchemaRef),
    /// An Arrow IPC file's footer.
    Arrow(ipc::IpcFooter),
}

impl Content {
    /// The file's own columns.
    pub(super) fn schema(&self) -> &SchemaRef {
        match self {
            Self::Parquet(_, schema) | Self::Csv(schema) => schema,
            Self::Arrow(footer) => &footer.schema,
        }
    }
}

/// The format of a source's files: as declared, else the one that all names tell.
pub fn source_format(source: &SourcePlan, files: &[FileEntry]) -> Result<Option<FileFormat>, DataError> {
    if source.format.is_some() {
        return Ok(source.format);
    }
    let table = || source.name.clone();
    let mut known: Option<(FileFormat, &FileEntry)> = None;
    for file in files {
        let Some(format) = format_of_name(file.location.name()) else {
            return Err(DataError::UnknownFormat { table: table(), file: file.location.clone() });
        };
        match known {
            Some((other, first)) if other != format => {
                let (first, second) = (first.location.clone(), file.location.clone());
                return Err(DataError::MixedFormats { table: table(), first, second });
            }
            _ => known = Some((format, file)),
        }
    }
    Ok(known.map(|(format, _)| format))
}

fn format_of_name(name: &str) -> Option<FileFormat> {
    let name = name.to_ascii_lowercase();
    let (_, ending) = csv::uncompressed_name(&name).rsplit_once('.')?;
    let compressed = csv::uncompressed_name(&name).len() < name.len();
    match ending {
        "csv" => Some(FileFormat::Csv),
        "parquet" if !compressed => Some(FileFormat::Parquet),
        "arrow" | "feather" | "ipc" if !compressed => Some(FileFormat::Arrow),
        _ => None,
    }
}

impl SourceTable {
    /// Reads the footers (of CSV the first lines) and joins the columns.
    pub(super) async fn open(
        storage: &Storage,
        source: &SourcePlan,
        entries: &[FileEntry],
        declared: &BTreeMap<String, DataType>,
    ) -> Result<Self, DataError> {
        let no_files = || DataError::NoFiles { table: source.name.clone(), location: source.location.clone() };
        let format = source_format(source, entries)?.ok_or_else(no_files)?;
        let first = entries.first().ok_or_else(no_files)?;
        let files: Vec<SnapshotFile> =
            entries.iter().map(|entry| SnapshotFile::new(storage, entry.clone())).collect::<Result<_, _>>()?;
        let folders = partition_columns(&source.name, source.location.path(), &files, declared)?;
        let sample_bytes = limits::CSV_SAMPLE_BYTES.min(64 * limits::CSV_SAMPLE_BYTES / files.len()).max(1 << 16);
        let contents: Vec<Content> = stream::iter(files.clone())
            .map(|file| open_unchanged(&source.name, file, format, &source.csv, sample_bytes))
            .buffered(limits::FILES_AT_ONCE)
            .try_collect()
            .await?;
        let schemas = files.iter().zip(&contents).map(|(file, content)| (file.location(), &**content.schema()));
        let merged = schema::merge(&source.name, schemas, declared, format == FileFormat::Csv)?;
        let merged = without(&merged, &folders);
        if merged.fields().is_empty() {
            return Err(DataError::NoColumns { table: source.name.clone(), file: first.location.clone() });
        }
        let columns = TableSchema::builder(Arc::new(merged)).with_table_partition_cols(folders.fields).build();
        let files = files.into_iter().zip(folders.values).zip(contents);
        Ok(Self {
            name: source.name.as_str().into(),
            url: ObjectStoreUrl::parse(first.location.root()).map_err(|error| DataError::query(&source.name, error))?,
            columns,
            csv: source.csv.clone(),
            files: files.map(|((file, folders), content)| SourceFile { file, folders, content }).collect(),
        })
    }

    /// The files, in order.
    pub(super) fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// All columns, those from folders last.
    pub(super) fn schema(&self) -> &SchemaRef {
        self.columns.table_schema()
    }

    /// The columns from folders.
    pub(super) fn is_folder_column(&self, name: &str) -> bool {
        self.columns.table_partition_cols().iter().any(|field| field.name() == name)
    }

    fn scan_parquet(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        limit: Option<usize>,
    ) -> QueryResult<Arc<dyn ExecutionPlan>> {
        let rows = |file: &SourceFile| match &file.content {
            Content::Parquet(metadata, _) => metadata.file_metadata().num_rows().max(0) as usize,
            _ => 0,
        };
        let mut statistics = Statistics::new_unknown(self.schema());
        statistics.num_rows = Precision::Exact(self.files.iter().map(rows).sum());
        let files: FileGroup = FileGroup::new(self.files.iter().filter_map(SourceFile::partitioned).collect());
        let groups = FileGroupPartitioner::new()
            .with_target_partitions(state.config().target_partitions())
            .with_repartition_file_min_size(MIN_PIECE_BYTES)
            .repartition_file_groups(std::slice::from_ref(&files))
            .unwrap_or_else(|| vec![files]);
        let options = TableParquetOptions {
            global: state.config_options().execution.parquet.clone(),
            ..TableParquetOptions::default()
        };
        let source = ParquetSource::new(self.columns.clone())
            .with_table_parquet_options(options)
            .with_parquet_file_reader_factory(Arc::new(parquet_files::ReaderFactory));
        let config = FileScanConfigBuilder::new(self.url.clone(), Arc::new(source))
            .with_file_groups(groups)
            .with_statistics(statistics)
            .with_projection_indices(projection.cloned())?
            .with_limit(limit)
            .with_preserve_order(true)
            .build();
        Ok(DataSourceExec::from_data_source(config))
    }

    fn scan_streams(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        limit: Option<usize>,
    ) -> QueryResult<Arc<dyn ExecutionPlan>> {
        let schema = match projection {
            Some(columns) => Arc::new(self.schema().project(columns)?),
            None => self.schema().clone(),
        };
        let partition = |files: Range<usize>| -> Arc<dyn PartitionStream> {
            Arc::new(FileStreams {
                name: self.name.clone(),
                table_schema: self.schema().clone(),
                folder_columns: self.columns.table_partition_cols().iter().map(|field| field.name().clone()).collect(),
                csv: self.csv.clone(),
                files: self.files[files].to_vec(),
                schema: schema.clone(),
            })
        };
        let sizes: Vec<u64> = self.files.iter().map(|file| file.file.entry().size_bytes).collect();
        let partitions = contiguous(&sizes, state.config().target_partitions()).into_iter().map(partition).collect();
        Ok(Arc::new(StreamingTableExec::try_new(schema.clone(), partitions, None, None, false, limit)?))
    }
}

/// A file that cannot be opened may have changed since it was listed, which tells more.
async fn open_unchanged(
    table: &str,
    file: SnapshotFile,
    format: FileFormat,
    csv: &CsvSpec,
    sample_bytes: usize,
) -> Result<Content, DataError> {
    match open_file(table, &file, format, csv, sample_bytes).await {
        Ok(content) => Ok(content),
        Err(error) => {
            file.check().await?;
            Err(error)
        }
    }
}

async fn open_file(
    table: &str,
    file: &SnapshotFile,
    format: FileFormat,
    csv: &CsvSpec,
    sample_bytes: usize,
) -> Result<Content, DataError> {
    Ok(match format {
        FileFormat::Parquet => {
            let metadata = parquet_files::footer(file).await?;
            let schema = parquet_files::arrow_schema(&metadata).map_err(|error| file.parquet_error(error))?;
            Content::Parquet(metadata, schema)
        }
        FileFormat::Csv => Content::Csv(Arc::new(csv::columns(table, file, csv, sample_bytes).await?)),
        FileFormat::Arrow => Content::Arrow(ipc::footer(file).await?),
    })
}

/// A folder's value hides a column of the same name in the files, as in Spark.
fn without(schema: &Schema, folders: &PartitionColumns) -> Schema {
    let hidden = |name: &str| folders.fields.iter().any(|field| field.name() == name);
    Schema::new(schema.fields().iter().filter(|field| !hidden(field.name())).cloned().collect::<Vec<_>>())
}

impl SourceFile {
    fn partitioned(&self) -> Option<PartitionedFile> {
        let Content::Parquet(metadata, _) = &self.content else { return None };
        let opened = parquet_files::OpenedFile { file: self.file.clone(), metadata: metadata.clone() };
        let file = PartitionedFile::new_from_meta(self.file.meta());
        Some(file.with_partition_values(self.folders.clone()).with_extension(opened))
    }
}

/// Cuts files into at most `count` runs of about equal size, in order.
fn contiguous(sizes: &[u64], count: usize) -> Vec<Range<usize>> {
    let total: u64 = sizes.iter().sum::<u64>().max(1);
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut before = 0;
    let mut last = None;
    for (file, size) in sizes.iter().enumerate() {
        let run = u128::from(before) * count as u128 / u128::from(total);
        match runs.last_mut() {
            Some(open) if last == Some(run) => open.end = file + 1,
            _ => runs.push(file..file + 1),
        }
        last = Some(run);
        before += size;
    }
    runs
}

#[async_trait]
impl TableProvider for SourceTable {
    fn schema(&self) -> SchemaRef {
        self.columns.table_schema().clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        _filters: &[Expr],
        limit: Option<usize>,
    ) -> QueryResult<Arc<dyn ExecutionPlan>> {
        match self.files.first().map(|file| &file.content) {
            Some(Content::Parquet(..)) => self.scan_parquet(state, projection, limit),
            _ => self.scan_streams(state, projection, limit),
        }
    }
}

/// Some files of a CSV or Arrow IPC source, one after the other.
struct FileStreams {
    name: Arc<str>,
    table_schema: SchemaRef,
    folder_columns: Vec<String>,
    csv: CsvSpec,
    files: Vec<SourceFile>,
    /// The columns asked for.
    schema: SchemaRef,
}

impl fmt::Debug for FileStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} files of {}", self.files.len(), self.name)
    }
}

impl PartitionStream for FileStreams {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _context: Arc<TaskContext>) -> SendableRecordBatchStream {
        let streams: Vec<_> = self.files.iter().map(|file| self.read(file)).collect();
        let rows = stream::iter(streams).flatten().map_err(|error| DataFusionError::External(Box::new(error)));
        Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), rows))
    }
}

impl FileStreams {
    /// One file's rows in the columns asked for.
    fn read(&self, file: &SourceFile) -> stream::BoxStream<'static, Result<RecordBatch, DataError>> {
        let own = file.content.schema();
        let is_folder = |name: &String| self.folder_columns.contains(name);
        let wanted = self.schema.fields().iter().map(|field| field.name());
        let mut present: Vec<String> =
            wanted.filter(|name| !is_folder(name) && own.column_with_name(name).is_some()).cloned().collect();
        if present.is_empty() {
            // Some column has to be read for the number of rows to be known.
            present.extend(own.fields().first().map(|field| field.name().clone()));
        }
        if present.is_empty() {
            return stream::empty().boxed();
        }
        let folders = self.folder_columns.iter().cloned().zip(file.folders.iter().cloned()).collect();
        let shape = Shape { schema: self.schema.clone(), folders };
        let owner = file.file.clone();
        let rows = match &file.content {
            Content::Arrow(footer) => {
                let places = present.iter().filter_map(|name| own.index_of(name).ok()).collect();
                ipc::read(file.file.clone(), footer.clone(), places).flat_map(in_slices).boxed()
            }
            _ => csv::read(self.name.clone(), file.file.clone(), own, &self.table_schema, &present, &self.csv).boxed(),
        };
        rows.map(move |batch| shape.apply(&batch?).map_err(|error| owner.corrupt(error))).boxed()
    }
}

/// Record batches of a file may have any size; ours are bounded.
fn in_slices(batch: Result<RecordBatch, DataError>) -> impl Stream<Item = Result<RecordBatch, DataError>> + Send {
    let slices: Vec<_> = match batch {
        Err(error) => vec![Err(error)],
        Ok(batch) => (0..batch.num_rows())
            .step_by(limits::BATCH_ROWS)
            .map(|start| Ok(batch.slice(start, limits::BATCH_ROWS.min(batch.num_rows() - start))))
            .collect(),
    };
    stream::iter(slices)
}

/// Brings a file's columns to the source's: by name, cast, missing ones NULL.
struct Shape {
    schema: SchemaRef,
    folders: BTreeMap<String, ScalarValue>,
}

impl Shape {
    fn apply(&self, batch: &RecordBatch) -> QueryResult<RecordBatch> {
        let column = |name: &str, data_type: &DataType| -> QueryResult<ArrayRef> {
            match (self.folders.get(name), batch.column_by_name(name)) {
                (Some(value), _) => value.to_array_of_size(batch.num_rows()),
                // A value that does not fit is an error, never NULL.
                (None, Some(column)) => {
                    Ok(cast_with_options(column, data_type, &CastOptions { safe: false, ..CastOptions::default() })?)
                }
                (None, None) => Ok(new_null_array(data_type, batch.num_rows())),
            }
        };
        let columns = self.schema.fields().iter().map(|field| column(field.name(), field.data_type()));
        let columns = columns.collect::<QueryResult<Vec<_>>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        Ok(RecordBatch::try_new_with_options(self.schema.clone(), columns, &options)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_by_name() {
        let check = |name: &str, expected: Option<FileFormat>| assert_eq!(format_of_name(name), expected, "{name}");
        check("part-0.snappy.parquet", Some(FileFormat::Parquet));
        check("A.CSV", Some(FileFormat::Csv));
        check("a.csv.gz", Some(FileFormat::Csv));
        check("a.csv.zst", Some(FileFormat::Csv));
        check("a.parquet.gz", None);
        check("a.feather", Some(FileFormat::Arrow));
        check("part-00000", None);
        check("a.txt", None);
    }

    #[test]
    fn runs_are_contiguous_and_complete() {
        let check = |sizes: &[u64], count: usize, expected: &[(usize, usize)]| {
            let runs: Vec<_> = contiguous(sizes, count).into_iter().map(|run| (run.start, run.end)).collect();
            assert_eq!(runs, expected, "{sizes:?} in {count}");
        };
        check(&[], 4, &[]);
        check(&[0, 0], 4, &[(0, 2)]);
        check(&[5, 5, 5, 5], 2, &[(0, 2), (2, 4)]);
        check(&[100, 1, 1], 2, &[(0, 1), (1, 3)]);
        check(&[1, 1, 1], 8, &[(0, 1), (1, 2), (2, 3)]);
    }
}
