//! One file of a snapshot, and the promise that what is read is what was listed.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use object_store::{ObjectStore, ObjectStoreExt, path::Path};

use super::{DataError, error::Cause};
use crate::storage::{FileEntry, Location, Storage};

/// A file and the store that holds it. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct SnapshotFile {
    storage: Storage,
    entry: FileEntry,
    store: Arc<dyn ObjectStore>,
    path: Path,
}

impl SnapshotFile {
    /// Opens nothing yet.
    pub(super) fn new(storage: &Storage, entry: FileEntry) -> Result<Self, DataError> {
        let (store, path) = storage.open(&entry.location)?;
        Ok(Self { storage: storage.clone(), entry, store, path })
    }

    /// As listed.
    pub(super) fn entry(&self) -> &FileEntry {
        &self.entry
    }

    /// The place, for messages.
    pub(super) fn location(&self) -> &Location {
        &self.entry.location
    }

    /// The path within its store.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file in the terms of its store.
    pub(super) fn meta(&self) -> object_store::ObjectMeta {
        object_store::ObjectMeta {
            location: self.path.clone(),
            last_modified: chrono::DateTime::from_timestamp_millis(self.entry.modified_ms).unwrap_or_default(),
            size: self.entry.size_bytes,
            e_tag: None,
            version: None,
        }
    }

    /// Fails if the file is not any more what was listed.
    pub(super) async fn check(&self) -> Result<(), DataError> {
        let change = match self.storage.head(&self.entry.location).await? {
            None => "it is gone".to_owned(),
            Some(now) if now.size_bytes != self.entry.size_bytes => {
                format!("it had {} bytes and has {}", self.entry.size_bytes, now.size_bytes)
            }
            Some(now) if now.modified_ms != self.entry.modified_ms => "it was written again".to_owned(),
            Some(_) => return Ok(()),
        };
        Err(DataError::Changed { file: self.entry.location.clone(), change })
    }

    /// Some bytes.
    pub(super) async fn range(&self, range: Range<u64>) -> Result<Bytes, DataError> {
        self.store.get_range(&self.path, range).await.map_err(|error| self.unreadable(error))
    }

    /// Several ranges, those close to each other in one request.
    pub(super) async fn ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, DataError> {
        self.store.get_ranges(&self.path, ranges).await.map_err(|error| self.unreadable(error))
    }

    /// The whole file as a stream of bytes.
    pub(super) async fn stream(
        &self,
    ) -> Result<impl futures::Stream<Item = Result<Bytes, DataError>> + Send + 'static, DataError> {
        let bytes = self.store.get(&self.path).await.map_err(|error| self.unreadable(error))?.into_stream();
        let file = self.clone();
        Ok(futures::StreamExt::map(bytes, move |bytes| bytes.map_err(|error| file.unreadable(error))))
    }

    /// A failed read.
    fn unreadable(&self, error: object_store::Error) -> DataError {
        let file = self.entry.location.clone();
        match error {
            object_store::Error::NotFound { .. } => DataError::Changed { file, change: "it is gone".to_owned() },
            error => DataError::Unreadable { file, source: Box::new(error) },
        }
    }

    /// Content that its decoder refuses, unless the decoder hands on an error of reading.
    pub(super) fn corrupt(&self, error: impl Into<Cause>) -> DataError {
        let error: Cause = error.into();
        match error.downcast::<DataError>() {
            Ok(own) => *own,
            Err(source) => DataError::Corrupt { file: self.entry.location.clone(), source },
        }
    }

    /// Content that the Parquet decoder refuses.
    pub(super) fn parquet_error(&self, error: parquet::errors::ParquetError) -> DataError {
        match error {
            parquet::errors::ParquetError::External(error) => self.corrupt(error),
            error => self.corrupt(error),
        }
    }
}
