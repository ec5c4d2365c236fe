//! HDFS as an object store, over the native client.
//!
//! A file is written to a hidden sibling and renamed, so a reader never sees half of one; a
//! rename without overwriting is the atomic create (HDFS's own create shows an empty file
//! first). Deadlines are `Bounded`'s.

use std::{fmt, ops::Range};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt, StreamExt, TryStreamExt, stream::BoxStream};
use hdfs_native::{
    Client, ClientBuilder, HdfsError, WriteOptions,
    client::FileStatus,
    file::{FileReader, FileWriter},
};
use object_store::{
    CopyMode, CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    OBJECT_STORE_COALESCE_DEFAULT, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, RenameOptions, RenameTargetMode, Result, UploadPart, coalesce_ranges, path::Path,
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::{Location, StorageError};
use crate::{config::SiteConfig, limits};

/// Settings where hdfs-site.xml says nothing. The client's own defaults wait three minutes for
/// a NameNode that is down, and longer for a DataNode that is frozen than `limits::STORAGE_CALL`
/// leaves time to read from another.
const DEFAULTS: [(&str, &str); 2] = [("dfs.client.failover.max.attempts", "2"), ("dfs.client.socket-timeout", "10000")];

/// One HDFS.
#[derive(Clone, Debug)]
pub struct HdfsStore {
    client: Client,
    url: String,
}

impl HdfsStore {
    /// A client of the file system that a location names, or of `fs.defaultFS` where it names
    /// none. Nothing is sent yet.
    pub fn connect(location: &Location, config: &SiteConfig) -> std::result::Result<Self, StorageError> {
        let url = format!("{}/", location.root());
        let site = config.hadoop_conf_dir.as_ref().map(|folder| folder.join("hdfs-site.xml"));
        let settings = site.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        let defaults = DEFAULTS.into_iter().filter(|(key, _)| !settings.contains(key));
        let mut builder = ClientBuilder::new().with_url(&url).with_config(defaults);
        if let Some(folder) = &config.hadoop_conf_dir {
            builder = builder.with_config_dir(folder.display().to_string());
        }
        if let Some(user) = &config.hadoop_user {
            builder = builder.with_user(user);
        }
        // Nothing is sent here: what fails is the configuration.
        builder.build().map(|client| Self { client, url }).map_err(|error| {
            let reason = unusable(location, config, &error);
            StorageError::Unsupported { location: location.clone(), reason }
        })
    }

    /// Renames a folder, parents of the target included; fails if the target is there.
    pub async fn rename_folder(&self, from: &Path, to: &Path) -> Result<()> {
        if let Some((parent, _)) = absolute(to).rsplit_once('/').filter(|(parent, _)| !parent.is_empty()) {
            self.client.mkdirs(parent, 0o755, true).await.map_err(|error| failed(to, error))?;
        }
        self.client.rename(&absolute(from), &absolute(to), false).await.map_err(|error| failed(to, error))
    }

    /// Removes a file or a folder with all that is in it; a missing one is no error.
    pub async fn remove(&self, path: &Path) -> Result<()> {
        match self.client.delete(&absolute(path), true).await {
            Ok(_) | Err(HdfsError::FileNotFound(_)) => Ok(()),
            Err(error) => Err(failed(path, error)),
        }
    }

    /// Whether there is such a folder.
    pub async fn folder_exists(&self, path: &Path) -> Result<bool> {
        match self.client.get_file_info(&absolute(path)).await {
            Ok(status) => Ok(status.isdir),
            Err(HdfsError::FileNotFound(_)) => Ok(false),
            Err(error) => Err(failed(path, error)),
        }
    }

    async fn write(&self, path: &str, payload: &PutPayload) -> std::result::Result<(), HdfsError> {
        let mut file = self.create(path).await?;
        write_part(&mut file, payload).await?;
        Box::pin(file.close()).await
    }

    // The client's futures are large, so they are boxed.
    async fn create(&self, path: &str) -> std::result::Result<FileWriter, HdfsError> {
        Box::pin(self.client.create(path, WriteOptions::default().overwrite(true))).await
    }

    /// Writes a hidden sibling of `path` and gives its name. A pipeline of DataNodes may hold
    /// one that died; the whole file is then written again, to others.
    async fn write_aside(&self, path: &Path, payload: &PutPayload) -> Result<String> {
        let aside = sibling(path);
        let mut wait = limits::STORAGE_BACKOFF;
        for _ in 1..limits::STORAGE_ATTEMPTS {
            match self.write(&aside, payload).await {
                Err(HdfsError::DataTransferError(_) | HdfsError::IOError(_) | HdfsError::OperationFailed(_)) => {}
                result => return result.map(|()| aside).map_err(|error| failed(path, error)),
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
        }
        self.write(&aside, payload).await.map(|()| aside).map_err(|error| failed(path, error))
    }

    /// Gives a file written aside its name, or removes it.
    async fn publish(&self, aside: &str, path: &Path, overwrite: bool) -> Result<()> {
        let renamed = self.client.rename(aside, &absolute(path), overwrite).await;
        if renamed.is_err() {
            // The rename's error is the one to tell; a leftover is hidden and named as temporary.
            let _ = self.client.delete(aside, false).await;
        }
        renamed.map_err(|error| failed(path, error))
    }

    async fn open(&self, path: &Path) -> Result<FileReader> {
        self.client.read(&absolute(path)).await.map_err(|error| failed(path, error))
    }
}

impl fmt::Display for HdfsStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HDFS at {}", self.url)
    }
}

