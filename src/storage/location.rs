//! Places, written one way.

use std::{
    fmt,
    path::{Component, Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::StorageError;

/// A file, folder or glob, as an absolute URL: `file:///a/b`, `hdfs://nn:9000/a`, `s3://bucket/a`,
/// `memory:///a`. Equal places have equal text; it never ends with `/`. Characters stand as
/// they are in names, not percent-encoded.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Location(String);

impl Location {
    /// A path or URL; a relative path counts from `base` (an absolute local folder).
    pub fn parse(text: &str, base: &Path) -> Result<Self, StorageError> {
        let bad = |reason: &str| StorageError::BadLocation { text: text.to_owned(), reason: reason.to_owned() };
        if text.is_empty() {
            return Err(bad("it is empty"));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(Self(format!("file://{}", normal(&base.join(text)).ok_or_else(|| bad("it leaves the root"))?)));
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let path = normal(&Path::new("/").join(path)).ok_or_else(|| bad("it leaves the root"))?;
        let path = if path == "/" { "" } else { &path };
        match scheme {
            "file" if authority.is_empty() || authority == "localhost" => Ok(Self(format!("file://{path}"))),
            "file" => Err(bad("a file URL has three slashes: file:///folder/file")),
            "memory" => Ok(Self(format!("memory://{path}"))),
            "hdfs" | "viewfs" => Ok(Self(format!("{scheme}://{}{path}", authority.to_lowercase()))),
            "s3" | "s3a" | "s3n" if authority.is_empty() => Err(bad("it names no bucket: s3://bucket/folder")),
            "s3" | "s3a" | "s3n" => Ok(Self(format!("s3://{authority}{path}"))),
            _ => Err(bad("its scheme is none of file, hdfs, s3")),
        }
    }

    /// A child; `name` may have several segments.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        Self(format!("{}/{}", self.0, name.trim_matches('/')))
    }

    /// The last segment.
    pub fn name(&self) -> &str {
        self.path().rsplit('/').next().unwrap_or_default()
    }

    /// The URL.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// `file`, `hdfs`, `s3`...
    pub fn scheme(&self) -> &str {
        self.0.split("://").next().unwrap_or_default()
    }

    /// What stands between scheme and path: `nn:9000`, a bucket, or nothing.
    pub fn authority(&self) -> &str {
        let rest = &self.0[self.scheme().len() + 3..];
        &rest[..rest.find('/').unwrap_or(rest.len())]
    }

    /// The path, without its leading `/`.
    pub fn path(&self) -> &str {
        self.0[self.root().len()..].trim_start_matches('/')
    }

    /// Scheme and authority: what tells stores apart.
    pub fn root(&self) -> &str {
        &self.0[..self.scheme().len() + 3 + self.authority().len()]
    }

    /// The same store, another path.
    #[must_use]
    pub fn with_path(&self, path: &str) -> Self {
        Self(format!("{}/{}", self.root(), path.trim_matches('/')))
    }

    /// The local path, of a `file:` location.
    pub fn local_path(&self) -> Option<PathBuf> {
        let path = self.0.strip_prefix("file://")?;
        Some(PathBuf::from(if path.is_empty() { "/" } else { path }))
    }

    /// Whether `*`, `?`, `[` or `{` stands in the path.
    pub fn is_glob(&self) -> bool {
        self.path().contains(['*', '?', '[', '{'])
    }
}

impl fmt::Display for Location {
    /// A local location prints as its path, any other as its URL.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.strip_prefix("file://").unwrap_or(&self.0))
    }
}

/// `.` and `..` resolved by text alone, double and trailing slashes gone; `None` above the root.
fn normal(path: &Path) -> Option<String> {
    let mut segments: Vec<String> = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => segments.push(name.to_string_lossy().into_owned()),
            Component::ParentDir => drop(segments.pop()?),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    Some(format!("/{}", segments.join("/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_written_one_way() {
        let check = |text: &str, expected: &str| {
            let location = Location::parse(text, Path::new("/base")).unwrap();
            assert_eq!(location.as_str(), expected, "{text}");
            assert_eq!(location, location.with_path(location.path()), "{text}");
        };
        check("a/b", "file:///base/a/b");
        check("../a/./b/", "file:///a/b");
        check("/a//b", "file:///a/b");
        check("file:///a/b/", "file:///a/b");
        check("hdfs://NN:9000/a/", "hdfs://nn:9000/a");
        check("hdfs:///a", "hdfs:///a");
        check("s3a://bucket/a=1/b c%", "s3://bucket/a=1/b c%");
        check("memory:///x/*.parquet", "memory:///x/*.parquet");
    }

    #[test]
    fn bad_places_are_refused() {
        for text in ["", "../../..", "ftp://a/b", "file://host/a", "s3:///a"] {
            assert!(Location::parse(text, Path::new("/base")).is_err(), "{text}");
        }
    }

    #[test]
    fn parts() {
        let location = Location::parse("hdfs://nn:9000/a/b.parquet", Path::new("/")).unwrap();
        assert_eq!((location.scheme(), location.authority(), location.path()), ("hdfs", "nn:9000", "a/b.parquet"));
        assert_eq!((location.root(), location.name()), ("hdfs://nn:9000", "b.parquet"));
        assert_eq!(location.join("c").as_str(), "hdfs://nn:9000/a/b.parquet/c");
    }
}
