//! Sources as DataFusion tables, over a snapshot of their files taken once.
//!
//! Names are taken as they are written: `SELECT Amount` finds the column `Amount`, and a
//! column `amount` only if it is written so. (DataFusion by itself would turn unquoted names to
//! lower case, and mixed-case columns, which real tables have, could be reached by quotes only.)

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use arrow::datatypes::{DataType, SchemaRef};
use datafusion::{
    catalog::TableProvider,
    common::{
        Column, SchemaError, TableReference,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    error::DataFusionError,
    execution::{
        context::SQLOptions,
        memory_pool::FairSpillPool,
        runtime_env::{RuntimeEnv, RuntimeEnvBuilder},
    },
    logical_expr::{Expr, LogicalPlan, Volatility},
    prelude::{DataFrame, SessionConfig, SessionContext},
};
use futures::{StreamExt, TryStreamExt, stream};

use super::{
    DataError,
    file::SnapshotFile,
    parquet,
    source::{Content, SourceTable, source_format},
    spark_hash,
};
use crate::{
    limits,
    pipeline::{PipelinePlan, SourcePlan, TransformPlan, spec::FileFormat},
    storage::{FileEntry, Storage, StorageError},
};

/// The files of every source, as they were when the run first looked.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Snapshot {
    /// Files by source name, sorted by location.
    pub sources: BTreeMap<String, Vec<FileEntry>>,
}

impl Snapshot {
    /// Lists every source that a transform, model or embedding reads.
    pub async fn take(storage: &Storage, plan: &PipelinePlan) -> Result<Self, DataError> {
        let used = used_tables(plan);
        let sources = plan.sources.iter().filter(|source| used.contains(source.name.as_str()));
        let listed = stream::iter(sources.cloned())
            .map(|source| list(storage, source))
            .buffered(limits::FILES_AT_ONCE)
            .try_collect()
            .await?;
        Ok(Self { sources: listed })
    }

    /// Fails with the name of the first file that changed, vanished or grew since.
    pub async fn verify(&self, storage: &Storage) -> Result<(), DataError> {
        let files: Vec<FileEntry> = self.sources.values().flatten().cloned().collect();
        stream::iter(files)
            .map(|entry| async move { SnapshotFile::new(storage, entry)?.check().await })
            .buffered(limits::FILES_AT_ONCE)
            .try_collect()
            .await
    }
}

/// The tables that anything reads.
fn used_tables(plan: &PipelinePlan) -> BTreeSet<&str> {
    let by_transforms = plan.transforms.iter().flat_map(|transform| &transform.inputs);
    let by_models = plan.models.iter().map(|model| &model.from);
    let by_embeddings = plan.embeddings.iter().map(|embedding| &embedding.from);
    by_transforms.chain(by_models).chain(by_embeddings).map(String::as_str).collect()
}

async fn list(storage: &Storage, source: SourcePlan) -> Result<(String, Vec<FileEntry>), DataError> {
    let files = match storage.list(&source.location).await {
        Ok(files) => files,
        Err(StorageError::NotFound(location)) => return Err(DataError::MissingPath { table: source.name, location }),
        Err(error) => return Err(error.into()),
    };
    let format = match source_format(&source, &files)? {
        Some(FileFormat::Parquet) => Some("Parquet"),
        Some(FileFormat::Arrow) => Some("Arrow IPC"),
        Some(FileFormat::Csv) | None => None,
    };
    match (format, files.iter().find(|file| file.size_bytes == 0)) {
        (Some(format), Some(empty)) => Err(DataError::EmptyFile { file: empty.location.clone(), format }),
        _ => Ok((source.name, files)),
    }
}

/// The DataFusion session of a run: every source as a table, every transform as a view.
#[derive(Clone)]
pub struct Engine {
    session: SessionContext,
    sources: Arc<BTreeMap<String, Arc<SourceTable>>>,
}

