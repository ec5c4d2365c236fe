//! A query's rows, written once as Parquet files in a fixed order.
//!
//! ```text
//!   query ──streams, each in order──▶ reject rows ──▶ <staging>/_<name>.tmp/part-00000.parquet ...
//!                                         └ hash ──▶  one file per partition     │ rename
//!                                                     <staging>/<name>/  ◀───────┘
//! ```
//!
//! The same query over the same snapshot gives the same files, whoever writes them: a later
//! attempt that finds none writes them again and meets the same rows at the same places.
//! Memory is bounded: rows pass through, and open row groups are flushed by their size.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, AsArray, BooleanArray, RecordBatch},
    compute::{filter_record_batch, interleave_record_batch},
    datatypes::{DataType, Float16Type, Float32Type, Float64Type, Schema},
};
use datafusion::{common::Column, execution::SendableRecordBatchStream, logical_expr::Expr};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::buffered::BufWriter;
use parquet::{
    arrow::AsyncArrowWriter,
    basic::{Compression, ZstdLevel},
    file::properties::{EnabledStatistics, WriterProperties},
    schema::types::ColumnPath,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::task::JoinSet;

use super::{
    DataError,
    file::SnapshotFile,
    in_order::OrderedQuery,
    parquet::{arrow_schema, footer, row_groups},
    prepare::{DataFile, Dataset, Needs, max_row_group_bytes},
    scan::Engine,
    spark_hash::partitions,
};
use crate::{
    ids::PartitionId,
    limits,
    pipeline::PipelinePlan,
    storage::{Location, Storage, StorageError},
};

/// What a staged folder holds; written into it last, before it is published.
const COUNTS_FILE: &str = "_counts.json";

/// The least and greatest upload buffer of a file; S3 takes no parts smaller than the latter.
const UPLOAD_BYTES: Range<u64> = 256 << 10..5 << 20;

/// Buffers of a file on their way to the store: one is sent while the next fills.
const UPLOADS: usize = 2;

/// The content of `_counts.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Counts {
    files: Vec<StagedFile>,
    rejected: BTreeMap<String, u64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StagedFile {
    name: String,
    rows: u64,
    partition: Option<PartitionId>,
}

/// Finds the staged rows of a table, or writes them.
pub(super) async fn stage(
    storage: &Storage,
    plan: &PipelinePlan,
    engine: &Engine,
    table: &str,
    needs: &Needs,
    staging: &Location,
) -> Result<Dataset, DataError> {
    let name = folder_name(table, needs);
    let folder = staging.join(&name);
    if let Some(counts) = read_counts(storage, &folder).await? {
        return open(storage, &folder, counts, needs).await;
    }
    let aside = staging.join(&format!("_{name}.tmp"));
    // A killed attempt's leftovers, or a copy that a store without renames did not finish.
    storage.remove(&aside).await?;
    storage.remove(&folder).await?;
    let written = write(storage, plan, engine, table, needs, &aside).await;
    let published = match written {
        Ok(counts) => publish(storage, &aside, &folder, &counts).await.map(|()| counts),
        Err(error) => Err(error),
    };
    match published {
        Ok(counts) => open(storage, &folder, counts, needs).await,
        Err(error) => {
            if let Err(error) = storage.remove(&aside).await {
                tracing::warn!(%error, "unfinished staged rows could not be removed");
            }
            // The engine does not say in which file a decoder failed.
            let damaged = if error.is_of_decoder() { engine.find_damaged().await } else { None };
            Err(damaged.unwrap_or(error))
        }
    }
}

/// One folder per table and need: a model and an embedding may need different columns.
fn folder_name(table: &str, needs: &Needs) -> String {
    let digest = format!("{:x}", Sha256::digest(format!("{needs:?}").as_bytes()));
    format!("{table}-{}", &digest[..12])
}

/// What an earlier attempt published, if it is whole.
async fn read_counts(storage: &Storage, folder: &Location) -> Result<Option<Counts>, DataError> {
    let file = folder.join(COUNTS_FILE);
    let bytes = match storage.read(&file).await {
        Ok(bytes) => bytes,
        Err(StorageError::NotFound(_)) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let counts: Counts =
        serde_json::from_slice(&bytes).map_err(|error| DataError::Corrupt { file, source: Box::new(error) })?;
    // Stores without renames copy file by file and may have been stopped in between.
    let there = storage.children(folder).await?;
    Ok(counts.files.iter().all(|file| there.contains(&file.name)).then_some(counts))
}

async fn publish(storage: &Storage, aside: &Location, folder: &Location, counts: &Counts) -> Result<(), DataError> {
    let file = aside.join(COUNTS_FILE);
    let json = serde_json::to_vec(counts).map_err(|error| DataError::unwritable(&file, error))?;
    storage.create(&file, json.into()).await?;
    Ok(storage.rename_folder(aside, folder).await?)
}

/// Reads the footers of staged files.
async fn open(storage: &Storage, folder: &Location, counts: Counts, needs: &Needs) -> Result<Dataset, DataError> {
    let files: Vec<DataFile> = stream::iter(counts.files)
        .map(|staged| open_file(storage, folder.join(&staged.name), staged, needs))
        .buffered(limits::FILES_AT_ONCE)
        .try_collect()
        .await?;
    let schema = match files.first() {
        Some(file) => arrow_schema(&file.metadata)
            .map_err(|error| DataError::Corrupt { file: file.entry.location.clone(), source: error.into() })?,
        None => Arc::new(Schema::empty()),
    };
    Ok(Dataset { schema, files, rejected: counts.rejected })
}

async fn open_file(
    storage: &Storage,
    location: Location,
    staged: StagedFile,
    needs: &Needs,
) -> Result<DataFile, DataError> {
    let entry = storage.head(&location).await?;
    let entry = entry.ok_or_else(|| DataError::Changed { file: location, change: "it is gone".to_owned() })?;
    let file = SnapshotFile::new(storage, entry)?;
    let metadata = footer(&file).await?;
    let schema = arrow_schema(&metadata).map_err(|error| file.parquet_error(error))?;
    Ok(DataFile {
        entry: file.entry().clone(),
        row_groups: row_groups(&metadata, &schema, &needs.columns),
        partition: staged.partition,
        metadata,
    })
}

async fn write(
    storage: &Storage,
    plan: &PipelinePlan,
    engine: &Engine,
    table: &str,
    needs: &Needs,
    aside: &Location,
) -> Result<Counts, DataError> {
    let columns = needs.read_columns().into_iter().map(|name| Expr::Column(Column::from_name(name)));
    let query = engine.table(table).await?.select(columns).map_err(|error| DataError::query(table, error))?;
    let query = OrderedQuery::plan(engine, table, query.into_unoptimized_plan(), plan.run.memory_bytes).await?;
    let target = Target {
        storage: storage.clone(),
        table: table.into(),
        folder: aside.clone(),
        columns: needs.columns.len(),
        row_group_bytes: max_row_group_bytes(plan),
        side_by_side: side_by_side(engine, plan.run.memory_bytes),
        rejects: Rejects::new(needs),
    };
    match &needs.hash {
        Some(partition) => target.write_by_hash(&query, needs, &partition.columns, partition.count).await,
        None => target.write_in_order(&query).await,
    }
}

/// As many streams as cores, but no more than may hold a row group of the sources each, as it
/// lies in its file, in an eighth of the memory: decoding and encoding it take several times
/// its size.
fn side_by_side(engine: &Engine, memory_bytes: u64) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let fitting = memory_bytes / 8 / engine.largest_row_group_bytes().max(1);
    usize::try_from(fitting).unwrap_or(cores).clamp(1, cores)
}

/// Where rows go.
#[derive(Clone)]
struct Target {
    storage: Storage,
    table: Arc<str>,
    folder: Location,
    /// The first so many columns are written, the others only read.
    columns: usize,
    /// Decoded bytes of a row group at most.
    row_group_bytes: u64,
    /// Streams that run at once.
    side_by_side: usize,
    rejects: Rejects,
}

impl Target {
    /// One file per stream of the query, side by side.
    async fn write_in_order(self, query: &OrderedQuery) -> Result<Counts, DataError> {
        let streams = query.streams().map_err(|error| DataError::query(&self.table, error))?;
        let mut waiting = streams.into_iter().enumerate();
        let mut working = JoinSet::new();
        let mut files = BTreeMap::new();
        let mut rejects = self.rejects.clone();
        loop {
            while working.len() < self.side_by_side
                && let Some((place, rows)) = waiting.next()
            {
                let target = self.clone();
                working.spawn(async move { Ok::<_, DataError>((place, target.write_stream(place, rows).await?)) });
            }
            let Some(done) = working.join_next().await else { break };
            let done = done.map_err(|error| {
                DataError::query(&self.table, datafusion::error::DataFusionError::ExecutionJoin(Box::new(error)))
            })?;
            let (place, (file, rejected)) = done?;
            files.insert(place, file);
            rejects.add(&rejected);
        }
        Ok(Counts { files: files.into_values().collect(), rejected: rejects.by_reason() })
    }

    async fn write_stream(
        mut self,
        place: usize,
        mut rows: SendableRecordBatchStream,
    ) -> Result<(StagedFile, Rejects), DataError> {
        let mut file = self.create(place, &rows.schema(), None, UPLOAD_BYTES.end)?;
        while let Some(batch) = rows.next().await {
            let batch = batch.map_err(|error| DataError::query(&self.table, error))?;
            let batch = self.rejects.apply(&batch).map_err(|error| DataError::query(&self.table, error.into()))?;
            file.write(&batch).await?;
            if file.open_bytes >= self.row_group_bytes {
                file.flush().await?;
            }
        }
        Ok((file.finish().await?, self.rejects))
    }

    /// One file per partition. The rows are read in several passes where there are more
    /// partitions than files that may be open.
    async fn write_by_hash(
        mut self,
        query: &OrderedQuery,
        needs: &Needs,
        columns: &[String],
        count: u32,
    ) -> Result<Counts, DataError> {
        let read = needs.read_columns();
        let keys: Vec<usize> = columns.iter().filter_map(|key| read.iter().position(|name| name == key)).collect();
        let mut files = Vec::new();
        let mut rejected = None;
        for first in (0..count).step_by(limits::OPEN_PARTITIONS as usize) {
            let dealt = first..count.min(first + limits::OPEN_PARTITIONS);
            let mut deal = Deal::new(&self, &query.schema(), dealt)?;
            let mut rejects = self.rejects.clone();
            let mut rows = query.stream();
            while let Some(batch) = rows.next().await {
                let failed = |error| DataError::query(&self.table, error);
                let batch = batch.map_err(failed)?;
                let batch = rejects.apply(&batch).map_err(|error| failed(error.into()))?;
                let keys: Vec<ArrayRef> = keys.iter().map(|&key| batch.column(key).clone()).collect();
                let partitions = partitions(&keys, count).map_err(failed)?;
                deal.add(batch, &partitions).await?;
            }
            files.extend(deal.finish().await?);
            rejected = Some(rejects);
        }
        if let Some(rejected) = rejected {
            self.rejects = rejected;
        }
        Ok(Counts { files, rejected: self.rejects.by_reason() })
    }

    fn create(
        &self,
        place: usize,
        rows: &Schema,
        partition: Option<PartitionId>,
        upload_bytes: u64,
    ) -> Result<PartFile, DataError> {
        let name = format!("part-{place:05}.parquet");
        let location = self.folder.join(&name);
        let (store, path) = self.storage.open(&location)?;
        let fields: Vec<_> = rows.fields().iter().take(self.columns).cloned().collect();
        let schema = Arc::new(Schema::new(fields));
        let upload = BufWriter::with_capacity(store, path, upload_bytes as usize).with_max_concurrency(UPLOADS);
        let writer = AsyncArrowWriter::try_new(upload, schema.clone(), Some(properties(&schema)))
            .map_err(|error| DataError::unwritable(&location, error))?;
        let staged = StagedFile { name, rows: 0, partition };
        Ok(PartFile { location, writer, columns: (0..self.columns).collect(), open_bytes: 0, staged })
    }
}

fn properties(schema: &Schema) -> WriterProperties {
    let level = ZstdLevel::try_new(1).unwrap_or_default();
    let builder = WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_offset_index_disabled(true)
        .set_max_row_group_row_count(Some(limits::ROW_GROUP_ROWS));
    // Floats hardly repeat: a dictionary of them costs time and is given up anyway.
    schema
        .fields()
        .iter()
        .filter(|field| field.data_type().is_floating())
        .fold(builder, |builder, field| {
            builder.set_column_dictionary_enabled(ColumnPath::new(vec![field.name().clone()]), false)
        })
        .build()
}

/// A file being written.
struct PartFile {
    location: Location,
    writer: AsyncArrowWriter<BufWriter>,
    columns: Vec<usize>,
    /// Decoded bytes of the open row group.
    open_bytes: u64,
    staged: StagedFile,
}

impl PartFile {
    async fn write(&mut self, batch: &RecordBatch) -> Result<(), DataError> {
        let batch = batch.project(&self.columns).map_err(|error| DataError::unwritable(&self.location, error))?;
        let flushed = self.writer.flushed_row_groups().len();
        self.writer.write(&batch).await.map_err(|error| DataError::unwritable(&self.location, error))?;
        self.staged.rows += batch.num_rows() as u64;
        if self.writer.flushed_row_groups().len() > flushed {
            self.open_bytes = 0;
        } else {
            self.open_bytes += decoded_bytes(&batch);
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), DataError> {
        self.open_bytes = 0;
        self.writer.flush().await.map_err(|error| DataError::unwritable(&self.location, error))
    }

    async fn finish(self) -> Result<StagedFile, DataError> {
        self.writer.close().await.map_err(|error| DataError::unwritable(&self.location, error))?;
        Ok(self.staged)
    }
}

fn decoded_bytes(batch: &RecordBatch) -> u64 {
    let bytes = |column: &ArrayRef| column.to_data().get_slice_memory_size().unwrap_or(column.get_array_memory_size());
    batch.columns().iter().map(|column| bytes(column) as u64).sum()
}

/// Rows on their way to the files of some partitions.
struct Deal {
    first: u32,
    files: Vec<PartFile>,
    /// Rows read but not yet written, and for each partition which of them are its own.
    batches: Vec<RecordBatch>,
    rows: Vec<Vec<(usize, usize)>>,
    waiting_bytes: u64,
    max_bytes: u64,
}

impl Deal {
    fn new(target: &Target, schema: &Schema, partitions: Range<u32>) -> Result<Self, DataError> {
        let upload_bytes = (target.row_group_bytes / u64::from(partitions.end - partitions.start))
            .clamp(UPLOAD_BYTES.start, UPLOAD_BYTES.end);
        let file =
            |partition: u32| target.create(partition as usize, schema, Some(PartitionId(partition)), upload_bytes);
        Ok(Self {
            first: partitions.start,
            rows: vec![Vec::new(); partitions.len()],
            files: partitions.map(file).collect::<Result<_, _>>()?,
            batches: Vec::new(),
            waiting_bytes: 0,
            max_bytes: target.row_group_bytes,
        })
    }

    async fn add(&mut self, batch: RecordBatch, partitions: &[u32]) -> Result<(), DataError> {
        let place = self.batches.len();
        for (row, partition) in partitions.iter().enumerate() {
            let slot = partition.checked_sub(self.first).and_then(|slot| self.rows.get_mut(slot as usize));
            if let Some(rows) = slot {
                rows.push((place, row));
            }
        }
        self.waiting_bytes += decoded_bytes(&batch);
        self.batches.push(batch);
        if self.waiting_bytes >= self.max_bytes { self.write_waiting().await } else { Ok(()) }
    }

    /// Each partition's waiting rows become a row group of its file.
    async fn write_waiting(&mut self) -> Result<(), DataError> {
        let batches: Vec<&RecordBatch> = self.batches.iter().collect();
        for (file, rows) in self.files.iter_mut().zip(&mut self.rows) {
            if rows.is_empty() {
                continue;
            }
            let batch = interleave_record_batch(&batches, rows)
                .map_err(|error| DataError::unwritable(&file.location, error))?;
            rows.clear();
            file.write(&batch).await?;
            file.flush().await?;
        }
        self.batches.clear();
        self.waiting_bytes = 0;
        Ok(())
    }

    async fn finish(mut self) -> Result<Vec<StagedFile>, DataError> {
        self.write_waiting().await?;
        let mut staged = Vec::with_capacity(self.files.len());
        for file in self.files {
            staged.push(file.finish().await?);
        }
        Ok(staged)
    }
}

/// Leaves out rows that miss a value, counted by the first column that misses one.
#[derive(Clone)]
struct Rejects {
    /// Place, name and count of each column that must have a value.
    columns: Vec<(usize, String, u64)>,
}

impl Rejects {
    fn new(needs: &Needs) -> Self {
        let read = needs.read_columns();
        let place = |name: &String| read.iter().position(|column| column == name);
        let columns = needs.reject_missing.iter().filter_map(|name| Some((place(name)?, name.clone(), 0)));
        Self { columns: columns.collect() }
    }

    fn apply(&mut self, batch: &RecordBatch) -> Result<RecordBatch, arrow::error::ArrowError> {
        if self.columns.is_empty() {
            return Ok(batch.clone());
        }
        let mut rejected = vec![false; batch.num_rows()];
        for (place, _, count) in &mut self.columns {
            let missing = missing(batch.column(*place));
            *count +=
                missing.iter().zip(&rejected).filter(|(missing, rejected)| **missing && !**rejected).count() as u64;
            rejected.iter_mut().zip(missing).for_each(|(rejected, missing)| *rejected |= missing);
        }
        filter_record_batch(batch, &rejected.into_iter().map(|rejected| Some(!rejected)).collect::<BooleanArray>())
    }

    fn add(&mut self, other: &Self) {
        self.columns.iter_mut().zip(&other.columns).for_each(|((_, _, count), (_, _, more))| *count += more);
    }

    fn by_reason(&self) -> BTreeMap<String, u64> {
        let counted = self.columns.iter().filter(|(_, _, count)| *count > 0);
        counted.map(|(_, name, count)| (format!("missing value in column {name}"), *count)).collect()
    }
}

/// For each value whether it is NULL or NaN, or a list that holds one.
fn missing(column: &dyn Array) -> Vec<bool> {
    let mut missing = match column.data_type() {
        DataType::Float16 => column.as_primitive::<Float16Type>().values().iter().map(|v| v.is_nan()).collect(),
        DataType::Float32 => column.as_primitive::<Float32Type>().values().iter().map(|v| v.is_nan()).collect(),
        DataType::Float64 => column.as_primitive::<Float64Type>().values().iter().map(|v| v.is_nan()).collect(),
        DataType::List(_) => any_in(column.as_list::<i32>().value_offsets(), column.as_list::<i32>().values()),
        DataType::LargeList(_) => any_in(column.as_list::<i64>().value_offsets(), column.as_list::<i64>().values()),
        DataType::FixedSizeList(_, width) => {
            let items = self::missing(column.as_fixed_size_list().values());
            let width = usize::try_from(*width).unwrap_or(0);
            (0..column.len()).map(|row| items[row * width..(row + 1) * width].contains(&true)).collect()
        }
        _ => vec![false; column.len()],
    };
    if let Some(nulls) = column.logical_nulls() {
        missing.iter_mut().zip(nulls.iter()).for_each(|(missing, valid)| *missing |= !valid);
    }
    missing
}

fn any_in<O: arrow::array::OffsetSizeTrait>(offsets: &[O], items: &dyn Array) -> Vec<bool> {
    let items = missing(items);
    offsets.windows(2).map(|ends| items[ends[0].as_usize()..ends[1].as_usize()].contains(&true)).collect()
}