#[async_trait]
impl ObjectStore for HdfsStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let overwrite = match opts.mode {
            PutMode::Overwrite => true,
            PutMode::Create => false,
            PutMode::Update(_) => return Err(unsupported("HDFS has no conditional update")),
        };
        let aside = self.write_aside(location, &payload).await?;
        self.publish(&aside, location, overwrite).await?;
        Ok(no_version())
    }

    async fn put_multipart_opts(&self, location: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Ok(Box::new(Upload::new(self.clone(), location.clone())))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let status = self.client.get_file_info(&absolute(location)).await.map_err(|error| failed(location, error))?;
        if status.isdir {
            return Err(failed(location, HdfsError::FileNotFound(status.path)));
        }
        let meta = object(&status)?;
        options.check_preconditions(&meta)?;
        let range = match &options.range {
            Some(range) => range
                .as_range(meta.size)
                .map_err(|source| object_store::Error::Generic { store: "HDFS", source: source.into() })?,
            None => 0..meta.size,
        };
        let payload = if options.head || range.is_empty() {
            futures::stream::empty().boxed()
        } else {
            let reader = self.open(location).await?;
            stream_range(&reader, location, &range)?
        };
        let payload = GetResultPayload::Stream(payload);
        Ok(GetResult { payload, meta, range, attributes: object_store::Attributes::default() })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let reader = self.open(location).await?;
        let read = |range: Range<u64>| {
            let stream = stream_range(&reader, location, &range);
            async move {
                let chunks: Vec<Bytes> = stream?.try_collect().await?;
                Ok::<_, object_store::Error>(if chunks.len() == 1 { chunks[0].clone() } else { chunks.concat().into() })
            }
        };
        coalesce_ranges(ranges, read, OBJECT_STORE_COALESCE_DEFAULT).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let delete = move |location: Result<Path>| {
            let store = store.clone();
            async move {
                let location = location?;
                match store.client.delete(&absolute(&location), false).await {
                    Ok(true) => Ok(location),
                    Ok(false) => Err(failed(&location, HdfsError::FileNotFound(location.to_string()))),
                    Err(error) => Err(failed(&location, error)),
                }
            }
        };
        locations.map(delete).buffered(10).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let prefix = prefix.cloned().unwrap_or_default();
        let listed = self.client.list_status_iter(&absolute(&prefix), true).into_stream();
        let files = listed.filter_map(move |status| {
            let object = match status {
                Ok(status) if status.isdir => None,
                Ok(status) => Some(object(&status)),
                Err(HdfsError::FileNotFound(_)) => None,
                Err(error) => Some(Err(failed(&prefix, error))),
            };
            async { object }
        });
        files.boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let prefix = prefix.cloned().unwrap_or_default();
        let children = match self.client.list_status(&absolute(&prefix), false).await {
            Ok(children) => children,
            Err(HdfsError::FileNotFound(_)) => Vec::new(),
            Err(error) => return Err(failed(&prefix, error)),
        };
        let mut result = ListResult { common_prefixes: Vec::new(), objects: Vec::new() };
        for child in children {
            if child.isdir {
                result.common_prefixes.push(relative(&child.path)?);
            } else {
                result.objects.push(object(&child)?);
            }
        }
        Ok(result)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let content = self.get_opts(from, GetOptions::default()).await?.bytes().await?;
        let mode = if options.mode == CopyMode::Create { PutMode::Create } else { PutMode::Overwrite };
        self.put_opts(to, content.into(), mode.into()).await.map(drop)
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let overwrite = options.target_mode == RenameTargetMode::Overwrite;
        self.client.rename(&absolute(from), &absolute(to), overwrite).await.map_err(|error| failed(to, error))
    }
}

