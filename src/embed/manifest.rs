//! Manifests: the truth about which versions of a table exist.

use super::EmbedError;
use crate::{
    ids::{Fingerprint, RunId, Version},
    storage::{Location, Storage},
};

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

/// Names of the tables of a store.
pub async fn list_tables(storage: &Storage, store: &Location) -> Result<Vec<String>, EmbedError> {
    let _ = (storage, store);
    unimplemented!()
}

/// All versions of a table, the latest last.
pub async fn list_manifests(storage: &Storage, store: &Location, table: &str) -> Result<Vec<Manifest>, EmbedError> {
    let _ = (storage, store, table);
    unimplemented!()
}

/// The latest version of a table.
pub async fn latest_manifest(storage: &Storage, store: &Location, table: &str) -> Result<Option<Manifest>, EmbedError> {
    let _ = (storage, store, table);
    unimplemented!()
}

/// One version of a table.
pub async fn read_manifest(
    storage: &Storage,
    store: &Location,
    table: &str,
    version: Version,
) -> Result<Option<Manifest>, EmbedError> {
    let _ = (storage, store, table, version);
    unimplemented!()
}
