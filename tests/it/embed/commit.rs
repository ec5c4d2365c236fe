//! Versions of a table: counted, published once, kept and removed.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use emberflow::{
    config::SiteConfig,
    embed::{
        EmbedError, Manifest, ManifestFile, Written, check_target, commit, latest_manifest, list_manifests,
        list_tables, prune, read_manifest,
    },
    ids::{Attempt, Fingerprint, RunId, Version},
    pipeline::{EmbeddingPlan, spec::VectorEncoding},
    remedy::{Remedied, Remedy},
    runs::{RunRecord, RunStatus, run_folder, write_run},
    storage::{Location, Storage},
};

/// A store with a table `t`.
struct Target {
    _folder: tempfile::TempDir,
    storage: Storage,
    store: Location,
    plan: EmbeddingPlan,
}

/// One in a folder and one in memory.
fn targets() -> [Target; 2] {
    ["out", "memory:///out"].map(|store| {
        let folder = tempfile::tempdir().unwrap();
        let plan = EmbeddingPlan {
            name: "t".into(),
            model: "m".into(),
            from: "rows".into(),
            key: vec!["id".into()],
            columns: Vec::new(),
            reconstruction_error: false,
            encoding: VectorEncoding::List,
            keep_versions: 3,
        };
        let store = Location::parse(store, folder.path()).unwrap();
        Target { storage: Storage::new(&SiteConfig::default()), store, plan, _folder: folder }
    })
}

fn run(name: &str) -> RunId {
    RunId::new(name).unwrap()
}

impl Target {
    /// Files as if an attempt of that run had just written them.
    async fn written(&self, run_id: &str, content: &str) -> Written {
        let staging = run_folder(&self.store, &run(run_id)).join("work/embed/t");
        let name = "part-00000.parquet".to_owned();
        let content = Bytes::from(content.to_owned());
        let file = ManifestFile { name: name.clone(), rows: 7, size_bytes: content.len() as u64 };
        self.storage.replace(&staging.join(&name), content.clone()).await.unwrap();
        Written { staging, files: vec![file], rows: 7, latent: 2, digest: format!("{content:?}") }
    }

    async fn commit(&self, run_id: &str) -> Result<Manifest, EmbedError> {
        self.commit_as(run_id, "a pipeline", &format!("rows of {run_id}")).await
    }

    async fn commit_as(&self, run_id: &str, pipeline: &str, content: &str) -> Result<Manifest, EmbedError> {
        let written = self.written(run_id, content).await;
        let fingerprint = Fingerprint("f".into());
        commit(&self.storage, &self.store, &self.plan, pipeline, &run(run_id), &fingerprint, written).await
    }

    async fn prune(&self, run_id: &str, keep: u32) {
        prune(&self.storage, &self.store, "t", &run(run_id), keep).await.unwrap();
    }

    fn table(&self) -> Location {
        self.store.join("embeddings/t")
    }

    /// Names below the table's folder: its versions' folders and manifests.
    async fn tree(&self) -> Vec<String> {
        let mut names = self.storage.children(&self.table()).await.unwrap();
        names.retain(|name| name != "_manifests");
        let manifests = self.storage.children(&self.table().join("_manifests")).await.unwrap();
        names.extend(manifests);
        names
    }

    /// Takes a version's manifest away: what a kill before its creation leaves.
    async fn unpublish(&self, version: u64) {
        self.storage.remove(&self.table().join(&format!("_manifests/{version:06}.json"))).await.unwrap();
    }

    async fn read(&self, name: &str) -> Option<Bytes> {
        self.storage.read(&self.table().join(name)).await.ok()
    }

    /// Writes a run's record of that status.
    async fn record(&self, run_id: &str, status: RunStatus) {
        let record = RunRecord {
            format: 1,
            run_id: run(run_id),
            pipeline: "a pipeline".into(),
            file: "a.yaml".into(),
            spec_hash: String::new(),
            params: BTreeMap::new(),
            code_version: String::new(),
            host: String::new(),
            attempt: Attempt(1),
            status,
            started_ms: 0,
            ended_ms: None,
            executors: 1,
            device: "cpu".into(),
            seed: 42,
            sources: BTreeMap::new(),
            models: Vec::new(),
            embeddings: Vec::new(),
            ledgers: Vec::new(),
            decisions: Vec::new(),
            metrics: BTreeMap::new(),
            error: None,
        };
        write_run(&self.storage, &self.store, &record).await.unwrap();
    }
}

