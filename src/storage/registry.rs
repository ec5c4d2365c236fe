//! All stores that a run touches, opened as they are named.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use datafusion::prelude::SessionContext;
use futures::{StreamExt, TryStreamExt};
use object_store::{
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload, local::LocalFileSystem, memory::InMemory, path::Path,
};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use url::Url;

use super::{HdfsStore, Location, StorageError, bounded::Bounded, error::Elapsed, listing, local};
use crate::{config::SiteConfig, limits};

/// A file as listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Where it is.
    pub location: Location,
    /// Its length.
    pub size_bytes: u64,
    /// Its modification time, milliseconds since 1970 UTC.
    pub modified_ms: i64,
}

/// Names of probes begin so.
const PROBE: &str = "_probe";

const PROBE_CONTENT: [u8; 4096] = [0; 4096];

/// All stores that a run touches. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Storage {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: SiteConfig,
    /// By `Location::root`.
    stores: Mutex<HashMap<String, Store>>,
}

/// A store, and what it can do beyond an object store.
#[derive(Clone, Debug)]
struct Store {
    objects: Arc<dyn ObjectStore>,
    hdfs: Option<Arc<HdfsStore>>,
}

impl Storage {
    /// A registry that opens stores as they are named.
    pub fn new(config: &SiteConfig) -> Self {
        let inner = Inner { config: config.clone(), stores: Mutex::default() };
        Self { inner: Arc::new(inner) }
    }

    /// The store behind a location (deadlines and retries included) and the path within it.
    pub fn open(&self, location: &Location) -> Result<(Arc<dyn ObjectStore>, Path), StorageError> {
        Ok((self.store(location)?.objects, object_path(location)?))
    }

