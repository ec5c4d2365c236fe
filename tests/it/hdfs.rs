//! The product on a real HDFS.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use emberflow::{
    config::SiteConfig,
    remedy::{Remedied, Remedy},
    storage::{Location, Storage, StorageError},
};
use futures::TryStreamExt;
use object_store::{ObjectStoreExt, WriteMultipart, path::Path as ObjectPath};

use crate::{
    command::{Answer, command, pipelines},
    hdfs_cluster::{Cluster, shared},
    run::{losses, run_mnist},
    storage::conformance,
};

fn location(text: &str) -> Location {
    Location::parse(text, Path::new("/")).unwrap()
}

#[tokio::test]
async fn hdfs_conforms() {
    let cluster = shared();
    let storage = Storage::new(&cluster.config());
    conformance(&storage, &location(&cluster.url).join("conformance")).await;
    // Without an authority the configuration names the file system.
    storage.replace(&location("hdfs:///default/a"), "x".into()).await.unwrap();
    assert_eq!(storage.read(&location(&cluster.url).join("default/a")).await.unwrap(), "x");
}

/// More than one block, written in parts and read in ranges.
#[tokio::test]
async fn large_files_are_written_and_read_back() {
    let cluster = shared();
    let (store, _) = Storage::new(&cluster.config()).open(&location(&cluster.url)).unwrap();
    let path = ObjectPath::from("large/file");
    let content: Vec<u8> = (0..20_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut upload = WriteMultipart::new(store.put_multipart(&path).await.unwrap());
    for chunk in content.chunks(3_000_000) {
        upload.write(chunk);
    }
    upload.finish().await.unwrap();
    assert!(store.get(&path).await.unwrap().bytes().await.unwrap() == content);
    let ranges = [0..10, 8_388_600..8_388_620, 19_999_990..20_000_000];
    for (range, got) in ranges.iter().zip(store.get_ranges(&path, &ranges).await.unwrap()) {
        assert_eq!(got, content[range.start as usize..range.end as usize]);
    }
    // An upload that is given up leaves nothing that counts.
    let mut upload = store.put_multipart(&ObjectPath::from("large/given-up")).await.unwrap();
    upload.put_part("x".into()).await.unwrap();
    upload.abort().await.unwrap();
    let names: Vec<_> = store.list(Some(&ObjectPath::from("large"))).try_collect().await.unwrap();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[tokio::test]
async fn other_users_are_kept_out() {
    let cluster = shared();
    let own = location(&cluster.url).join("private");
    Storage::new(&cluster.config()).replace(&own.join("a"), "x".into()).await.unwrap();
    let stranger = SiteConfig { hadoop_user: Some("stranger".to_owned()), ..cluster.config() };
    let error = Storage::new(&stranger).check_writable(&own).await.unwrap_err();
    assert_eq!(error.remedy(), Remedy::AskPermission, "{error:?}");
}

#[tokio::test]
async fn quotas_are_told_as_such() {
    let cluster = shared();
    let folder = location(&cluster.url).join("small");
    let storage = Storage::new(&cluster.config());
    storage.replace(&folder.join("a"), "x".into()).await.unwrap();
    cluster.tell("admin -setSpaceQuota 1m /small");
    let error = storage.replace(&folder.join("b"), vec![0; 4 << 20].into()).await.unwrap_err();
    assert!(matches!(error, StorageError::NoSpace { .. }), "{error:?}");
}

/// Parts of this cluster are paused and killed, in the order of the worst last.
#[tokio::test]
async fn failing_nodes() {
    let cluster = Cluster::start();
    let storage = Storage::new(&cluster.config());
    let file = location(&cluster.url).join("folder/file");
    let content = vec![7; 9 << 20];
    storage.replace(&file, content.clone().into()).await.unwrap();

    cluster.tell("admin -safemode enter");
    let error = storage.create(&file.join("x"), "x".into()).await.unwrap_err();
    assert!(matches!(error, StorageError::SafeMode { .. }), "{error:?}");
    assert_eq!(storage.read(&file).await.unwrap(), content);
    let mnist = pipelines().join("mnist.yaml").display().to_string();
    let run = ["run", &mnist, "--param", &format!("out={}/out", cluster.url), "--param", "epochs=1"];
    let refused = on_hdfs(&cluster, &run).expect(75);
    assert!(refused.stderr.contains("safe mode"), "{}", refused.stderr);
    cluster.tell("admin -safemode leave");
    on_hdfs(&cluster, &run).expect(0);

    cluster.tell("pause datanode 0");
    assert_eq!(storage.read(&file).await.unwrap(), content, "a frozen DataNode is given up for the other");
    cluster.tell("resume datanode 0");

    cluster.tell("kill datanode 0");
    assert_eq!(storage.read(&file).await.unwrap(), content, "the other replica is read");

    cluster.tell("pause namenode");
    let started = Instant::now();
    let error = Storage::new(&cluster.config()).children(&file).await.unwrap_err();
    assert_eq!(error.remedy(), Remedy::TryAgain, "{error:?}");
    assert!(started.elapsed() < Duration::from_secs(100), "{:?}", started.elapsed());
    cluster.tell("resume namenode");

    cluster.tell("kill namenode");
    let error = Storage::new(&cluster.config()).read(&file).await.unwrap_err();
    assert!(matches!(error, StorageError::Unreachable { .. }), "{error:?}");
    assert!(error.to_string().contains("127.0.0.1"), "{error}");
}

fn on_hdfs(cluster: &Cluster, args: &[&str]) -> Answer {
    command(args).env("HADOOP_CONF_DIR", &cluster.conf).output().unwrap().into()
}

/// The same file on local files and on HDFS: the same losses, and embeddings that SQL, pyarrow
/// and pandas read.
#[test]
fn the_mnist_pipeline_runs_on_hdfs() {
    let cluster = shared();
    let local = tempfile::tempdir().unwrap();
    let local_out = local.path().display().to_string();
    run_mnist(&local_out, &["--param", "epochs=2"]).expect(0);

    let data = pipelines().join("data/mnist-t10k.parquet");
    let target = location(&cluster.url).join("mnist/digits.parquet");
    let storage = Storage::new(&cluster.config());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(storage.replace(&target, std::fs::read(data).unwrap().into())).unwrap();

    let file = pipelines().join("mnist.yaml").display().to_string();
    let (input, out) = (format!("data={target}"), format!("{}/embeddings", cluster.url));
    let out_param = format!("out={out}");
    let args = ["run", &file, "--param", &input, "--param", &out_param, "--param", "epochs=2", "--output", "json"];
    let result = on_hdfs(cluster, &args).expect(0).result();
    assert_eq!(result["embeddings"][0]["rows"], 10_000);
    assert_eq!(on_hdfs(cluster, &args).expect(0).result()["status"], "unchanged");

    let sql = |query: &str| on_hdfs(cluster, &["sql", "--db", &out, query, "--format", "csv"]).expect(0).stdout;
    let epochs = sql("SELECT loss FROM epochs ORDER BY epoch");
    let hdfs_losses: Vec<f64> = epochs.lines().skip(1).map(|line| line.parse().unwrap()).collect();
    assert_eq!(hdfs_losses, losses(&local_out));
    assert_eq!(sql("SELECT count(*) AS n FROM digit_embeddings"), "n\n10000\n");
    assert_eq!(sql("SELECT count(*) AS n FROM digits WHERE label = 7"), "n\n1028\n");

    let copy = local.path().join("copy");
    let folder = location(result["embeddings"][0]["location"].as_str().unwrap());
    runtime.block_on(download(&storage, &folder, &copy));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/readers.py");
    let python = std::env::var("EMBERFLOW_TEST_PYTHON").expect("EMBERFLOW_TEST_PYTHON names a Python with pyarrow");
    let read = Command::new(python).arg(script).arg(&copy).args(["10000", "32"]).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
}

async fn download(storage: &Storage, folder: &Location, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for file in storage.list(folder).await.unwrap() {
        std::fs::write(to.join(file.location.name()), storage.read(&file.location).await.unwrap()).unwrap();
    }
}
