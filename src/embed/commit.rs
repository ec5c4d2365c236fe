//! Publishing a version: files first, by renaming their folder; the manifest last.

use super::{EmbedError, Written, manifest::Manifest};
use crate::{
    ids::{Fingerprint, RunId},
    pipeline::EmbeddingPlan,
    storage::{Location, Storage},
};

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
    let _ = (storage, store, plan, pipeline, run_id, fingerprint, written);
    unimplemented!()
}

/// Fails if the table belongs to another pipeline. Called before the first step.
pub async fn check_target(storage: &Storage, store: &Location, table: &str, pipeline: &str) -> Result<(), EmbedError> {
    let _ = (storage, store, table, pipeline);
    unimplemented!()
}

/// Removes versions beyond the newest `keep`, manifest first, and version folders of this run
/// that no manifest names (left by a killed commit).
pub async fn prune(
    storage: &Storage,
    store: &Location,
    table: &str,
    run_id: &RunId,
    keep: u32,
) -> Result<(), EmbedError> {
    let _ = (storage, store, table, run_id, keep);
    unimplemented!()
}
