//! One file of a version, read so that whatever fails names it.

use std::{ops::Range, sync::Arc};

use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use datafusion::{
    datasource::{
        listing::PartitionedFile,
        physical_plan::{ParquetFileMetrics, ParquetFileReaderFactory},
    },
    error::{DataFusionError, Result as QueryResult},
    physical_plan::metrics::ExecutionPlanMetricsSet,
};
use futures::{FutureExt, TryStreamExt, future::BoxFuture};
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use parquet::{
    arrow::{
        ParquetRecordBatchStreamBuilder,
        arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
        async_reader::AsyncFileReader,
    },
    errors::{ParquetError, Result as ParquetResult},
    file::metadata::{ParquetMetaData, ParquetMetaDataReader},
};
use tokio::sync::OnceCell;

use super::QueryError;
use crate::{
    embed::Manifest,
    limits,
    storage::{FileEntry, Location, Storage, StorageError},
};

/// A file of a version. Cheap to clone; the clones share the footer.
#[derive(Clone, Debug)]
pub(super) struct VersionFile {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    table: String,
    version: u64,
    location: Location,
    meta: ObjectMeta,
    store: Arc<dyn ObjectStore>,
    footer: OnceCell<Arc<ParquetMetaData>>,
}

impl VersionFile {
    /// Opens nothing yet.
    pub(super) fn new(storage: &Storage, manifest: &Manifest, file: &FileEntry) -> Result<Self, StorageError> {
        let (store, location) = storage.open(&file.location)?;
        let last_modified = chrono::DateTime::from_timestamp_millis(file.modified_ms).unwrap_or_default();
        let meta = ObjectMeta { location, last_modified, size: file.size_bytes, e_tag: None, version: None };
        let shared = Shared {
            table: manifest.table.clone(),
            version: manifest.version.0,
            location: file.location.clone(),
            meta,
            store,
            footer: OnceCell::new(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The columns that the file holds.
    pub(super) async fn schema(&self) -> Result<SchemaRef, QueryError> {
        let footer = self.footer().await.map_err(|error| self.unreadable(error))?;
        let columns = ArrowReaderMetadata::try_new(footer, ArrowReaderOptions::default());
        Ok(Arc::clone(columns.map_err(|error| self.unreadable(error))?.schema()))
    }

    /// Decodes all rows for nothing but the errors.
    pub(super) async fn decode(&self) -> Result<(), QueryError> {
        let decode = async {
            let mut rows = ParquetRecordBatchStreamBuilder::new(self.reader(None)).await?.build()?;
            while rows.try_next().await?.is_some() {}
            Ok(())
        };
        decode.await.map_err(|error| self.unreadable(error))
    }

    /// The file for a scan, which finds it again through `Readers`.
    pub(super) fn partitioned(&self) -> PartitionedFile {
        PartitionedFile::new_from_meta(self.shared.meta.clone()).with_extension(self.clone())
    }

    async fn footer(&self) -> ParquetResult<Arc<ParquetMetaData>> {
        let read = async || {
            let mut reader = self.reader(None);
            let footer = ParquetMetaDataReader::new().with_prefetch_hint(Some(limits::FOOTER_BYTES));
            footer.load_and_finish(&mut reader, self.shared.meta.size).await.map(Arc::new)
        };
        self.shared.footer.get_or_try_init(read).await.cloned()
    }

    fn reader(&self, metrics: Option<ParquetFileMetrics>) -> Reader {
        Reader { file: self.clone(), metrics }
    }

    /// A failed call of the store.
    fn unreachable(&self, error: object_store::Error) -> ParquetError {
        let Shared { table, version, location, .. } = &*self.shared;
        let error = match StorageError::new(location, error) {
            StorageError::NotFound(file) => QueryError::MissingFile { file, table: table.clone(), version: *version },
            error => error.into(),
        };
        ParquetError::External(Box::new(error))
    }

    /// Content that the decoder refuses, unless it hands on an error of reading.
    fn unreadable(&self, error: ParquetError) -> QueryError {
        let Shared { table, location, .. } = &*self.shared;
        let bad = |source| QueryError::BadFile { file: location.clone(), table: table.clone(), source };
        match error {
            ParquetError::External(error) => {
                error.downcast().map_or_else(|error| bad(ParquetError::External(error)), |own| *own)
            }
            error => bad(error),
        }
    }
}

/// One reading of a file.
struct Reader {
    file: VersionFile,
    metrics: Option<ParquetFileMetrics>,
}

impl Reader {
    fn count(&self, bytes: u64) {
        if let Some(metrics) = &self.metrics {
            metrics.bytes_scanned.add(bytes as usize);
        }
    }
}

impl AsyncFileReader for Reader {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, ParquetResult<Bytes>> {
        self.count(range.end - range.start);
        let file = &self.file;
        let Shared { store, meta, .. } = &*file.shared;
        async move { store.get_range(&meta.location, range).await.map_err(|error| file.unreachable(error)) }.boxed()
    }

    fn get_byte_ranges(&mut self, ranges: Vec<Range<u64>>) -> BoxFuture<'_, ParquetResult<Vec<Bytes>>> {
        self.count(ranges.iter().map(|range| range.end - range.start).sum());
        let file = &self.file;
        let Shared { store, meta, .. } = &*file.shared;
        async move { store.get_ranges(&meta.location, &ranges).await.map_err(|error| file.unreachable(error)) }.boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        _options: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, ParquetResult<Arc<ParquetMetaData>>> {
        async move {
            let footer = self.file.footer().await;
            footer.map_err(|error| ParquetError::External(Box::new(self.file.unreadable(error))))
        }
        .boxed()
    }
}

/// Gives scans the files of a version.
#[derive(Debug)]
pub(super) struct Readers;

impl ParquetFileReaderFactory for Readers {
    fn create_reader(
        &self,
        partition: usize,
        file: PartitionedFile,
        _metadata_size_hint: Option<usize>,
        metrics: &ExecutionPlanMetricsSet,
    ) -> QueryResult<Box<dyn AsyncFileReader + Send>> {
        let opened = file
            .extension::<VersionFile>()
            .ok_or_else(|| DataFusionError::Internal(format!("{} was not opened before its scan", file.path())))?;
        let metrics = ParquetFileMetrics::new(partition, file.path().as_ref(), metrics);
        Ok(Box::new(opened.reader(Some(metrics))))
    }
}