    /// Makes the stores of these locations known to a DataFusion session.
    pub fn register<'a>(
        &self,
        session: &SessionContext,
        locations: impl IntoIterator<Item = &'a Location>,
    ) -> Result<(), StorageError> {
        for location in locations {
            let bad = |error: url::ParseError| StorageError::new(location, error);
            // A URL without an authority needs its third slash.
            let root = Url::parse(&format!("{}/", location.root())).map_err(bad)?;
            session.register_object_store(&root, self.store(location)?.objects);
        }
        Ok(())
    }

    /// All data files at a file, folder (recursively) or glob, sorted by location. Leaves out
    /// what is hidden or temporary: any segment below the folder that starts with `_` or `.`
    /// (but for `key=value` folders such as `_day=1`), and names that end in `.crc`, `.tmp`,
    /// `.part`, `.part.parquet`, `.inprogress`, `._COPYING_`. A missing path is `NotFound`; an
    /// existing empty folder gives an empty list.
    pub async fn list(&self, location: &Location) -> Result<Vec<FileEntry>, StorageError> {
        if location.is_glob() {
            let (folder, pattern) = listing::split_glob(location.path());
            let pattern = listing::Pattern::new(pattern).ok_or_else(|| StorageError::BadLocation {
                text: location.to_string(),
                reason: "its pattern is malformed".to_owned(),
            })?;
            let files = self.list_folder(&location.with_path(folder), |below| pattern.matches(below)).await?;
            return if files.is_empty() { Err(StorageError::NotFound(location.clone())) } else { Ok(files) };
        }
        match self.head(location).await? {
            Some(file) => Ok(vec![file]),
            None => self.list_folder(location, |_| true).await,
        }
    }

    async fn list_folder(
        &self,
        folder: &Location,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<FileEntry>, StorageError> {
        let (store, path) = self.open(folder)?;
        let mut listed = store.list(Some(&path));
        let mut files = Vec::new();
        let mut exists = false;
        while let Some(object) = listed.next().await {
            let file = entry(folder, &object.map_err(|error| StorageError::new(folder, error))?);
            exists = true;
            let below = file.location.path()[folder.path().len()..].trim_start_matches('/');
            if listing::is_data(below) && wanted(below) {
                files.push(file);
            }
        }
        if !exists && !self.folder_exists(folder).await? {
            return Err(StorageError::NotFound(folder.clone()));
        }
        files.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(files)
    }

    /// Whether an empty folder is there; object stores have none.
    async fn folder_exists(&self, folder: &Location) -> Result<bool, StorageError> {
        if let Some(path) = folder.local_path() {
            return Ok(path.is_dir());
        }
        match self.store(folder)?.hdfs {
            Some(hdfs) => {
                let path = object_path(folder)?;
                in_time(folder, async { hdfs.folder_exists(&path).await }).await
            }
            None => Ok(false),
        }
    }

    /// Names of the direct children of a folder, folders and files, hidden ones too; empty if
    /// the folder does not exist.
    pub async fn children(&self, folder: &Location) -> Result<Vec<String>, StorageError> {
        let (store, path) = self.open(folder)?;
        let listed = match store.list_with_delimiter(Some(&path)).await {
            Ok(listed) => listed,
            Err(object_store::Error::NotFound { .. }) => return Ok(Vec::new()),
            Err(error) => return Err(StorageError::new(folder, error)),
        };
        let paths = listed.common_prefixes.iter().chain(listed.objects.iter().map(|object| &object.location));
        let mut names: Vec<String> = paths.filter_map(|path| path.filename().map(str::to_owned)).collect();
        names.sort();
        Ok(names)
    }

    /// A whole (small) file; `NotFound` if there is none.
    pub async fn read(&self, location: &Location) -> Result<Bytes, StorageError> {
        let (store, path) = self.open(location)?;
        let read = async { store.get(&path).await?.bytes().await };
        read.await.map_err(|error| StorageError::new(location, error))
    }

    /// A file's entry, or `None`.
    pub async fn head(&self, location: &Location) -> Result<Option<FileEntry>, StorageError> {
        if location.local_path().is_some_and(|path| path.is_dir()) || location.path().is_empty() {
            return Ok(None);
        }
        let (store, path) = self.open(location)?;
        match store.head(&path).await {
            Ok(object) => Ok(Some(entry(location, &object))),
            Err(error) => match StorageError::new(location, error) {
                StorageError::NotFound(_) => Ok(None),
                error => Err(error),
            },
        }
    }

    /// Creates a file whole, folders included; `AlreadyExists` if one is there. Of several
    /// racers exactly one succeeds.
    pub async fn create(&self, location: &Location, content: Bytes) -> Result<(), StorageError> {
        if let Some(path) = location.local_path() {
            return blocking(location, move || local::create(&path, &content)).await;
        }
        self.put(location, content, PutMode::Create).await
    }

    /// Replaces a file whole: a reader sees the old or the new content, also after a crash.
    pub async fn replace(&self, location: &Location, content: Bytes) -> Result<(), StorageError> {
        if let Some(path) = location.local_path() {
            return blocking(location, move || local::replace(&path, &content)).await;
        }
        self.put(location, content, PutMode::Overwrite).await
    }

    async fn put(&self, location: &Location, content: Bytes, mode: PutMode) -> Result<(), StorageError> {
        let (store, path) = self.open(location)?;
        let put = store.put_opts(&path, PutPayload::from(content), mode.into()).await;
        put.map(drop).map_err(|error| StorageError::new(location, error))
    }

    /// Renames a folder; `AlreadyExists` if the target is there. Atomic on `file` and `hdfs`;
    /// elsewhere objects are copied one by one.
    pub async fn rename_folder(&self, from: &Location, to: &Location) -> Result<(), StorageError> {
        if let (Some(source), Some(target)) = (from.local_path(), to.local_path()) {
            let folder = source.clone();
            // Each file within a deadline of its own: together they may be of any size.
            for path in blocking(from, move || local::tree(&folder)).await? {
                blocking(from, move || local::sync(&path)).await?;
            }
            return blocking(to, move || local::rename_folder(&source, &target)).await;
        }
        let store = self.store(to)?;
        let (source, target) = (object_path(from)?, object_path(to)?);
        if let Some(hdfs) = &store.hdfs {
            return in_time(to, hdfs.rename_folder(&source, &target)).await;
        }
        let failed = |error| StorageError::new(to, error);
        if store.objects.list(Some(&target)).next().await.is_some() {
            return Err(StorageError::AlreadyExists(to.clone()));
        }
        let objects: Vec<ObjectMeta> = store.objects.list(Some(&source)).try_collect().await.map_err(failed)?;
        for object in objects {
            let below = object.location.prefix_match(&source).into_iter().flatten();
            let target = below.fold(target.clone(), Path::join);
            store.objects.rename(&object.location, &target).await.map_err(failed)?;
        }
        Ok(())
    }

    /// Removes a file or a folder with all that is in it; a missing one is no error.
    pub async fn remove(&self, location: &Location) -> Result<(), StorageError> {
        if let Some(path) = location.local_path() {
            return blocking(location, move || local::remove(&path)).await;
        }
        let store = self.store(location)?;
        let path = object_path(location)?;
        if let Some(hdfs) = &store.hdfs {
            return in_time(location, hdfs.remove(&path)).await;
        }
        let path_itself = path.clone();
        let listed = store.objects.list(Some(&path)).map_ok(|object| object.location);
        let all = listed.chain(futures::stream::once(async move { Ok(path_itself) })).boxed();
        let mut removed = store.objects.delete_stream(all);
        while let Some(result) = removed.next().await {
            match result {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(StorageError::new(location, error)),
            }
        }
        Ok(())
    }

    /// Writes and removes a probe in the folder (creating the folder), so that a target that
    /// is read-only, full or forbidden shows before the work is done.
    pub async fn check_writable(&self, folder: &Location) -> Result<(), StorageError> {
        let probe = folder.join(&format!("{PROBE}.{}.tmp", std::process::id()));
        if let Some(path) = probe.local_path() {
            blocking(&probe, move || local::write_probe(&path, &PROBE_CONTENT)).await?;
        } else {
            let write = || self.replace(&probe, Bytes::from_static(&PROBE_CONTENT));
            let mut written = write().await;
            for _ in 1..limits::STORAGE_ATTEMPTS {
                // Another start, tidying up, may have taken its hidden half for a leftover.
                if matches!(written, Err(StorageError::NotFound(_))) {
                    written = write().await;
                }
            }
            written?;
        }
        // With those of processes that were killed in between; one that lives has seen enough
        // once its probe is written.
        self.remove_children(folder, |name| name.trim_start_matches('.').starts_with(PROBE)).await
    }

    /// Removes what a killed process left unfinished in a folder that nobody else writes to.
    pub async fn remove_unfinished(&self, folder: &Location) -> Result<(), StorageError> {
        self.remove_children(folder, |name| name.starts_with('.') && name.strip_suffix(".tmp").is_some()).await
    }

    async fn remove_children(&self, folder: &Location, doomed: impl Fn(&str) -> bool) -> Result<(), StorageError> {
        for name in self.children(folder).await?.iter().filter(|name| doomed(name)) {
            self.remove(&folder.join(name)).await?;
        }
        Ok(())
    }

    fn store(&self, location: &Location) -> Result<Store, StorageError> {
        let mut stores = self.inner.stores.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = stores.get(location.root()) {
            return Ok(store.clone());
        }
        let store = self.connect(location)?;
        stores.insert(location.root().to_owned(), store.clone());
        Ok(store)
    }

    fn connect(&self, location: &Location) -> Result<Store, StorageError> {
        let plain = |objects: Arc<dyn ObjectStore>| Store { objects, hdfs: None };
        match location.scheme() {
            "file" => Ok(plain(Arc::new(Bounded::new(Arc::new(LocalFileSystem::new()))))),
            "memory" => Ok(plain(Arc::new(InMemory::new()))),
            "hdfs" | "viewfs" => {
                let hdfs = Arc::new(HdfsStore::connect(location, &self.inner.config)?);
                Ok(Store { objects: Arc::new(Bounded::new(Arc::clone(&hdfs))), hdfs: Some(hdfs) })
            }
            _ => s3(location).map(plain),
        }
    }
}

