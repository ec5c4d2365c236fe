//! Where bytes are: local files, HDFS, S3, memory, behind one registry.
//!
//! Every call has a deadline and a bounded number of tries; hidden and temporary files are
//! never data; what is published appears whole or not at all.

use std::sync::Arc;

use bytes::Bytes;
use datafusion::prelude::SessionContext;
use object_store::{ObjectStore, path::Path};

use crate::{
    config::SiteConfig,
    remedy::{Remedied, Remedy},
};

/// A file, folder or glob, as an absolute URL: `file:///a/b`, `hdfs://nn:9000/a`, `s3://bucket/a`,
/// `memory:///a`. Equal places have equal text; never ends with `/`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Location(String);

impl Location {
    /// A path or URL; a relative path counts from `base` (an absolute local folder).
    pub fn parse(text: &str, base: &std::path::Path) -> Result<Self, StorageError> {
        let _ = (text, base);
        unimplemented!()
    }

    /// A child; `name` may have several segments.
    pub fn join(&self, name: &str) -> Self {
        let _ = name;
        unimplemented!()
    }

    /// The last segment.
    pub fn name(&self) -> &str {
        unimplemented!()
    }

    /// The URL.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The local path, of a `file:` location.
    pub fn local_path(&self) -> Option<std::path::PathBuf> {
        unimplemented!()
    }

    /// Whether `*`, `?`, `[` or `{` stands in the path.
    pub fn is_glob(&self) -> bool {
        unimplemented!()
    }
}

impl std::fmt::Display for Location {
    /// A local location prints as its path, any other as its URL.
    fn fmt(&self, _f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        unimplemented!()
    }
}

/// A file as listed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FileEntry {
    /// Where it is.
    pub location: Location,
    /// Its length.
    pub size_bytes: u64,
    /// Its modification time, milliseconds since 1970 UTC.
    pub modified_ms: i64,
}

/// All stores that a run touches. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Storage {
    _inner: Arc<()>,
}

impl Storage {
    /// A registry that opens stores as they are named.
    pub fn new(config: &SiteConfig) -> Self {
        let _ = config;
        unimplemented!()
    }

    /// The store behind a location (deadlines and retries included) and the path within it.
    pub fn open(&self, location: &Location) -> Result<(Arc<dyn ObjectStore>, Path), StorageError> {
        let _ = location;
        unimplemented!()
    }

    /// Makes the stores of these locations known to a DataFusion session.
    pub fn register(&self, session: &SessionContext, locations: &[Location]) -> Result<(), StorageError> {
        let _ = (session, locations);
        unimplemented!()
    }

    /// All data files at a file, folder (recursively) or glob, sorted by location. Leaves out
    /// what is hidden or temporary: any segment below the folder that starts with `_` or `.`
    /// (but for `key=value` folders such as `_day=1`), and names that end in `.crc`, `.tmp`,
    /// `.part`, `.inprogress`, `._COPYING_`. A missing path is `NotFound`; an existing empty
    /// folder gives an empty list.
    pub async fn list(&self, location: &Location) -> Result<Vec<FileEntry>, StorageError> {
        let _ = location;
        unimplemented!()
    }

    /// Names of the direct children of a folder, folders and files, hidden ones too; empty if
    /// the folder does not exist.
    pub async fn children(&self, folder: &Location) -> Result<Vec<String>, StorageError> {
        let _ = folder;
        unimplemented!()
    }

    /// A whole (small) file; `NotFound` if there is none.
    pub async fn read(&self, location: &Location) -> Result<Bytes, StorageError> {
        let _ = location;
        unimplemented!()
    }

    /// A file's entry, or `None`.
    pub async fn head(&self, location: &Location) -> Result<Option<FileEntry>, StorageError> {
        let _ = location;
        unimplemented!()
    }

    /// Creates a file whole, folders included; `AlreadyExists` if one is there. Of several
    /// racers exactly one succeeds.
    pub async fn create(&self, location: &Location, content: Bytes) -> Result<(), StorageError> {
        let _ = (location, content);
        unimplemented!()
    }

    /// Replaces a file whole: a reader sees the old or the new content, also after a crash.
    pub async fn replace(&self, location: &Location, content: Bytes) -> Result<(), StorageError> {
        let _ = (location, content);
        unimplemented!()
    }

    /// Renames a folder; `AlreadyExists` if the target is there. Atomic on `file` and `hdfs`;
    /// elsewhere objects are copied one by one.
    pub async fn rename_folder(&self, from: &Location, to: &Location) -> Result<(), StorageError> {
        let _ = (from, to);
        unimplemented!()
    }

    /// Removes a file or a folder with all that is in it; a missing one is no error.
    pub async fn remove(&self, location: &Location) -> Result<(), StorageError> {
        let _ = location;
        unimplemented!()
    }

    /// Writes and removes a probe in the folder (creating the folder), so that a target that
    /// is read-only, full or forbidden shows before the work is done.
    pub async fn check_writable(&self, folder: &Location) -> Result<(), StorageError> {
        let _ = folder;
        unimplemented!()
    }
}

/// Why a storage call failed; every variant names the place.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// There is no such file or folder.
    #[error("{0}: no such file or folder")]
    NotFound(Location),
    /// It is there already.
    #[error("{0}: exists already")]
    AlreadyExists(Location),
}

impl Remedied for StorageError {
    fn remedy(&self) -> Remedy {
        unimplemented!()
    }
}
