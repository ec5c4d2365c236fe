//! Publishing a version: files first, by renaming their folder; the manifest last.
//!
//! ```text
//!   1. staging/_run.json, staging/_SUCCESS     whose files these are
//!   2. rename staging to v000007/              fails if the folder is there: take the next number
//!   3. create _manifests/000007.json           fails if it is there; readers see the version now
//! ```
//!
//! A run that is killed between 2 and 3 leaves a folder that no manifest names and whose
//! `_run.json` names the run; the next attempt removes it. Two runs at once take two numbers.

use serde::{Deserialize, Serialize};

use super::{
    EmbedError, Written,
    manifest::{
        FORMAT, Manifest, folder_version, latest_manifest, list_manifests, manifest_location, read_manifest,
        table_folder, version_folder, versions,
    },
};
use crate::{
    ids::{Fingerprint, RunId, Version},
    limits,
    pipeline::EmbeddingPlan,
    runs::{self, RunStatus},
    storage::{Location, Storage, StorageError},
};

/// Tells, within a version's folder, whose files it holds.
const MARKER: &str = "_run.json";

/// Content of the marker.
#[derive(Serialize, Deserialize)]
struct Marker {
    run_id: RunId,
}

/// Publishes what was written as the next version and gives its manifest. If this run has
/// already committed a version of the table, that one is given back and nothing changes.
pub async fn commit(
    storage: &Storage,
    store: &Location,
    plan: &EmbeddingPlan,
    pipeline: &str,
    run_id: &RunId,
    fingerprint: &Fingerprint,
    written: Written,
) -> Result<Manifest, EmbedError> {
    check_target(storage, store, &plan.name, pipeline).await?;
    let manifests = list_manifests(storage, store, &plan.name).await?;
    let mine = |manifest: &&Manifest| manifest.run_id == *run_id && manifest.fingerprint == *fingerprint;
    if let Some(done) = manifests.iter().rfind(mine) {
        storage.remove(&written.staging).await?;
        return Ok(done.clone());
    }
    remove_leftovers(storage, store, &plan.name, run_id).await?;
    let marker = serde_json::json!({ "run_id": run_id }).to_string();
    storage.replace(&written.staging.join(MARKER), marker.into()).await?;
    storage.replace(&written.staging.join("_SUCCESS"), bytes::Bytes::new()).await?;
    let version = move_in(storage, store, &plan.name, &written.staging).await?;
    let manifest = Manifest {
        format: FORMAT,
        table: plan.name.clone(),
        version,
        pipeline: pipeline.to_owned(),
        run_id: run_id.clone(),
        model: plan.model.clone(),
        fingerprint: fingerprint.clone(),
        latent: written.latent,
        key: plan.key.clone(),
        rows: written.rows,
        folder: version_folder(version),
        files: written.files,
        committed_ms: chrono::Utc::now().timestamp_millis(),
    };
    publish(storage, store, &manifest).await?;
    Ok(manifest)
}

/// Renames the staged folder to that of the next free version.
async fn move_in(storage: &Storage, store: &Location, table: &str, staging: &Location) -> Result<Version, EmbedError> {
    let folder = table_folder(store, table);
    let by_manifest = versions(storage, store, table).await?.last().copied();
    let by_folder = storage.children(&folder).await?.iter().filter_map(|name| folder_version(name)).max();
    let highest = by_manifest.max(by_folder).unwrap_or_default();
    for version in (highest.0 + 1..).take(limits::VERSIONS_TRIED as usize).map(Version) {
        match storage.rename_folder(staging, &folder.join(&version_folder(version))).await {
            Ok(()) => return Ok(version),
            // Another run took the number since we looked.
            Err(StorageError::AlreadyExists(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(EmbedError::NoFreeVersion { location: folder, tried: limits::VERSIONS_TRIED })
}

/// Makes the version visible.
async fn publish(storage: &Storage, store: &Location, manifest: &Manifest) -> Result<(), EmbedError> {
    let location = manifest_location(store, &manifest.table, manifest.version);
    let bytes = serde_json::to_vec_pretty(manifest)
        .map_err(|source| EmbedError::BadManifest { location: location.clone(), source })?;
    match storage.create(&location, bytes.into()).await {
        Ok(()) => Ok(()),
        Err(StorageError::AlreadyExists(at)) => {
            let there = read_manifest(storage, store, &manifest.table, manifest.version).await?;
            match there {
                // Ours, by a create that was tried twice.
                Some(there) if there == *manifest => Ok(()),
                Some(there) => {
                    storage.remove(&table_folder(store, &manifest.table).join(&manifest.folder)).await?;
                    let (table, version) = (there.table, there.version);
                    Err(EmbedError::Conflict { table, version, other: there.run_id })
                }
                None => Err(StorageError::AlreadyExists(at).into()),
            }
        }
        // Whether it took effect is unknown: the folder stays, and the next attempt finds out.
        Err(error) => Err(error.into()),
    }
}

/// Fails if the table belongs to another pipeline. Called before the first step.
pub async fn check_target(storage: &Storage, store: &Location, table: &str, pipeline: &str) -> Result<(), EmbedError> {
    match latest_manifest(storage, store, table).await? {
        Some(latest) if latest.pipeline != pipeline => Err(EmbedError::OtherPipeline {
            table: table.to_owned(),
            location: table_folder(store, table),
            owner: latest.pipeline,
            pipeline: pipeline.to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Removes versions beyond the newest `keep`, manifest first, and version folders without a
/// manifest that this run or a finished run left behind. The folder of another run that may
/// still be at work is never touched.
pub async fn prune(
    storage: &Storage,
    store: &Location,
    table: &str,
    run_id: &RunId,
    keep: u32,
) -> Result<(), EmbedError> {
    let versions = versions(storage, store, table).await?;
    let old = versions.len().saturating_sub(keep.max(1) as usize);
    for version in &versions[..old] {
        storage.remove(&manifest_location(store, table, *version)).await?;
        storage.remove(&table_folder(store, table).join(&version_folder(*version))).await?;
    }
    remove_leftovers(storage, store, table, run_id).await
}

async fn remove_leftovers(storage: &Storage, store: &Location, table: &str, run_id: &RunId) -> Result<(), EmbedError> {
    let folder = table_folder(store, table);
    // Folders first: one whose manifest comes in between is then seen to have it.
    let names = storage.children(&folder).await?;
    let published = versions(storage, store, table).await?;
    for name in names {
        let unpublished = folder_version(&name).is_some_and(|version| !published.contains(&version));
        if unpublished && is_dead(storage, store, run_id, &folder.join(&name)).await? {
            storage.remove(&folder.join(&name)).await?;
        }
    }
    Ok(())
}

/// Whether a folder without a manifest will never get one: it is this run's own, from an
/// earlier attempt, or that of a run that has succeeded (a pruned version).
async fn is_dead(storage: &Storage, store: &Location, run_id: &RunId, folder: &Location) -> Result<bool, EmbedError> {
    let bytes = match storage.read(&folder.join(MARKER)).await {
        Ok(bytes) => bytes,
        Err(StorageError::NotFound(_)) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    let Ok(Marker { run_id: owner }) = serde_json::from_slice(&bytes) else { return Ok(false) };
    // A record that cannot be read proves nothing.
    let succeeded = |run: runs::RunRecord| run.status == RunStatus::Succeeded;
    let finished = async || runs::read_run(storage, store, &owner).await.ok().flatten().is_some_and(succeeded);
    Ok(owner == *run_id || finished().await)
}
