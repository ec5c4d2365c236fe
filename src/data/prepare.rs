//! A table as a `Dataset`: Parquet files whose row groups are known. A Parquet source is used
//! where it lies; anything else is written once, aside, in a reproducible order.

use std::{collections::BTreeMap, sync::Arc};

use arrow::datatypes::{DataType, Schema, SchemaRef};
use futures::{StreamExt, TryStreamExt, stream};
use parquet::file::{metadata::ParquetMetaData, statistics::Statistics};

use serde::{Deserialize, Serialize};

use super::{
    DataError,
    file::SnapshotFile,
    parquet::{arrow_schema, footer, row_groups},
    scan::{Engine, closest},
    source::Content,
    stage::stage,
};
use crate::{
    ids::PartitionId,
    limits,
    pipeline::{Faults, PartitionPlan, PipelinePlan},
    storage::{FileEntry, Location, Storage},
};

/// The part of a run's memory that one decoded row group may take: a few ranks each hold some.
const ROW_GROUP_SHARE: u64 = 16;

/// Rows in a fixed order, as Parquet files of one schema.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// The columns asked for (`Needs::columns`), by their types in the files.
    pub schema: SchemaRef,
    /// The files, in order.
    pub files: Vec<DataFile>,
    /// Rows left out on the way here, by reason (`missing value in column x`).
    pub rejected: BTreeMap<String, u64>,
}

/// One Parquet file of a data set.
#[derive(Clone, Debug)]
pub struct DataFile {
    /// Where it is, and as what it was snapshotted.
    pub entry: FileEntry,
    /// Its row groups, in order.
    pub row_groups: Vec<RowGroup>,
    /// The partition whose rows it holds, where the rows were dealt by hash.
    pub partition: Option<PartitionId>,
    /// The footer, read once.
    pub metadata: Arc<parquet::file::metadata::ParquetMetaData>,
}

/// One row group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowGroup {
    /// Its rows.
    pub rows: u64,
    /// Bytes of the needed columns, decoded.
    pub size_bytes: u64,
}

impl Dataset {
    /// Rows of all files.
    pub fn rows(&self) -> u64 {
        self.files.iter().flat_map(|file| &file.row_groups).map(|group| group.rows).sum()
    }

    /// Decoded bytes of the largest row group: what a reader may hold.
    pub fn largest_row_group(&self) -> u64 {
        self.files.iter().flat_map(|file| &file.row_groups).map(|group| group.size_bytes).max().unwrap_or(0)
    }
}

/// What another process needs to open a data set that is prepared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DatasetFiles {
    columns: Vec<String>,
    files: Vec<(FileEntry, Option<PartitionId>)>,
}

impl Dataset {
    /// The files, for another process.
    pub fn to_files(&self) -> DatasetFiles {
        let columns = self.schema.fields().iter().map(|field| field.name().clone()).collect();
        let files = self.files.iter().map(|file| (file.entry.clone(), file.partition)).collect();
        DatasetFiles { columns, files }
    }

    /// The data set again, but for the count of rejected rows; reads all footers.
    pub async fn open(storage: &Storage, files: &DatasetFiles) -> Result<Self, DataError> {
        let open = |(entry, partition): &(FileEntry, Option<PartitionId>)| {
            let (entry, partition, columns) = (entry.clone(), *partition, files.columns.clone());
            async move {
                let file = SnapshotFile::new(storage, entry.clone())?;
                file.check().await?;
                let metadata = footer(&file).await?;
                let schema = arrow_schema(&metadata).map_err(|error| file.parquet_error(error))?;
                let row_groups = row_groups(&metadata, &schema, &columns);
                let fields = columns.iter().map(|name| schema.field_with_name(name).cloned());
                let fields = fields.collect::<Result<Vec<_>, _>>().map_err(|error| file.corrupt(error))?;
                Ok::<_, DataError>((DataFile { entry, row_groups, partition, metadata }, fields))
            }
        };
        let opened: Vec<_> =
            stream::iter(files.files.iter().map(open)).buffered(limits::FILES_AT_ONCE).try_collect().await?;
        let schema = opened.first().map_or_else(Schema::empty, |(_, fields)| Schema::new(fields.clone()));
        let files = opened.into_iter().map(|(file, _)| file).collect();
        Ok(Self { schema: Arc::new(schema), files, rejected: BTreeMap::new() })
    }
}

/// What is needed of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Needs {
    /// The columns, each once.
    pub columns: Vec<String>,
    /// Columns in which NULL or NaN rejects the row (counted by reason).
    pub reject_missing: Vec<String>,
    /// Deal rows by hash, one or more files per partition.
    pub hash: Option<PartitionPlan>,
}

impl Needs {
    /// All columns that have to be read, each once: those asked for first.
    pub(super) fn read_columns(&self) -> Vec<String> {
        let mut columns = self.columns.clone();
        for column in self.reject_missing.iter().chain(self.hash.iter().flat_map(|plan| &plan.columns)) {
            if !columns.contains(column) {
                columns.push(column.clone());
            }
        }
        columns
    }
}

