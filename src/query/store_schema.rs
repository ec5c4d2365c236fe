//! The tables of a store, opened as queries name them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use async_trait::async_trait;
use datafusion::{
    catalog::{MemorySchemaProvider, SchemaProvider, TableProvider},
    common::DataFusionError,
    datasource::TableType,
    error::Result as QueryResult,
};

use super::{QueryError, run_tables, version_table::VersionTable};
use crate::{
    data,
    embed::{self, Manifest},
    ids::Version,
    pipeline::{SourcePlan, spec::FileFormat},
    runs::{RunRecord, RunStatus},
    storage::{Location, Storage},
};

/// How far a name may be from another one to be taken for a slip of it.
const SIMILAR: f64 = 0.8;

/// The tables of a store.
#[derive(Debug)]
pub(super) struct StoreSchema {
    storage: Storage,
    store: Location,
    /// Names of the embedding tables when the session was opened.
    embeddings: BTreeSet<String>,
    /// Sources of the latest runs, with their pipelines.
    sources: BTreeMap<String, (SourcePlan, String)>,
    /// Tables about runs, and what queries create.
    memory: MemorySchemaProvider,
}

impl StoreSchema {
    /// `runs` are those of the store, the latest first.
    pub(super) async fn open(storage: &Storage, store: &Location, runs: &[RunRecord]) -> Result<Self, QueryError> {
        let memory = MemorySchemaProvider::new();
        for (name, table) in run_tables::all(runs)? {
            memory.register_table(name.to_owned(), table)?;
        }
        let embeddings = embed::list_tables(storage, store).await?.into_iter().collect();
        Ok(Self { storage: storage.clone(), store: store.clone(), embeddings, sources: latest_sources(runs), memory })
    }

    /// Where the sources are.
    pub(super) fn sources(&self) -> impl Iterator<Item = &Location> {
        self.sources.values().map(|(source, _)| &source.location)
    }

    async fn find(&self, name: &str) -> Result<Option<Arc<dyn TableProvider>>, QueryError> {
        if let Some(manifest) = self.manifest(name).await? {
            return Ok(Some(Arc::new(VersionTable::open(&self.storage, &self.store, &manifest).await?)));
        }
        let Some((source, pipeline)) = self.sources.get(name) else { return Ok(None) };
        data::open_source(&self.storage, source).await.map(Some).map_err(|error| QueryError::Source {
            table: name.to_owned(),
            pipeline: pipeline.clone(),
            source: Box::new(error),
        })
    }

    /// The manifest of `table` or `table@version`.
    async fn manifest(&self, name: &str) -> Result<Option<Manifest>, QueryError> {
        let versioned = name.rsplit_once('@').and_then(|(table, version)| Some((table, version.parse().ok()?)));
        let Some((table, version)) = versioned else {
            // Nothing that a path could be made of.
            let plain = !name.is_empty() && !name.contains('/') && !name.starts_with('.');
            return Ok(if plain { embed::latest_manifest(&self.storage, &self.store, name).await? } else { None });
        };
        if !self.embeddings.contains(table) {
            return Ok(None);
        }
        if let Some(manifest) = embed::read_manifest(&self.storage, &self.store, table, Version(version)).await? {
            return Ok(Some(manifest));
        }
        let there = embed::list_manifests(&self.storage, &self.store, table).await?;
        let there: Vec<_> = there.iter().map(|manifest| manifest.version.to_string()).collect();
        Err(QueryError::NoVersion { table: table.to_owned(), version, there: there.join(", ") })
    }
}

/// The error for a name that none of the tables has, with one that may be meant.
pub(super) fn no_table(name: &str, tables: &[String]) -> QueryError {
    let similarity = |other: &String| strsim::jaro_winkler(&name.to_lowercase(), &other.to_lowercase());
    let nearest = tables.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    let hint = match nearest {
        Some(nearest) if similarity(nearest) >= SIMILAR => format!("did you mean {nearest:?}?"),
        _ => format!("there are {}", tables.join(", ")),
    };
    QueryError::NoTable { name: name.to_owned(), hint }
}

/// The sources of each pipeline's latest successful run; of two pipelines with a source of one
/// name, the one that ran last has it.
fn latest_sources(runs: &[RunRecord]) -> BTreeMap<String, (SourcePlan, String)> {
    let mut pipelines = BTreeSet::new();
    let mut sources = BTreeMap::new();
    for run in runs.iter().filter(|run| run.status == RunStatus::Succeeded) {
        if !pipelines.insert(&run.pipeline) {
            continue;
        }
        for (name, source) in &run.sources {
            let format = serde_json::from_value::<FileFormat>(source.format.as_str().into()).ok();
            let plan = SourcePlan {
                name: name.clone(),
                location: source.location.clone(),
                format,
                columns: source.columns.clone(),
                csv: source.csv.clone(),
            };
            sources.entry(name.clone()).or_insert_with(|| (plan, run.pipeline.clone()));
        }
    }
    sources
}

#[async_trait]
impl SchemaProvider for StoreSchema {
    fn table_names(&self) -> Vec<String> {
        let mut names = self.memory.table_names();
        names.extend(self.embeddings.iter().cloned());
        names.extend(self.sources.keys().cloned());
        names.sort();
        names.dedup();
        names
    }

    async fn table(&self, name: &str) -> QueryResult<Option<Arc<dyn TableProvider>>, DataFusionError> {
        if let Some(table) = self.memory.table(name).await? {
            return Ok(Some(table));
        }
        Ok(self.find(name).await?)
    }

    /// Without opening the table.
    async fn table_type(&self, name: &str) -> QueryResult<Option<TableType>> {
        if let Some(table_type) = self.memory.table_type(name).await? {
            return Ok(Some(table_type));
        }
        Ok(self.table_exist(name).then_some(TableType::Base))
    }

    fn register_table(
        &self,
        name: String,
        table: Arc<dyn TableProvider>,
    ) -> QueryResult<Option<Arc<dyn TableProvider>>> {
        self.memory.register_table(name, table)
    }

    fn deregister_table(&self, name: &str) -> QueryResult<Option<Arc<dyn TableProvider>>> {
        if !self.memory.table_exist(name) && self.table_exist(name) {
            return Err(QueryError::Stored { table: name.to_owned() }.into());
        }
        self.memory.deregister_table(name)
    }

    fn table_exist(&self, name: &str) -> bool {
        self.memory.table_exist(name) || self.embeddings.contains(name) || self.sources.contains_key(name)
    }
}
