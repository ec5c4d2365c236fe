//! One version of an embedding table: exactly the files of its manifest.

use std::{collections::HashMap, sync::Arc};

use arrow::datatypes::{Field, FieldRef, Schema, SchemaRef};
use async_trait::async_trait;
use datafusion::{
    catalog::Session,
    common::{Statistics, config::TableParquetOptions, stats::Precision},
    datasource::{
        TableProvider, TableType,
        physical_plan::{FileGroup, FileScanConfigBuilder, ParquetSource},
        source::DataSourceExec,
    },
    error::Result as QueryResult,
    execution::object_store::ObjectStoreUrl,
    logical_expr::Expr,
    physical_plan::ExecutionPlan,
};

use super::{
    QueryError,
    version_file::{Readers, VersionFile},
};
use crate::{
    embed::{EMBEDDING_COLUMN, FINGERPRINT_KEY, Manifest},
    storage::{FileEntry, Location, Storage, StorageError},
};

/// A version, opened.
#[derive(Debug)]
pub(super) struct VersionTable {
    url: ObjectStoreUrl,
    schema: SchemaRef,
    files: Vec<VersionFile>,
    rows: usize,
}

impl VersionTable {
    /// Compares the files with the manifest, by one listing, and reads one footer.
    pub(super) async fn open(storage: &Storage, store: &Location, manifest: &Manifest) -> Result<Self, QueryError> {
        let entries = check_files(storage, store, manifest).await?;
        let url = ObjectStoreUrl::parse(store.root())?;
        let open = |entry| VersionFile::new(storage, manifest, entry);
        let files: Vec<_> = entries.iter().map(open).collect::<Result<_, _>>()?;
        let schema = match files.first() {
            Some(first) => stamped(first.schema().await?.as_ref(), manifest),
            None => Schema::empty(),
        };
        Ok(Self { url, schema: Arc::new(schema), files, rows: manifest.rows as usize })
    }
}

/// The files of the manifest, in order, which must be there as they were published.
async fn check_files(storage: &Storage, store: &Location, manifest: &Manifest) -> Result<Vec<FileEntry>, QueryError> {
    let folder = store.join(&format!("embeddings/{}/{}", manifest.table, manifest.folder));
    let listed = match storage.list(&folder).await {
        Ok(listed) => listed,
        Err(StorageError::NotFound(_)) => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let mut there: HashMap<Location, FileEntry> =
        listed.into_iter().map(|entry| (entry.location.clone(), entry)).collect();
    let (table, version) = (&manifest.table, manifest.version.0);
    let check = |file: &crate::embed::ManifestFile| {
        let location = folder.join(&file.name);
        match there.remove(&location) {
            Some(entry) if entry.size_bytes == file.size_bytes => Ok(entry),
            Some(entry) => Err(QueryError::ChangedFile {
                file: location,
                table: table.clone(),
                version,
                size_bytes: entry.size_bytes,
                expected_bytes: file.size_bytes,
            }),
            None => Err(QueryError::MissingFile { file: location, table: table.clone(), version }),
        }
    };
    manifest.files.iter().map(check).collect()
}

/// The columns; the vectors carry the fingerprint of their model through every query.
fn stamped(schema: &Schema, manifest: &Manifest) -> Schema {
    let stamp = |field: &FieldRef| -> FieldRef {
        if field.name() != EMBEDDING_COLUMN {
            return Arc::clone(field);
        }
        let mut metadata = field.metadata().clone();
        metadata.insert(FINGERPRINT_KEY.to_owned(), manifest.fingerprint.to_string());
        Arc::new(Field::clone(field).with_metadata(metadata))
    };
    Schema::new(schema.fields().iter().map(stamp).collect::<Vec<_>>())
}

#[async_trait]
impl TableProvider for VersionTable {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
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
        let mut statistics = Statistics::new_unknown(&self.schema);
        statistics.num_rows = Precision::Exact(self.rows);
        let options = TableParquetOptions {
            global: state.config_options().execution.parquet.clone(),
            ..TableParquetOptions::default()
        };
        let source = ParquetSource::new(Arc::clone(&self.schema))
            .with_table_parquet_options(options)
            .with_parquet_file_reader_factory(Arc::new(Readers));
        let files = self.files.iter().map(VersionFile::partitioned).collect();
        let groups = FileGroup::new(files).split_files(state.config().target_partitions());
        let config = FileScanConfigBuilder::new(self.url.clone(), Arc::new(source))
            .with_file_groups(groups)
            .with_statistics(statistics)
            .with_projection_indices(projection.cloned())?
            .with_limit(limit)
            .build();
        Ok(DataSourceExec::from_data_source(config))
    }
}
