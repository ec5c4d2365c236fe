//! Deadlines and retries around any store: nothing waits for ever, and what can be tried again
//! without harm is.

use std::{fmt, ops::Range, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart, path::Path,
};
use tokio::time::timeout;

use super::{StorageError, error::Elapsed};
use crate::limits;

/// A store whose every call ends in time.
#[derive(Debug)]
pub(super) struct Bounded<S> {
    inner: Arc<S>,
}

impl<S: ObjectStore> Bounded<S> {
    pub(super) fn new(inner: Arc<S>) -> Self {
        Self { inner }
    }

    /// Tries a call that changes nothing until it succeeds, fails for good, or has been tried
    /// often enough.
    async fn retried<T, F: Future<Output = Result<T>>>(&self, call: impl Fn() -> F) -> Result<T> {
        let mut wait = limits::STORAGE_BACKOFF;
        for _ in 1..limits::STORAGE_ATTEMPTS {
            match in_time(call()).await {
                Err(error) if StorageError::classify(&error).is_some_and(super::error::Kind::is_transient) => {}
                result => return result,
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
        }
        in_time(call()).await
    }
}

/// Waits for a call, but not for ever.
async fn in_time<T>(call: impl Future<Output = Result<T>>) -> Result<T> {
    timeout(limits::STORAGE_CALL, call).await.unwrap_or_else(|_| Err(late()))
}

fn late() -> object_store::Error {
    object_store::Error::Generic { store: "deadline", source: Elapsed(limits::STORAGE_CALL).into() }
}

/// Waits for each item of a stream, but not for ever. The stream may be polled after its end,
/// as readers of empty objects do.
fn items_in_time<T: Send + 'static>(stream: BoxStream<'static, Result<T>>) -> BoxStream<'static, Result<T>> {
    futures::stream::unfold(Some(stream), |stream| async {
        let mut stream = stream?;
        match timeout(limits::STORAGE_CALL, stream.next()).await {
            Ok(item) => Some((item?, Some(stream))),
            Err(_) => Some((Err(late()), None)),
        }
    })
    .fuse()
    .boxed()
}

#[async_trait]
impl<S: ObjectStore> ObjectStore for Bounded<S> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        in_time(self.inner.put_opts(location, payload, opts)).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let upload = in_time(self.inner.put_multipart_opts(location, opts)).await?;
        Ok(Box::new(BoundedUpload(upload)))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let result = self.retried(|| self.inner.get_opts(location, options.clone())).await?;
        let payload = match result.payload {
            GetResultPayload::Stream(stream) => GetResultPayload::Stream(items_in_time(stream)),
            file @ GetResultPayload::File(..) => file,
        };
        Ok(GetResult { payload, ..result })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.retried(|| self.inner.get_ranges(location, ranges)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        items_in_time(self.inner.delete_stream(locations))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        items_in_time(self.inner.list(prefix))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.retried(|| self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        in_time(self.inner.copy_opts(from, to, options)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        in_time(self.inner.rename_opts(from, to, options)).await
    }
}

impl<S: fmt::Display> fmt::Display for Bounded<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// An upload whose every part ends in time.
#[derive(Debug)]
struct BoundedUpload(Box<dyn MultipartUpload>);

#[async_trait]
impl MultipartUpload for BoundedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        Box::pin(in_time(self.0.put_part(data)))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        in_time(self.0.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        in_time(self.0.abort()).await
    }
}

#[cfg(test)]
mod tests {
    use object_store::{ObjectStoreExt, memory::InMemory};

    use super::*;

    #[tokio::test]
    async fn streams_may_be_polled_after_their_end() {
        for items in [vec![], vec![1], vec![1, 2]] {
            let mut stream = items_in_time(futures::stream::iter(items.clone()).map(Ok).boxed());
            for item in items {
                assert_eq!(stream.next().await.unwrap().unwrap(), item);
            }
            assert!(stream.next().await.is_none());
            assert!(stream.next().await.is_none());
        }
    }

    #[tokio::test]
    async fn an_empty_object_is_read() {
        let store = Bounded::new(Arc::new(InMemory::new()));
        let path = Path::from("empty");
        store.put(&path, PutPayload::new()).await.unwrap();
        assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), "");
    }
}