impl Engine {
    /// Opens the snapshot's files (their footers only; of CSV the first lines). A source
    /// without files is an error: the caller looks for it in the snapshot before.
    pub async fn open(storage: &Storage, plan: &PipelinePlan, snapshot: &Snapshot) -> Result<Self, DataError> {
        let session = SessionContext::new_with_config_rt(session_config(), runtime(plan.run.memory_bytes, None)?);
        for function in [spark_hash::spark_hash_udf(), spark_hash::pmod_udf()] {
            session.register_udf(function);
        }
        let mut sources = BTreeMap::new();
        for (name, entries) in &snapshot.sources {
            let Some(source) = plan.source(name) else { continue };
            storage.register(&session, std::slice::from_ref(&source.location))?;
            let declared = declared_types(&session, source).await?;
            let table = Arc::new(SourceTable::open(storage, source, entries, &declared).await?);
            session
                .register_table(TableReference::bare(name.as_str()), table.clone())
                .map_err(|error| DataError::query(name, error))?;
            sources.insert(name.clone(), table);
        }
        for transform in &plan.transforms {
            register_transform(&session, plan, transform).await?;
        }
        Ok(Self { session, sources: Arc::new(sources) })
    }

    /// The session.
    pub fn session(&self) -> &SessionContext {
        &self.session
    }

    /// The columns of a source or transform.
    pub async fn schema(&self, table: &str) -> Result<SchemaRef, DataError> {
        Ok(Arc::new(self.table(table).await?.schema().as_arrow().clone()))
    }

    /// A source or transform.
    pub(super) async fn table(&self, table: &str) -> Result<DataFrame, DataError> {
        self.session.table(TableReference::bare(table)).await.map_err(|error| DataError::query(table, error))
    }

    /// Bytes, as they lie in the file, of the largest row group of the Parquet sources.
    pub(super) fn largest_row_group_bytes(&self) -> u64 {
        let footers = self.sources.values().flat_map(|source| source.files()).filter_map(|file| match &file.content {
            Content::Parquet(metadata, _) => Some(metadata),
            _ => None,
        });
        footers
            .flat_map(|footer| footer.row_groups())
            .map(|group| group.compressed_size().max(0) as u64)
            .max()
            .unwrap_or(0)
    }

    /// Reads all Parquet files until one cannot be decoded.
    pub(super) async fn find_damaged(&self) -> Option<DataError> {
        for file in self.sources.values().flat_map(|source| source.files()) {
            if let Content::Parquet(metadata, _) = &file.content
                && let Err(error) = parquet::decode_all(&file.file, metadata).await
            {
                return Some(error);
            }
        }
        None
    }

    /// The files of a source; `None` for a transform.
    pub(super) fn source(&self, table: &str) -> Option<&SourceTable> {
        self.sources.get(table).map(Arc::as_ref)
    }
}

/// A source as a table by itself, over its files as they are now.
pub async fn open_source(storage: &Storage, source: &SourcePlan) -> Result<Arc<dyn TableProvider>, DataError> {
    let (_, entries) = list(storage, source.clone()).await?;
    let declared = declared_types(&SessionContext::new_with_config(session_config()), source).await?;
    Ok(Arc::new(SourceTable::open(storage, source, &entries, &declared).await?))
}

fn session_config() -> SessionConfig {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut config = SessionConfig::new().with_target_partitions(cores).with_batch_size(limits::BATCH_ROWS);
    let options = config.options_mut();
    options.sql_parser.enable_ident_normalization = false;
    options.sql_parser.map_string_types_to_utf8view = false;
    options.execution.parquet.schema_force_view_types = false;
    options.execution.parquet.coerce_int96 = Some("us".to_owned());
    config
}

/// Two fifths of the run's memory for queries; the rest is for what they are written through
/// and fed into. What does not fit spills to the system's temporary folder. `stores` are those
/// of another runtime.
pub(super) fn runtime(memory_bytes: u64, stores: Option<&RuntimeEnv>) -> Result<Arc<RuntimeEnv>, DataError> {
    let pool = FairSpillPool::new(usize::try_from(memory_bytes / 5 * 2).unwrap_or(usize::MAX));
    let mut builder = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(pool));
    if let Some(stores) = stores {
        builder = builder.with_object_store_registry(stores.object_store_registry.clone());
    }
    builder.build_arc().map_err(|error| DataError::query("session", error))
}