#[tokio::test]
async fn versions_count_up_and_say_whose_they_are() {
    for target in targets() {
        assert_eq!(latest_manifest(&target.storage, &target.store, "t").await.unwrap(), None);
        for (number, run_id) in (1..).zip(["a", "b", "c"]) {
            let manifest = target.commit(run_id).await.unwrap();
            let folder = format!("v{number:06}");
            assert_eq!((manifest.version, &manifest.folder), (Version(number), &folder));
            assert_eq!((manifest.run_id.as_str(), manifest.rows, manifest.latent), (run_id, 7, 2));
            assert_eq!((manifest.table.as_str(), manifest.model.as_str(), &manifest.key), ("t", "m", &target.plan.key));
            let file = manifest.file_location(&target.store, &manifest.files[0]);
            assert_eq!(target.storage.read(&file).await.unwrap(), format!("rows of {run_id}"));
            assert_eq!(target.read(&format!("{folder}/_SUCCESS")).await, Some(Bytes::new()));
            let staging = run_folder(&target.store, &run(run_id)).join("work/embed");
            assert!(target.storage.children(&staging).await.unwrap().is_empty(), "it was moved, not copied");
            assert_eq!(latest_manifest(&target.storage, &target.store, "t").await.unwrap(), Some(manifest));
        }
        let all = list_manifests(&target.storage, &target.store, "t").await.unwrap();
        assert_eq!(all.iter().map(|manifest| manifest.version.0).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(list_tables(&target.storage, &target.store).await.unwrap(), ["t"]);
        // Readers take the Parquet files alone for data.
        if target.store.scheme() == "file" {
            let data = target.storage.list(&target.table().join("v000001")).await.unwrap();
            assert_eq!(data.len(), 1);
        }
    }
}

#[tokio::test]
async fn a_run_commits_once() {
    for target in targets() {
        let first = target.commit("a").await.unwrap();
        target.commit("b").await.unwrap();
        assert_eq!(target.commit("a").await.unwrap(), first);
        assert_eq!(target.tree().await, ["v000001", "v000002", "000001.json", "000002.json"]);
        let staging = run_folder(&target.store, &run("a")).join("work/embed");
        assert!(target.storage.children(&staging).await.unwrap().is_empty());
        // Begun anew with other columns of the same model, it is another version; and so it is when
        // the first ones come back.
        assert_eq!(target.commit_as("a", "a pipeline", "More of a").await.unwrap().version, Version(3));
        assert_eq!(target.commit("a").await.unwrap().version, Version(4));
    }
}

#[tokio::test]
async fn old_versions_go() {
    for target in targets() {
        for number in 1..=5 {
            target.commit(&format!("r{number}")).await.unwrap();
            target.prune(&format!("r{number}"), 3).await;
        }
        let kept = ["v000003", "v000004", "v000005", "000003.json", "000004.json", "000005.json"];
        assert_eq!(target.tree().await, kept);
        target.prune("r5", 1).await;
        assert_eq!(target.tree().await, ["v000005", "000005.json"]);
        target.prune("r5", 0).await;
        assert_eq!(target.tree().await, ["v000005", "000005.json"], "the latest stays, come what may");
        assert_eq!(read_manifest(&target.storage, &target.store, "t", Version(1)).await.unwrap(), None);
        // Numbers are not used again.
        assert_eq!(target.commit("r6").await.unwrap().version, Version(6));
    }
}

#[tokio::test]
async fn leftovers_go_with_their_run_and_with_no_other() {
    for target in targets() {
        // Killed between the move and the manifest.
        target.commit("a").await.unwrap();
        target.unpublish(1).await;
        // A folder that says nothing of its owner, and one that lies.
        let stray = [("v000002/part-00000.parquet", "x"), ("v000003/_run.json", "{")];
        for (name, content) in stray {
            target.storage.replace(&target.table().join(name), content.into()).await.unwrap();
        }
        for status in [None, Some(RunStatus::Running), Some(RunStatus::Failed), Some(RunStatus::Interrupted)] {
            if let Some(status) = status {
                target.record("a", status).await;
            }
            target.prune("b", 3).await;
            assert_eq!(target.tree().await, ["v000001", "v000002", "v000003"], "{status:?}");
        }
        assert_eq!(target.commit("b").await.unwrap().version, Version(4), "it takes none of theirs");
        assert_eq!(target.read("v000001/part-00000.parquet").await.unwrap(), "rows of a");

        // The next attempt of the same run.
        let manifest = target.commit("a").await.unwrap();
        assert_eq!(manifest.version, Version(5));
        assert_eq!(target.tree().await[..4], ["v000002", "v000003", "v000004", "v000005"]);

        // What a run left that has ended well is nobody's: a pruning that was killed.
        target.unpublish(5).await;
        target.record("a", RunStatus::Succeeded).await;
        target.prune("b", 3).await;
        assert_eq!(target.tree().await, ["v000002", "v000003", "v000004", "000004.json"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn runs_at_the_same_time_get_a_version_each() {
    let [target, _] = targets();
    let target = std::sync::Arc::new(target);
    let mut racers = tokio::task::JoinSet::new();
    for number in 0..12 {
        let target = std::sync::Arc::clone(&target);
        racers.spawn(async move { target.commit(&format!("r{number}")).await.unwrap() });
    }
    let manifests = racers.join_all().await;
    let versions: BTreeSet<u64> = manifests.iter().map(|manifest| manifest.version.0).collect();
    assert_eq!(versions, (1..=12).collect());
    for manifest in &manifests {
        let file = manifest.file_location(&target.store, &manifest.files[0]);
        let content = target.storage.read(&file).await.unwrap();
        assert_eq!(content, format!("rows of {}", manifest.run_id));
        assert_eq!(
            read_manifest(&target.storage, &target.store, "t", manifest.version).await.unwrap().as_ref(),
            Some(manifest)
        );
    }
}

#[tokio::test]
async fn a_table_belongs_to_one_pipeline() {
    for target in targets() {
        target.commit("a").await.unwrap();
        let check = |result: Result<(), EmbedError>| {
            let error = result.unwrap_err();
            assert_eq!(error.remedy(), Remedy::FixFile);
            let text = error.to_string();
            assert!(text.contains("written by pipeline \"a pipeline\", not by \"another\""), "{text}");
        };
        check(check_target(&target.storage, &target.store, "t", "another").await);
        check(target.commit_as("b", "another", "rows of b").await.map(drop));
        assert_eq!(target.tree().await, ["v000001", "000001.json"]);
        check_target(&target.storage, &target.store, "t", "a pipeline").await.unwrap();
        check_target(&target.storage, &target.store, "new", "another").await.unwrap();
    }
}

#[tokio::test]
async fn a_manifest_that_cannot_be_read_is_named() {
    for target in targets() {
        target.commit("a").await.unwrap();
        let location = target.table().join("_manifests/000001.json");
        let good = target.storage.read(&location).await.unwrap();
        let newer = String::from_utf8(good.to_vec()).unwrap().replace("\"format\": 1", "\"format\": 2");
        for (content, reason) in [("{", "cannot be read"), ("{\"format\": 1}", "cannot be read"), (&newer, "newer")] {
            target.storage.replace(&location, content.to_owned().into()).await.unwrap();
            let error = latest_manifest(&target.storage, &target.store, "t").await.unwrap_err();
            let text = error.to_string();
            assert!(text.contains("000001.json") && text.contains(reason), "{text}");
            assert_eq!(error.remedy(), Remedy::CheckStorage);
            assert!(target.commit("b").await.is_err(), "nothing is published over it");
        }
        target.storage.replace(&location, good).await.unwrap();
        assert_eq!(target.commit("b").await.unwrap().version, Version(2));
    }
}