/// A file in the making. Its parts are written in the order in which they were put, by one
/// task that ends with the upload.
#[derive(Debug)]
struct Upload {
    parts: Option<mpsc::UnboundedSender<(PutPayload, oneshot::Sender<Result<()>>)>>,
    writer: JoinHandle<Result<()>>,
    store: HdfsStore,
    path: Path,
    aside: String,
}

impl Upload {
    fn new(store: HdfsStore, path: Path) -> Self {
        let aside = sibling(&path);
        let (parts, queue) = mpsc::unbounded_channel();
        let writer = tokio::spawn(write_parts(store.clone(), path.clone(), aside.clone(), queue));
        Self { parts: Some(parts), writer, store, path, aside }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.writer.abort();
    }
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (done, written) = oneshot::channel();
        let sent = self.parts.as_ref().is_some_and(|parts| parts.send((data, done)).is_ok());
        async move {
            if !sent {
                return Err(unsupported("the upload has ended"));
            }
            written.await.unwrap_or_else(|_| Err(unsupported("the upload has failed")))
        }
        .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.parts = None;
        (&mut self.writer).await.map_err(|source| object_store::Error::JoinError { source })??;
        self.store.publish(&self.aside, &self.path, true).await?;
        Ok(no_version())
    }

    async fn abort(&mut self) -> Result<()> {
        self.parts = None;
        self.writer.abort();
        self.store.client.delete(&self.aside, false).await.map(drop).map_err(|error| failed(&self.path, error))
    }
}

/// Writes parts until no more can come, then closes the file.
async fn write_parts(
    store: HdfsStore,
    path: Path,
    aside: String,
    mut queue: mpsc::UnboundedReceiver<(PutPayload, oneshot::Sender<Result<()>>)>,
) -> Result<()> {
    let mut file = store.create(&aside).await.map_err(|error| failed(&path, error))?;
    while let Some((payload, done)) = queue.recv().await {
        let written = write_part(&mut file, &payload).await.map_err(|error| failed(&path, error));
        let ok = written.is_ok();
        // A caller that no longer waits for its part still gets the file's error from `complete`.
        let _ = done.send(written);
        if !ok {
            return Err(unsupported("a part could not be written"));
        }
    }
    Box::pin(file.close()).await.map_err(|error| failed(&path, error))
}

async fn write_part(file: &mut FileWriter, payload: &PutPayload) -> std::result::Result<(), HdfsError> {
    for chunk in payload {
        Box::pin(file.write_bytes(chunk.clone())).await?;
    }
    Ok(())
}

