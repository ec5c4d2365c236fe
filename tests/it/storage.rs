//! The storage conformance suite, on every store that can be had here.

use std::{path::Path, process::Command};

use emberflow::{
    config::SiteConfig,
    remedy::{Remedied, Remedy},
    storage::{Location, Storage, StorageError},
};

fn location(text: &str) -> Location {
    Location::parse(text, Path::new("/")).unwrap()
}

fn storage() -> Storage {
    Storage::new(&SiteConfig::default())
}

/// What every store must do, below an empty folder.
pub(crate) async fn conformance(storage: &Storage, root: &Location) {
    created_once(storage, &root.join("races")).await;
    replaced_and_read(storage, &root.join("files")).await;
    listed(storage, &root.join("lists")).await;
    folders_renamed_and_removed(storage, &root.join("folders")).await;
    odd_names(storage, &root.join("odd")).await;
    storage.check_writable(&root.join("new/folder")).await.unwrap();
    storage.remove(root).await.unwrap();
    assert!(storage.children(root).await.unwrap().is_empty());
}

async fn created_once(storage: &Storage, folder: &Location) {
    let file = folder.join("one");
    let racers = (0..16u8).map(|i| {
        let (storage, file) = (storage.clone(), file.clone());
        tokio::spawn(async move { (i, storage.create(&file, vec![i; 1000].into()).await) })
    });
    let mut winners = Vec::new();
    for racer in racers.collect::<Vec<_>>() {
        match racer.await.unwrap() {
            (i, Ok(())) => winners.push(i),
            (_, Err(StorageError::AlreadyExists(_))) => {}
            (_, Err(error)) => panic!("{error}: {error:?}"),
        }
    }
    assert_eq!(winners.len(), 1);
    assert_eq!(storage.read(&file).await.unwrap(), vec![winners[0]; 1000]);
    assert_eq!(storage.children(folder).await.unwrap(), ["one"]);
}

async fn replaced_and_read(storage: &Storage, folder: &Location) {
    let file = folder.join("a/b.json");
    assert!(matches!(storage.read(&file).await, Err(StorageError::NotFound(_))));
    assert_eq!(storage.head(&file).await.unwrap(), None);
    storage.replace(&file, "one".into()).await.unwrap();
    storage.replace(&file, "three".into()).await.unwrap();
    assert_eq!(storage.read(&file).await.unwrap(), "three");
    let entry = storage.head(&file).await.unwrap().unwrap();
    assert_eq!((entry.location, entry.size_bytes), (file.clone(), 5));
    assert!(entry.modified_ms > 1_500_000_000_000);
    storage.replace(&file, "".into()).await.unwrap();
    assert_eq!(storage.read(&file).await.unwrap(), "");
}

async fn listed(storage: &Storage, folder: &Location) {
    let data = ["a.parquet", "day=1/b.parquet", "day=2/c.parquet", "plain/d.parquet"];
    for name in data.iter().chain(&["_SUCCESS", ".a.parquet.crc", "_temporary/0/e.parquet", "f.tmp"]) {
        storage.replace(&folder.join(name), "x".into()).await.unwrap();
    }
    let names = |files: Vec<emberflow::storage::FileEntry>| -> Vec<String> {
        files.iter().map(|file| file.location.path()[folder.path().len() + 1..].to_owned()).collect()
    };
    assert_eq!(names(storage.list(folder).await.unwrap()), data);
    assert_eq!(names(storage.list(&folder.join("day=*")).await.unwrap()), &data[1..3]);
    assert_eq!(names(storage.list(&folder.join("*.parquet")).await.unwrap()), &data[..1]);
    assert_eq!(names(storage.list(&folder.join("a.parquet")).await.unwrap()), &data[..1]);
    for missing in ["none", "none/*.parquet", "*.csv"] {
        let error = storage.list(&folder.join(missing)).await.unwrap_err();
        assert!(matches!(error, StorageError::NotFound(_)), "{missing}: {error}");
    }
    let children = storage.children(folder).await.unwrap();
    assert_eq!(children, [".a.parquet.crc", "_SUCCESS", "_temporary", "a.parquet", "day=1", "day=2", "f.tmp", "plain"]);
}