/// The Arrow types of the columns that the file declares in SQL's words.
async fn declared_types(
    session: &SessionContext,
    source: &SourcePlan,
) -> Result<BTreeMap<String, DataType>, DataError> {
    let mut types = BTreeMap::new();
    for (column, sql_type) in &source.columns {
        let plan = session.state().create_logical_plan(&format!("SELECT CAST(NULL AS {sql_type})")).await;
        let plan = plan.map_err(|error| DataError::query(&source.name, error))?;
        types.insert(column.clone(), plan.schema().field(0).data_type().clone());
    }
    Ok(types)
}

async fn register_transform(
    session: &SessionContext,
    plan: &PipelinePlan,
    transform: &TransformPlan,
) -> Result<(), DataError> {
    let only_queries = SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
    let query = session.sql_with_options(&transform.sql, only_queries).await;
    let query = query.map_err(|error| sql_fault(plan, transform, &error))?;
    if let Some(expression) = volatile(query.logical_plan()).map_err(|error| sql_fault(plan, transform, &error))? {
        let message = format!("`{expression}` gives other values each time, so a run could not be repeated");
        let help =
            "derive it from the row, as `spark_hash(column)` does, or give it as a parameter: `'${ds}'`".to_owned();
        return Err(fault(plan, transform, message, Some(help)));
    }
    session
        .register_table(TableReference::bare(transform.name.as_str()), query.into_view())
        .map(|_| ())
        .map_err(|error| DataError::query(&transform.name, error))
}

/// The first expression that is different each time it is asked.
fn volatile(plan: &LogicalPlan) -> Result<Option<String>, DataFusionError> {
    let mut found = None;
    plan.apply_with_subqueries(|node| {
        for expression in node.expressions() {
            if expression.is_volatile() || expression.exists(|part| Ok(is_clock(part)))? {
                found = Some(expression);
                break;
            }
        }
        Ok(if found.is_some() { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found.map(|expression| expression.to_string()))
}

/// Whether it is the time of the query, such as `now()`: the same for all rows, but not for all runs.
fn is_clock(expression: &Expr) -> bool {
    match expression {
        Expr::ScalarFunction(call) => call.args.is_empty() && call.func.signature().volatility == Volatility::Stable,
        _ => false,
    }
}

fn fault(plan: &PipelinePlan, transform: &TransformPlan, message: String, help: Option<String>) -> DataError {
    plan.origin.fault(&["transforms", &transform.name, "sql"], message, help).into()
}

/// A query that cannot be planned, with what was probably meant.
fn sql_fault(plan: &PipelinePlan, transform: &TransformPlan, error: &DataFusionError) -> DataError {
    let (message, help) = match error.find_root() {
        DataFusionError::SchemaError(error, _) => match error.as_ref() {
            SchemaError::FieldNotFound { field, valid_fields } => {
                (format!("there is no column `{}`", field.flat_name()), column_help(field, valid_fields))
            }
            other => (other.to_string(), None),
        },
        DataFusionError::SQL(error, _) => (error.to_string(), None),
        other => {
            let text = other.strip_backtrace();
            let text = text.strip_prefix("Error during planning: ").unwrap_or(&text);
            let (message, help) = text.split_once('\n').unwrap_or((text, ""));
            (message.to_owned(), Some(help.trim().to_owned()).filter(|help| !help.is_empty()))
        }
    };
    fault(plan, transform, message, help)
}

fn column_help(field: &Column, valid: &[Column]) -> Option<String> {
    let names: Vec<&str> = valid.iter().map(Column::name).collect();
    closest(field.name(), names.iter().copied()).map(|name| format!("did you mean `{name}`?")).or_else(|| {
        let all = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>();
        (!all.is_empty() && all.len() <= 20).then(|| format!("the columns are {}", all.join(", ")))
    })
}

/// The name most like `name`, if any is like it.
pub(super) fn closest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_lowercase();
    let likeness = |other: &&str| strsim::jaro_winkler(&lower, &other.to_lowercase());
    names
        .map(|other| (likeness(&other), other))
        .filter(|(likeness, _)| *likeness >= 0.8)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, other)| other)
}
