//! Manifests: the truth about which versions of a table exist.

use super::EmbedError;
use crate::{
    ids::{Fingerprint, RunId, Version},
    storage::{Location, Storage, StorageError},
};

/// The manifest format that this code writes, and the newest that it reads.
pub(super) const FORMAT: u32 = 1;

/// One committed version of an embedding table.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Manifest {
    /// Version of this format; 1.
    pub format: u32,
    /// The table.
    pub table: String,
    /// The version.
    pub version: Version,
    /// The pipeline that wrote it.
    pub pipeline: String,
    /// The run that wrote it.
    pub run_id: RunId,
    /// The model's name.
    pub model: String,
    /// The model's fingerprint.
    pub fingerprint: Fingerprint,
    /// Width of the embedding.
    pub latent: u64,
    /// Key columns.
    pub key: Vec<String>,
    /// Rows of all files.
    pub rows: u64,
    /// Folder of the version, relative to the table's: `v000007`.
    pub folder: String,
    /// Its files.
    pub files: Vec<ManifestFile>,
    /// Commit time, milliseconds since 1970 UTC.
    pub committed_ms: i64,
}

/// One file of a version.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ManifestFile {
    /// Name within the folder.
    pub name: String,
    /// Its rows.
    pub rows: u64,
    /// Its length.
    pub size_bytes: u64,
}

impl Manifest {
    /// Where a file of the version is.
    pub fn file_location(&self, store: &Location, file: &ManifestFile) -> Location {
        table_folder(store, &self.table).join(&format!("{}/{}", self.folder, file.name))
    }
}

/// `<store>/embeddings/<table>`.
pub(super) fn table_folder(store: &Location, table: &str) -> Location {
    store.join(&format!("embeddings/{table}"))
}

/// `<store>/embeddings/<table>/_manifests/000007.json`.
pub(super) fn manifest_location(store: &Location, table: &str, version: Version) -> Location {
    table_folder(store, table).join(&format!("_manifests/{:06}.json", version.0))
}

/// `v000007`.
pub(super) fn version_folder(version: Version) -> String {
    format!("v{:06}", version.0)
}

/// The version of a folder named `v000007`.
pub(super) fn folder_version(name: &str) -> Option<Version> {
    number(name.strip_prefix('v')?)
}

/// A version as it stands in names: digits, at least six.
fn number(text: &str) -> Option<Version> {
    let digits = text.len() >= 6 && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok().map(Version)).flatten()
}

/// Names of the tables of a store.
pub async fn list_tables(storage: &Storage, store: &Location) -> Result<Vec<String>, EmbedError> {
    let mut tables = Vec::new();
    for table in storage.children(&store.join("embeddings")).await? {
        if !versions(storage, store, &table).await?.is_empty() {
            tables.push(table);
        }
    }
    Ok(tables)
}

/// All versions of a table, the latest last.
pub async fn list_manifests(storage: &Storage, store: &Location, table: &str) -> Result<Vec<Manifest>, EmbedError> {
    let mut manifests = Vec::new();
    for version in versions(storage, store, table).await? {
        // One that has just been pruned is none.
        manifests.extend(read_manifest(storage, store, table, version).await?);
    }
    Ok(manifests)
}

/// The latest version of a table.
pub async fn latest_manifest(storage: &Storage, store: &Location, table: &str) -> Result<Option<Manifest>, EmbedError> {
    for version in versions(storage, store, table).await?.into_iter().rev() {
        if let Some(manifest) = read_manifest(storage, store, table, version).await? {
            return Ok(Some(manifest));
        }
    }
    Ok(None)
}

/// One version of a table.
pub async fn read_manifest(
    storage: &Storage,
    store: &Location,
    table: &str,
    version: Version,
) -> Result<Option<Manifest>, EmbedError> {
    #[derive(serde::Deserialize)]
    struct Format {
        format: u32,
    }
    let location = manifest_location(store, table, version);
    let bytes = match storage.read(&location).await {
        Ok(bytes) => bytes,
        Err(StorageError::NotFound(_)) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let bad = |source| EmbedError::BadManifest { location: location.clone(), source };
    // A newer format may have other fields; say so rather than that one is missing.
    let Format { format } = serde_json::from_slice(&bytes).map_err(bad)?;
    if format > FORMAT {
        return Err(EmbedError::NewManifest { location, format });
    }
    serde_json::from_slice(&bytes).map(Some).map_err(bad)
}

/// The versions that have a manifest, in ascending order.
pub(super) async fn versions(storage: &Storage, store: &Location, table: &str) -> Result<Vec<Version>, EmbedError> {
    let names = storage.children(&table_folder(store, table).join("_manifests")).await?;
    let mut versions: Vec<_> = names.iter().filter_map(|name| number(name.strip_suffix(".json")?)).collect();
    versions.sort();
    Ok(versions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_in_names() {
        let check =
            |name: &str, expected: Option<u64>| assert_eq!(folder_version(name), expected.map(Version), "{name}");
        check("v000007", Some(7));
        check("v1234567", Some(1_234_567));
        check("v7", None);
        check("v00000x", None);
        check("000007", None);
        check("_manifests", None);
        assert_eq!(folder_version(&version_folder(Version(42))), Some(Version(42)));
    }
}