/// The data set where it lies, footers read and nothing else; `None` where `prepare` would have
/// to write it first: where the table is no Parquet source, its files differ in the types of
/// the columns needed, one of them comes from folder names, rows have to be rejected or dealt by
/// hash, or a row group is too large for the run's memory.
pub async fn in_place(
    storage: &Storage,
    plan: &PipelinePlan,
    engine: &Engine,
    table: &str,
    needs: &Needs,
) -> Result<Option<Dataset>, DataError> {
    let _ = storage;
    let schema = engine.schema(table).await?;
    check_columns(plan, table, &schema, needs)?;
    let Some(source) = engine.source(table) else { return Ok(None) };
    if needs.hash.is_some() || needs.columns.iter().any(|column| source.is_folder_column(column)) {
        return Ok(None);
    }
    let fields = needs.columns.iter().map(|name| schema.field_with_name(name).cloned()).collect::<Result<Vec<_>, _>>();
    // `check_columns` has found them all.
    let Ok(fields) = fields else { return Ok(None) };
    let mut files = Vec::with_capacity(source.files().len());
    for file in source.files() {
        let Content::Parquet(metadata, own) = &file.content else { return Ok(None) };
        let same_type = |field: &arrow::datatypes::Field| {
            own.field_with_name(field.name()).is_ok_and(|own| own.data_type() == field.data_type())
        };
        let row_groups = row_groups(metadata, own, &needs.columns);
        let too_large = |group: &RowGroup| group.size_bytes > max_row_group_bytes(plan);
        if !fields.iter().all(same_type)
            || row_groups.iter().any(too_large)
            || needs.reject_missing.iter().any(|column| may_miss(metadata, own, column))
        {
            return Ok(None);
        }
        let entry = file.file.entry().clone();
        files.push(DataFile { entry, row_groups, partition: None, metadata: metadata.clone() });
    }
    Ok(Some(Dataset { schema: Arc::new(Schema::new(fields)), files, rejected: BTreeMap::new() }))
}

/// Gives the data set of a source or transform; what must be written goes to `staging` (a
/// folder of the run) and is found there again by a later attempt, whole or not at all.
pub async fn prepare(
    storage: &Storage,
    plan: &PipelinePlan,
    engine: &Engine,
    table: &str,
    needs: &Needs,
    staging: &Location,
) -> Result<Dataset, DataError> {
    match in_place(storage, plan, engine, table, needs).await? {
        Some(dataset) => Ok(dataset),
        None => stage(storage, plan, engine, table, needs, staging).await,
    }
}

/// Bytes of a decoded row group at most.
pub(super) fn max_row_group_bytes(plan: &PipelinePlan) -> u64 {
    plan.run.memory_bytes / ROW_GROUP_SHARE
}

/// Whether a column may hold NULL or NaN, as far as the footer tells; it does not tell of NaN.
fn may_miss(metadata: &ParquetMetaData, schema: &Schema, column: &str) -> bool {
    let Ok(root) = schema.index_of(column) else { return true };
    let descriptor = metadata.file_metadata().schema_descr();
    let leaves = (0..descriptor.num_columns()).filter(|&leaf| descriptor.get_column_root_idx(leaf) == root);
    let no_nulls = |leaf: usize| {
        let statistics = metadata.row_groups().iter().map(|group| group.column(leaf).statistics());
        statistics.into_iter().all(|statistics| statistics.and_then(Statistics::null_count_opt) == Some(0))
    };
    has_floats(schema.field(root).data_type()) || !leaves.into_iter().all(no_nulls)
}

fn has_floats(data_type: &DataType) -> bool {
    match data_type {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            has_floats(item.data_type())
        }
        DataType::Dictionary(_, values) => has_floats(values),
        DataType::Struct(fields) => fields.iter().any(|field| has_floats(field.data_type())),
        other => other.is_floating(),
    }
}

/// All columns that the table has not, as faults of the file that asks for them.
fn check_columns(plan: &PipelinePlan, table: &str, schema: &Schema, needs: &Needs) -> Result<(), DataError> {
    let mut faults: Option<Faults> = None;
    for column in needs.read_columns() {
        if schema.column_with_name(&column).is_some() {
            continue;
        }
        let names = schema.fields().iter().map(|field| field.name().as_str());
        let help = closest(&column, names).map(|name| format!("did you mean `{name}`?"));
        let path = place_of(plan, table, &column);
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        let found = plan.origin.fault(&path, format!("table `{table}` has no column `{column}`"), help);
        match &mut faults {
            Some(faults) => faults.faults.extend(found.faults),
            None => faults = Some(found),
        }
    }
    faults.map_or(Ok(()), |faults| Err(faults.into()))
}

/// Where the file asks for a column of a table.
fn place_of(plan: &PipelinePlan, table: &str, column: &str) -> Vec<String> {
    let owned = |path: &[&str]| path.iter().map(|&part| part.to_owned()).collect::<Vec<_>>();
    for model in plan.models.iter().filter(|model| model.from == table) {
        if let Some(place) = model.features.iter().position(|entry| entry.columns.iter().any(|name| name == column)) {
            return owned(&["models", &model.name, "features", &place.to_string()]);
        }
        if let Some(place) = model.partition.columns.iter().position(|name| name == column) {
            return owned(&["models", &model.name, "partition", "columns", &place.to_string()]);
        }
    }
    for embedding in plan.embeddings.iter().filter(|embedding| embedding.from == table) {
        for (list, names) in [("key", &embedding.key), ("columns", &embedding.columns)] {
            if let Some(place) = names.iter().position(|name| name == column) {
                return owned(&["embeddings", &embedding.name, list, &place.to_string()]);
            }
        }
    }
    // A model's features are asked of its embedding's table, too.
    let embedding = plan.embeddings.iter().find(|embedding| embedding.from == table);
    embedding.map_or_else(|| owned(&["sources", table]), |embedding| owned(&["embeddings", &embedding.name, "from"]))
}