async fn folders_renamed_and_removed(storage: &Storage, folder: &Location) {
    let (from, to) = (folder.join("from"), folder.join("new/to"));
    for name in ["a", "b/c"] {
        storage.replace(&from.join(name), name.into()).await.unwrap();
    }
    storage.rename_folder(&from, &to).await.unwrap();
    assert_eq!(storage.read(&to.join("b/c")).await.unwrap(), "b/c");
    assert!(storage.children(&from).await.unwrap().is_empty());
    storage.replace(&from.join("a"), "again".into()).await.unwrap();
    let error = storage.rename_folder(&from, &to).await.unwrap_err();
    assert!(matches!(error, StorageError::AlreadyExists(_)), "{error:?}");
    assert_eq!(storage.read(&to.join("a")).await.unwrap(), "a");
    storage.remove(&to).await.unwrap();
    storage.remove(&to).await.unwrap();
    storage.remove(&from.join("a")).await.unwrap();
    assert_eq!(storage.head(&to.join("a")).await.unwrap(), None);
    assert_eq!(storage.head(&from.join("a")).await.unwrap(), None);
}

async fn odd_names(storage: &Storage, folder: &Location) {
    for name in ["with blank", "per%20cent", "a=b+c", "größe", "#hash", "semi;colon&and"] {
        let file = folder.join(name).join("file.parquet");
        storage.create(&file, name.to_owned().into()).await.unwrap();
        let found = storage.list(&folder.join(name)).await.unwrap();
        assert_eq!(found.len(), 1, "{name}");
        assert_eq!(found[0].location, file);
        assert_eq!(storage.read(&found[0].location).await.unwrap(), name);
    }
}

#[tokio::test]
async fn local_files_conform() {
    let folder = tempfile::tempdir().unwrap();
    conformance(&storage(), &location(folder.path().to_str().unwrap())).await;
}

#[tokio::test]
async fn memory_conforms() {
    conformance(&storage(), &location("memory:///root")).await;
}

/// Each start of a run probes the store and clears away the probes of killed ones.
#[tokio::test]
async fn probes_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let root = location(folder.path().to_str().unwrap());
    let starts = (0..16).map(|_| {
        let root = root.clone();
        tokio::spawn(async move {
            for _ in 0..10 {
                storage().check_writable(&root).await.unwrap();
            }
        })
    });
    for start in starts.collect::<Vec<_>>() {
        start.await.unwrap();
    }
    assert_eq!(storage().children(&root).await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn an_empty_local_folder_has_no_files() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(storage().list(&location(folder.path().to_str().unwrap())).await.unwrap(), []);
}

#[tokio::test]
async fn a_file_in_the_way_of_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let target = location(folder.path().to_str().unwrap()).join("file/below");
    let error = storage().check_writable(&target).await.unwrap_err();
    assert_eq!(error.remedy(), Remedy::FixTarget, "{error:?}");
}

/// Needs the right to mount; where that is missing the test says so and ends.
#[tokio::test]
async fn a_full_disk_is_told_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(folder.path()).status();
    if !mount.is_ok_and(|status| status.success()) {
        eprintln!("not checked: this user may not mount a small file system");
        return;
    }
    let root = location(folder.path().to_str().unwrap());
    let error = storage().replace(&root.join("a"), vec![0; 1 << 20].into()).await;
    let left = storage().children(&root).await;
    assert!(Command::new("umount").arg("-l").arg(folder.path()).status().unwrap().success());
    assert!(matches!(error, Err(StorageError::NoSpace { .. })), "{error:?}");
    assert_eq!(left.unwrap(), Vec::<String>::new());
}

#[test]
fn a_build_without_s3_says_so() {
    if cfg!(not(feature = "s3")) {
        let error = storage().open(&location("s3://bucket/a")).unwrap_err();
        assert!(error.to_string().contains("--features s3"), "{error}");
    }
}
