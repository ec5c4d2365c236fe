//! Publishing a version: files first, by renaming their folder; the manifest last.
//!
//! ```text
//!   1. staging/_run.json, staging/_SUCCESS     whose files these are
//!   2. rename staging to v000007/              fails if the folder is there: take the next number
//!   3. create _manifests/000007.json           fails if it is there; readers see the version now
//! ```
//!
//! Where a rename is not atomic (object stores), two runs may move into one folder; one of them
//! publishes it, and the other is told to start again.
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
    /// Of the files, so that an attempt knows what an earlier one committed.
    #[serde(default)]
    digest: String,
}

/// Publishes what was written as the next version and gives its manifest. If the last version
/// that this run committed holds the same files, that one is given back and nothing changes: an
/// earlier attempt got so far. Other files come of a run that was begun anew, with `--fresh`.
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
    if let Some(done) = committed(storage, store, &plan.name, run_id, &written.digest).await? {
        storage.remove(&written.staging).await?;
        return Ok(done);
    }
    remove_leftovers(storage, store, &plan.name, run_id).await?;
    let marker = serde_json::json!({ "run_id": run_id, "digest": written.digest }).to_string();
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

/// The last version that this run committed, if its files have this digest.
async fn committed(
    storage: &Storage,
    store: &Location,
    table: &str,
    run_id: &RunId,
    digest: &str,
) -> Result<Option<Manifest>, EmbedError> {
    let manifests = list_manifests(storage, store, table).await?;
    let Some(last) = manifests.into_iter().rfind(|manifest| manifest.run_id == *run_id) else { return Ok(None) };
    let folder = table_folder(store, table).join(&last.folder);
    let marker = read_marker(storage, &folder).await?;
    Ok(marker.is_some_and(|marker| marker.digest == digest).then_some(last))
}

/// What a version's folder says of its owner, if anything.
async fn read_marker(storage: &Storage, folder: &Location) -> Result<Option<Marker>, EmbedError> {
    match storage.read(&folder.join(MARKER)).await {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(StorageError::NotFound(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
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
                // The folder is theirs now; it must stay.
                Some(there) => {
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
    let Some(Marker { run_id: owner, .. }) = read_marker(storage, folder).await? else { return Ok(false) };
    // A record that cannot be read proves nothing.
    let succeeded = |run: runs::RunRecord| run.status == RunStatus::Succeeded;
    let finished = async || runs::read_run(storage, store, &owner).await.ok().flatten().is_some_and(succeeded);
    Ok(owner == *run_id || finished().await)
}