/// The client panics on a range beyond the end, so it is checked first.
fn stream_range(reader: &FileReader, path: &Path, range: &Range<u64>) -> Result<BoxStream<'static, Result<Bytes>>> {
    if range.end > reader.file_length() as u64 || range.start > range.end {
        let text = format!("{range:?} is beyond the end, {}", reader.file_length());
        return Err(failed(path, HdfsError::InvalidArgument(text)));
    }
    let path = path.clone();
    let stream = reader.read_range_stream(range.start as usize, (range.end - range.start) as usize);
    Ok(stream.map_err(move |error| failed(&path, error)).boxed())
}

/// What to mend where no client can be made: the file and the key, or the URL.
fn unusable(location: &Location, config: &SiteConfig, error: &HdfsError) -> String {
    let file = |name: &str| match &config.hadoop_conf_dir {
        Some(folder) => folder.join(name).display().to_string(),
        None => format!("{name} (HADOOP_CONF_DIR is not set)"),
    };
    match error {
        HdfsError::InvalidArgument(_) if location.authority().is_empty() => {
            format!(
                "the URL names no NameNode, and key fs.defaultFS in {} does not either: {error}",
                file("core-site.xml")
            )
        }
        HdfsError::InvalidArgument(_) if location.scheme() == "hdfs" && !location.authority().contains(':') => format!(
            "{name} is no name service of {}; give the NameNode's port: hdfs://{name}:8020: {error}",
            file("hdfs-site.xml"),
            name = location.authority(),
        ),
        error => format!("{} or {} cannot be used: {error}", file("core-site.xml"), file("hdfs-site.xml")),
    }
}

/// `a/b` as `/a/b`.
fn absolute(path: &Path) -> String {
    format!("/{path}")
}

fn relative(path: &str) -> Result<Path> {
    Path::parse(path.trim_start_matches('/')).map_err(Into::into)
}

/// A hidden name beside a file that no other writer uses.
fn sibling(path: &Path) -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let absolute = absolute(path);
    let (folder, name) = absolute.rsplit_once('/').unwrap_or(("", &absolute));
    let now = chrono::Utc::now().timestamp_micros();
    format!("{folder}/.{name}.{}.{now}.{}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

fn object(status: &FileStatus) -> Result<ObjectMeta> {
    let modified = chrono::DateTime::from_timestamp_millis(status.modification_time as i64).unwrap_or_default();
    Ok(ObjectMeta {
        location: relative(&status.path)?,
        last_modified: modified,
        size: status.length as u64,
        e_tag: Some(format!("{}-{}", status.modification_time, status.length)),
        version: None,
    })
}

fn no_version() -> PutResult {
    PutResult { e_tag: None, version: None }
}

fn failed(path: &Path, error: HdfsError) -> object_store::Error {
    let path = absolute(path);
    match error {
        HdfsError::FileNotFound(_) => object_store::Error::NotFound { path, source: error.into() },
        HdfsError::AlreadyExists(_) => object_store::Error::AlreadyExists { path, source: error.into() },
        HdfsError::RPCError(class, message) => generic(HdfsError::RPCError(class, without_trace(&message))),
        HdfsError::FatalRPCError(class, message) => generic(HdfsError::FatalRPCError(class, without_trace(&message))),
        error => generic(error),
    }
}

fn generic(error: HdfsError) -> object_store::Error {
    object_store::Error::Generic { store: "HDFS", source: error.into() }
}

/// A server's message without the stack trace that follows it.
fn without_trace(message: &str) -> String {
    message.split("\n\tat ").next().unwrap_or_default().trim_end().to_owned()
}

fn unsupported(reason: &str) -> object_store::Error {
    object_store::Error::NotSupported { source: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stack_traces_are_left_out() {
        let message = "Cannot create file. Name node is in safe mode.\nTurn it off.\n\tat org.apache.A\n\tat java.B\n";
        assert_eq!(without_trace(message), "Cannot create file. Name node is in safe mode.\nTurn it off.");
        assert_eq!(without_trace("denied"), "denied");
    }
}