#[cfg(feature = "s3")]
fn s3(location: &Location) -> Result<Arc<dyn ObjectStore>, StorageError> {
    let builder = object_store::aws::AmazonS3Builder::from_env().with_bucket_name(location.authority());
    let store = builder.build().map_err(|error| StorageError::new(location, error))?;
    Ok(Arc::new(Bounded::new(Arc::new(store))))
}

#[cfg(not(feature = "s3"))]
fn s3(location: &Location) -> Result<Arc<dyn ObjectStore>, StorageError> {
    let reason = "this build has no S3 support; build it with --features s3".to_owned();
    Err(StorageError::Unsupported { location: location.clone(), reason })
}

fn object_path(location: &Location) -> Result<Path, StorageError> {
    Path::parse(location.path()).map_err(|error| StorageError::new(location, error))
}

fn entry(of: &Location, object: &ObjectMeta) -> FileEntry {
    FileEntry {
        location: of.with_path(object.location.as_ref()),
        size_bytes: object.size,
        modified_ms: object.last_modified.timestamp_millis(),
    }
}

/// Runs file-system work off the async threads.
async fn blocking<T: Send + 'static>(
    location: &Location,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, StorageError> {
    let done = tokio::task::spawn_blocking(work);
    match timeout(limits::STORAGE_CALL, done).await {
        Ok(Ok(result)) => result.map_err(|error| StorageError::new(location, error)),
        Ok(Err(error)) => Err(StorageError::new(location, error)),
        Err(_) => Err(StorageError::new(location, Elapsed(limits::STORAGE_CALL))),
    }
}

/// Waits for a call that does not go through `Bounded`.
async fn in_time<T>(
    location: &Location,
    call: impl Future<Output = object_store::Result<T>>,
) -> Result<T, StorageError> {
    match timeout(limits::STORAGE_CALL, call).await {
        Ok(result) => result.map_err(|error| StorageError::new(location, error)),
        Err(_) => Err(StorageError::new(location, Elapsed(limits::STORAGE_CALL))),
    }
}
