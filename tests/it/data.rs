//! Integration tests of `data`: files as they really are.

use std::{error::Error, io::Write, path::Path, sync::Arc};

use arrow::{
    array::{ArrayRef, AsArray, Float32Array, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray},
    compute::concat_batches,
    datatypes::{DataType, Int32Type, Int64Type},
    util::pretty::pretty_format_batches,
};
use emberflow::{
    config::SiteConfig,
    data::{self, DataError, Dataset, Engine, Needs, Snapshot, Split},
    ids::PartitionId,
    pipeline::{PartitionPlan, PipelinePlan, spec::PartitionBy},
    remedy::{Remedied, Remedy},
    storage::{Location, Storage},
};
use futures::TryStreamExt;
use parquet::{arrow::ArrowWriter, file::properties::WriterProperties};

use crate::command::write_parquet;

/// A folder with `rows/` and a pipeline file over it.
struct World {
    folder: tempfile::TempDir,
    storage: Storage,
    plan: PipelinePlan,
}

impl World {
    /// `source` is YAML added to the source `rows`, `transforms` YAML of its own section.
    fn new(source: &str, transforms: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("rows")).unwrap();
        let file = folder.path().join("pipeline.yaml");
        let transforms = if transforms.is_empty() { String::new() } else { format!("transforms:\n{transforms}\n") };
        let text = format!(
            "version: 1\nname: test\nstore: out\nrun: {{ memory: 64MiB }}\nsources:\n  rows: {{ path: rows{source} }}\n\
             {transforms}models:\n  tiny:\n    from: rows\n    features: [{{ column: x }}]\n    latent: 1\n"
        );
        std::fs::write(&file, text).unwrap();
        let plan = PipelinePlan::read(&file, &[], folder.path()).unwrap();
        Self { folder, storage: Storage::new(&SiteConfig::default()), plan }
    }

    fn rows(&self) -> std::path::PathBuf {
        self.folder.path().join("rows")
    }

    fn put(&self, name: &str, columns: Vec<(&str, ArrayRef)>) {
        write_parquet(&self.rows().join(name), columns);
    }

    fn write(&self, name: &str, content: &[u8]) {
        let path = self.rows().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    async fn snapshot(&self) -> Result<Snapshot, DataError> {
        Snapshot::take(&self.storage, &self.plan).await
    }

    async fn engine(&self) -> Result<Engine, DataError> {
        Engine::open(&self.storage, &self.plan, &self.snapshot().await?).await
    }

    /// The rows of a query as a table of text.
    async fn query(&self, sql: &str) -> Result<String, DataError> {
        let engine = self.engine().await?;
        let batches = async { engine.session().sql(sql).await?.collect().await }.await;
        let batches = batches.map_err(|error| DataError::query("test", error))?;
        Ok(pretty_format_batches(&batches).unwrap().to_string())
    }

    async fn prepare(&self, table: &str, needs: &Needs, staging: &str) -> Result<Arc<Dataset>, DataError> {
        let staging = Location::parse(staging, self.folder.path()).unwrap();
        let engine = self.engine().await?;
        Ok(Arc::new(data::prepare(&self.storage, &self.plan, &engine, table, needs, &staging).await?))
    }

    async fn read(
        &self,
        dataset: &Arc<Dataset>,
        splits: Vec<Split>,
        columns: &[&str],
    ) -> Result<Vec<data::Rows>, DataError> {
        let columns: Vec<String> = columns.iter().map(|&name| name.to_owned()).collect();
        data::read(&self.storage, dataset, splits, &columns).try_collect().await
    }

    /// All rows of a data set as one batch.
    async fn all(&self, dataset: &Arc<Dataset>, columns: &[&str]) -> RecordBatch {
        let rows = self.read(dataset, data::all_splits(dataset), columns).await.unwrap();
        let batches: Vec<RecordBatch> = rows.into_iter().map(|rows| rows.batch).collect();
        concat_batches(&batches.first().unwrap().schema(), &batches).unwrap()
    }
}

fn ints(values: impl IntoIterator<Item = i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(values))
}

fn needs(columns: &[&str]) -> Needs {
    Needs { columns: columns.iter().map(|&name| name.to_owned()).collect(), ..Needs::default() }
}

fn hash(columns: &[&str], count: u32) -> PartitionPlan {
    let columns = columns.iter().map(|&name| name.to_owned()).collect();
    PartitionPlan { by: PartitionBy::Hash, columns, count, choose: false }
}

/// The error with its causes.
fn told(error: &DataError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Fails unless the error names all of `named` and has that remedy.
fn expect<T>(result: Result<T, DataError>, remedy: Remedy, named: &[&str]) {
    let Err(error) = result else { panic!("no error that names {named:?}") };
    let text = told(&error);
    for name in named {
        assert!(text.contains(name), "{name} is not named: {text}");
    }
    assert_eq!(error.remedy(), remedy, "{text}");
}

fn truncate(path: &Path) {
    let whole = std::fs::read(path).unwrap();
    std::fs::write(path, &whole[..whole.len() / 2]).unwrap();
}

#[tokio::test]
async fn a_missing_path_and_an_empty_folder() {
    let world = World::new("", "");
    assert_eq!(world.snapshot().await.unwrap().sources["rows"], []);
    expect(world.engine().await, Remedy::FixData, &["source `rows`", "no data files"]);
    std::fs::remove_dir(world.rows()).unwrap();
    expect(world.snapshot().await, Remedy::FixData, &["source `rows`", "no such file or folder"]);
}

#[tokio::test]
async fn hidden_and_temporary_files_are_not_data() {
    let world = World::new("", "");
    world.put("a.parquet", vec![("x", ints(0..3))]);
    for name in ["_SUCCESS", ".a.parquet.crc", "_temporary/0/b.parquet", ".hive-staging_1/c.parquet"] {
        world.write(name, b"not data");
    }
    let snapshot = world.snapshot().await.unwrap();
    let names: Vec<_> = snapshot.sources["rows"].iter().map(|file| file.location.name()).collect();
    assert_eq!(names, ["a.parquet"]);
    snapshot.verify(&world.storage).await.unwrap();
}

#[tokio::test]
async fn formats_are_told_by_names() {
    let world = World::new("", "");
    world.put("a.parquet", vec![("x", ints(0..3))]);
    world.write("b.csv", b"x\n1\n");
    expect(world.snapshot().await, Remedy::FixData, &["a.parquet", "b.csv", "different formats"]);
    std::fs::remove_file(world.rows().join("a.parquet")).unwrap();
    world.write("part-0", b"x\n1\n");
    expect(world.snapshot().await, Remedy::FixFile, &["part-0", "sources.rows.format"]);
    let declared = World::new(", format: csv", "");
    declared.write("part-0", b"x\n1\n");
    declared.write("part-1", b"x\n2\n");
    assert!(declared.query("SELECT sum(x) AS s FROM rows").await.unwrap().contains("| 3 |"));
}

#[tokio::test]
async fn files_that_are_not_whole() {
    for (name, content) in [("b.parquet", &b""[..]), ("b.parquet", b"PAR1"), ("b.parquet", b"no parquet at all")] {
        let world = World::new("", "");
        world.put("a.parquet", vec![("x", ints(0..3))]);
        world.write(name, content);
        expect(world.engine().await, Remedy::FixData, &["b.parquet"]);
    }
    let world = World::new("", "");
    world.put("b.parquet", vec![("x", ints(0..1000))]);
    truncate(&world.rows().join("b.parquet"));
    expect(world.engine().await, Remedy::FixData, &["b.parquet", "truncated"]);
    let world = World::new("", "");
    for content in [&b""[..], b"ARROW1", b"not an arrow file at all"] {
        world.write("b.arrow", content);
        expect(world.engine().await, Remedy::FixData, &["b.arrow"]);
    }
}

#[tokio::test]
async fn files_that_change_under_the_run() {
    let world = World::new("", "  doubled: { sql: \"SELECT x * 2 AS x FROM rows\" }");
    world.put("a.parquet", vec![("x", ints(0..3))]);
    world.put("b.parquet", vec![("x", ints(3..6))]);
    let snapshot = world.snapshot().await.unwrap();
    let engine = Engine::open(&world.storage, &world.plan, &snapshot).await.unwrap();
    let staging = Location::parse("staging", world.folder.path()).unwrap();
    let prepare = async |table| {
        data::prepare(&world.storage, &world.plan, &engine, table, &needs(&["x"]), &staging).await.map(Arc::new)
    };
    let dataset = prepare("rows").await.unwrap();
    world.put("b.parquet", vec![("x", ints(0..300))]);
    let read = world.read(&dataset, data::all_splits(&dataset), &["x"]).await;
    expect(read, Remedy::FixData, &["b.parquet", "changed under the run"]);
    expect(prepare("doubled").await, Remedy::FixData, &["b.parquet", "changed under the run"]);
    expect(snapshot.verify(&world.storage).await, Remedy::FixData, &["b.parquet", "changed"]);
    std::fs::remove_file(world.rows().join("b.parquet")).unwrap();
    let read = world.read(&dataset, data::all_splits(&dataset), &["x"]).await;
    expect(read, Remedy::FixData, &["b.parquet", "gone"]);
    expect(snapshot.verify(&world.storage).await, Remedy::FixData, &["b.parquet", "gone"]);
    // Nothing half-written is left behind.
    assert_eq!(std::fs::read_dir(world.folder.path().join("staging")).map_or(0, Iterator::count), 0);
}

#[tokio::test]
async fn columns_drift_between_files() {
    let world = World::new("", "");
    let float: ArrayRef = Arc::new(Float32Array::from(vec![0.5]));
    let int: ArrayRef = Arc::new(Int32Array::from(vec![1]));
    world.put("a.parquet", vec![("x", int.clone()), ("y", int.clone())]);
    world.put("b.parquet", vec![("z", ints([7])), ("x", ints([1 << 40])), ("y", float)]);
    world.put("c.parquet", vec![("x", int)]);
    let rows = world.query("SELECT * FROM rows ORDER BY x, y").await.unwrap();
    insta::assert_snapshot!(rows, @r"
    +---------------+-----+---+
    | x             | y   | z |
    +---------------+-----+---+
    | 1             | 1.0 |   |
    | 1             |     |   |
    | 1099511627776 | 0.5 | 7 |
    +---------------+-----+---+
    ");
    // Files of different types are staged in one type.
    let dataset = world.prepare("rows", &needs(&["y", "x"]), "staging").await.unwrap();
    assert_eq!(dataset.rows(), 3);
    assert_eq!(dataset.schema.field(0).data_type(), &DataType::Float64);
    world.put("d.parquet", vec![("x", Arc::new(StringArray::from(vec!["one"])))]);
    let error = world.engine().await;
    expect(error, Remedy::FixData, &["column `x`", "Int32", "a.parquet", "Utf8", "d.parquet", "sources.rows.columns"]);
}

#[tokio::test]
async fn folders_are_columns() {
    let world = World::new("", "");
    world.put("ds=2026-12-01/h=7/a.parquet", vec![("x", ints([1]))]);
    world.put("ds=2026-12-02/h=__HIVE_DEFAULT_PARTITION__/a.parquet", vec![("x", ints([2]))]);
    let rows = world.query("SELECT x, ds, h FROM rows WHERE ds >= '2026-12-01' ORDER BY x").await.unwrap();
    insta::assert_snapshot!(rows, @r"
    +---+------------+---+
    | x | ds         | h |
    +---+------------+---+
    | 1 | 2026-12-01 | 7 |
    | 2 | 2026-12-02 |   |
    +---+------------+---+
    ");
    let dataset = world.prepare("rows", &needs(&["h", "x"]), "staging").await.unwrap();
    assert_eq!(world.all(&dataset, &["x"]).await.column(0).as_primitive::<Int64Type>().values(), &[1, 2]);
    world.put("b.parquet", vec![("x", ints([2]))]);
    expect(world.engine().await, Remedy::FixData, &["[ds, h]", "[]", "b.parquet"]);
}

#[tokio::test]
async fn csv_as_it_really_is() {
    let world = World::new(", csv: { delimiter: \";\", null: \"N/A\" }", "");
    world.write("a.csv", b"\xef\xbb\xbfId;x;Name\n1;0.5;\"a;b\nc\"\n2;N/A;\n");
    let mut zipped = flate2_gz(b"x;Id;extra\n7;3;2026-12-01\n");
    world.write("b.csv.gz", &zipped);
    world.write("c.csv", b"");
    let rows = world.query("SELECT Id, x, Name, extra FROM rows ORDER BY Id").await.unwrap();
    insta::assert_snapshot!(rows, @r"
    +----+-----+------+------------+
    | Id | x   | Name | extra      |
    +----+-----+------+------------+
    | 1  | 0.5 | a;b  |            |
    |    |     | c    |            |
    | 2  |     |      |            |
    | 3  | 7.0 |      | 2026-12-01 |
    +----+-----+------+------------+
    ");
    zipped.truncate(zipped.len() / 2);
    world.write("b.csv.gz", &zipped);
    expect(world.engine().await, Remedy::FixData, &["b.csv.gz"]);
}

/// gzip through the program, for no compressor is among the dependencies of the tests.
fn flate2_gz(content: &[u8]) -> Vec<u8> {
    let mut gzip = std::process::Command::new("gzip")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    gzip.stdin.take().unwrap().write_all(content).unwrap();
    gzip.wait_with_output().unwrap().stdout
}

#[tokio::test]
async fn a_csv_guess_that_a_later_line_belies() {
    let lines: Vec<_> = (0..20_000).map(|row| format!("{row},{row}")).collect();
    let text = format!("id,x\n{}\n20000,0.5\n", lines.join("\n"));
    let world = World::new("", "");
    world.write("a.csv", text.as_bytes());
    let summed = world.query("SELECT sum(x) AS s FROM rows").await;
    expect(summed, Remedy::FixData, &["a.csv, line 20002", "column `x`", "`0.5`", "Int64", "sources.rows.columns"]);
    let declared = World::new(", columns: { x: DOUBLE, id: VARCHAR }", "");
    declared.write("a.csv", text.as_bytes());
    let summed = declared.query("SELECT sum(x) AS s, max(length(id)) AS l FROM rows").await.unwrap();
    assert!(summed.contains("199990000.5") && summed.contains("| 5 |"), "{summed}");
}

#[tokio::test]
async fn csv_lines_that_do_not_fit() {
    let world = World::new("", "");
    world.write("a.csv", b"id,x\n1,2\n3\n");
    expect(world.query("SELECT * FROM rows").await, Remedy::FixData, &["a.csv, line 3"]);
    world.write("a.csv", b"id,x,id\n1,2,3\n");
    expect(world.query("SELECT * FROM rows").await, Remedy::FixData, &["a.csv", "two columns", "`id`"]);
}

#[tokio::test]
async fn arrow_files() {
    let world = World::new("", "");
    let write = |name: &str, columns: Vec<(&str, ArrayRef)>| {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let file = std::fs::File::create(world.rows().join(name)).unwrap();
        let mut writer = arrow::ipc::writer::FileWriter::try_new(file, &batch.schema()).unwrap();
        writer.write(&batch).unwrap();
        writer.write(&batch).unwrap();
        writer.finish().unwrap();
    };
    let dictionary: arrow::array::DictionaryArray<Int32Type> = ["a", "b", "a"].into_iter().collect();
    write("a.arrow", vec![("x", ints(0..3)), ("d", Arc::new(dictionary))]);
    write("b.arrow", vec![("x", Arc::new(Float64Array::from(vec![0.5])) as ArrayRef)]);
    let rows = world.query("SELECT count(*) AS n, sum(x) AS s, count(d) AS d FROM rows").await.unwrap();
    insta::assert_snapshot!(rows, @r"
    +---+-----+---+
    | n | s   | d |
    +---+-----+---+
    | 8 | 7.0 | 6 |
    +---+-----+---+
    ");
    let dataset = world.prepare("rows", &needs(&["x"]), "staging").await.unwrap();
    let read = world.all(&dataset, &["x"]).await;
    assert_eq!(read.column(0).as_ref(), &Float64Array::from(vec![0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.5, 0.5]));
}

#[tokio::test]
async fn a_thousand_small_files() {
    let world = World::new("", "");
    for file in 0..1_000 {
        world.put(&format!("{file:04}.parquet"), vec![("x", ints([file]))]);
    }
    let dataset = world.prepare("rows", &needs(&["x"]), "staging").await.unwrap();
    assert_eq!(dataset.files.len(), 1_000);
    assert!(!world.folder.path().join("staging").exists(), "used where it lies");
    let read = world.all(&dataset, &["x"]).await;
    assert_eq!(read.column(0).as_primitive::<Int64Type>().values().to_vec(), (0..1_000).collect::<Vec<_>>());
}

#[tokio::test]
async fn parts_of_row_groups_are_read() {
    let world = World::new("", "");
    let batch = RecordBatch::try_from_iter([("y", ints(0..20_000)), ("x", ints(20_000..40_000))]).unwrap();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(15_000)).build();
    let file = std::fs::File::create(world.rows().join("a.parquet")).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let dataset = world.prepare("rows", &needs(&["x", "y"]), "staging").await.unwrap();
    assert_eq!(data::all_splits(&dataset)[1], Split { file: 0, row_group: 1, rows: 0..5_000, first_row: 15_000 });
    let splits = vec![
        Split { file: 0, row_group: 1, rows: 10..13, first_row: 15_010 },
        Split { file: 0, row_group: 0, rows: 100..9_000, first_row: 100 },
    ];
    let rows = world.read(&dataset, splits, &["x", "y"]).await.unwrap();
    let shape: Vec<_> = rows.iter().map(|rows| (rows.row, rows.row_in_file, rows.batch.num_rows())).collect();
    assert_eq!(shape, [(15_010, 15_010, 3), (100, 100, 8_192), (8_292, 8_292, 708)]);
    for rows in &rows {
        let columns: Vec<_> = rows.batch.columns().iter().map(AsArray::as_primitive::<Int64Type>).collect();
        assert_eq!(columns[1].value(0) as u64, rows.row);
        assert_eq!(columns[0].value(0) as u64, rows.row + 20_000);
    }
}

#[tokio::test]
async fn staging_twice_gives_the_same_rows() {
    let row_wise = "SELECT id, x + 1 AS x FROM rows WHERE id % 3 > 0";
    let joined = "SELECT a.x, sum(a.id) AS id FROM rows a JOIN rows b USING (id) GROUP BY a.x";
    let union = "SELECT x, count(*) AS id FROM (SELECT x FROM rows UNION ALL SELECT x + 1 FROM rows) GROUP BY x";
    for sql in [row_wise, joined, union] {
        let world = World::new("", &format!("  t: {{ sql: \"{sql}\" }}"));
        for file in 0..20 {
            let ids = file * 1_000..(file + 1) * 1_000;
            let x = ids.clone().map(|id| (id * 7_919) % 4_001);
            world.put(&format!("{file:02}.parquet"), vec![("id", ints(ids)), ("x", ints(x))]);
        }
        let first = world.prepare("t", &needs(&["x", "id"]), "one").await.unwrap();
        let second = world.prepare("t", &needs(&["x", "id"]), "two").await.unwrap();
        let shape = |dataset: &Dataset| dataset.files.iter().map(|file| file.row_groups.clone()).collect::<Vec<_>>();
        assert_eq!(shape(&first), shape(&second), "{sql}");
        assert_eq!(
            world.all(&first, &["x", "id"]).await,
            world.all(&second, &["id", "x"]).await.project(&[1, 0]).unwrap()
        );
        if sql == row_wise {
            let ids = world.all(&first, &["id"]).await;
            let expected: Vec<i64> = (0..20_000).filter(|id| id % 3 > 0).collect();
            assert_eq!(ids.column(0).as_primitive::<Int64Type>().values().to_vec(), expected);
        }
        // A later attempt finds what the first one wrote.
        let found = world.prepare("t", &needs(&["x", "id"]), "one").await.unwrap();
        let entries = |dataset: &Dataset| dataset.files.iter().map(|file| file.entry.clone()).collect::<Vec<_>>();
        assert_eq!(entries(&found), entries(&first));
    }
}

#[tokio::test]
async fn an_unfinished_attempt_leaves_nothing() {
    let world = World::new("", "  t: { sql: \"SELECT x FROM rows\" }");
    world.put("a.parquet", vec![("x", ints(0..3))]);
    let dataset = world.prepare("t", &needs(&["x"]), "staging").await.unwrap();
    let staged = dataset.files[0].entry.location.local_path().unwrap().parent().unwrap().to_owned();
    let aside = staged.with_file_name(format!("_{}.tmp", staged.file_name().unwrap().to_str().unwrap()));
    std::fs::rename(&staged, &aside).unwrap();
    std::fs::remove_file(aside.join("_counts.json")).unwrap();
    std::fs::write(aside.join("part-99999.parquet"), "half").unwrap();
    let again = world.prepare("t", &needs(&["x"]), "staging").await.unwrap();
    assert_eq!(again.rows(), 3);
    assert!(!aside.exists());
}

#[tokio::test]
async fn hash_deals_as_spark_does() {
    let world = World::new("", "");
    for file in 0..5 {
        world.put(&format!("{file}.parquet"), vec![("id", ints(file * 100..(file + 1) * 100)), ("x", ints(0..100))]);
    }
    for count in [1, 8, 300] {
        let need = Needs { hash: Some(hash(&["id"], count)), ..needs(&["x", "id"]) };
        let dataset = world.prepare("rows", &need, "staging").await.unwrap();
        assert_eq!(dataset.rows(), 500);
        let partitions: Vec<_> = dataset.files.iter().map(|file| file.partition).collect();
        assert_eq!(partitions, (0..count).map(|p| Some(PartitionId(p))).collect::<Vec<_>>());
        let sql = format!("SELECT id, pmod(spark_hash(id), {count}) AS p FROM rows ORDER BY p, id");
        let expected = async {
            world
                .engine()
                .await?
                .session()
                .sql(&sql)
                .await
                .unwrap()
                .collect()
                .await
                .map_err(|error| DataError::query("t", error))
        };
        let expected = expected.await.unwrap();
        let expected = concat_batches(&expected[0].schema(), &expected).unwrap();
        let rows = world.all(&dataset, &["id"]).await;
        // Within a partition the order is that of the input, here ascending.
        assert_eq!(rows.column(0), expected.column(0), "{count} partitions");
    }
}

#[tokio::test]
async fn rows_that_miss_a_value_are_rejected_and_counted() {
    let world = World::new("", "");
    let x: ArrayRef = Arc::new(Float64Array::from(vec![Some(1.0), None, Some(f64::NAN), Some(4.0), None]));
    let y: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), Some(2), None, None, None]));
    world.put("a.parquet", vec![("id", ints(0..5)), ("x", x), ("y", y)]);
    for hash in [None, Some(hash(&["id"], 2))] {
        let reject_missing = vec!["y".to_owned(), "x".to_owned()];
        let need = Needs { reject_missing, hash, ..needs(&["id", "x"]) };
        let dataset = world.prepare("rows", &need, "staging").await.unwrap();
        let counts: Vec<_> = dataset.rejected.iter().map(|(reason, count)| (reason.as_str(), *count)).collect();
        assert_eq!(counts, [("missing value in column x", 1), ("missing value in column y", 3)]);
        assert_eq!(dataset.schema.fields().len(), 2);
        assert_eq!(world.all(&dataset, &["id"]).await.column(0).as_primitive::<Int64Type>().values(), &[0]);
    }
    // Where the footers tell that nothing is missing, the files are used where they lie.
    let need = Needs { reject_missing: vec!["id".to_owned()], ..needs(&["id"]) };
    let dataset = world.prepare("rows", &need, "staging").await.unwrap();
    assert!(dataset.files[0].entry.location.as_str().ends_with("rows/a.parquet"));
}

#[tokio::test]
async fn large_row_groups_are_staged_in_smaller_ones() {
    let world = World::new("", "");
    world.put("a.parquet", vec![("x", ints(0..600_000))]);
    let dataset = world.prepare("rows", &needs(&["x"]), "staging").await.unwrap();
    assert_eq!(dataset.rows(), 600_000);
    let groups: Vec<_> = dataset.files.iter().flat_map(|file| file.row_groups.clone()).collect();
    assert!(groups.iter().all(|group| group.rows <= 65_536 && group.size_bytes <= 4 << 20), "{groups:?}");
}

#[tokio::test]
async fn unknown_columns_point_into_the_file() {
    let world = World::new("", "");
    world.put("a.parquet", vec![("xx", ints(0..3))]);
    let need = Needs { hash: Some(hash(&["id"], 2)), ..needs(&["x"]) };
    expect(world.prepare("rows", &need, "staging").await, Remedy::FixFile, &["`x`", "`xx`", "`id`", "pipeline.yaml:"]);
}

#[tokio::test]
async fn queries_that_cannot_be_planned_point_into_the_file() {
    let cases: [(&str, &[&str]); 6] = [
        ("SELECT xx, Pric FROM rows", &["no column `Pric`", "did you mean `Price`"]),
        ("SELECT Price, xx FROM rows", &["no column `xx`", "`x`"]),
        ("SELECT sqroot(x) FROM rows", &["sqroot"]),
        ("SELECT random() AS r FROM rows", &["random()", "spark_hash"]),
        ("SELECT x FROM rows WHERE Price > extract(year FROM now())", &["now()", "parameter"]),
        ("SELECT x, current_date AS d FROM rows", &["current_date()", "parameter"]),
    ];
    for (sql, named) in cases {
        let world = World::new("", &format!("  t: {{ sql: \"{sql}\" }}"));
        world.put("a.parquet", vec![("x", ints(0..3)), ("Price", ints(0..3))]);
        if sql.starts_with("SELECT xx") {
            world.put("a.parquet", vec![("xx", ints(0..3)), ("Price", ints(0..3))]);
        }
        expect(world.engine().await, Remedy::FixFile, &[&["pipeline.yaml:"][..], named].concat());
    }
}

#[tokio::test]
async fn a_query_that_fails_on_its_rows() {
    let world = World::new("", "  t: { sql: \"SELECT 1 / x AS x FROM rows\" }");
    world.put("a.parquet", vec![("x", ints(0..3))]);
    expect(world.prepare("t", &needs(&["x"]), "staging").await, Remedy::FixData, &["`t`", "Divide by zero"]);
}

#[tokio::test]
async fn damaged_pages_are_named_with_their_file() {
    let world = World::new("", "  t: { sql: \"SELECT x + 1 AS x FROM rows\" }");
    world.put("a.parquet", vec![("x", ints(0..3))]);
    world.put("b.parquet", vec![("x", ints(0..3_000))]);
    let mut whole = std::fs::read(world.rows().join("b.parquet")).unwrap();
    whole[4..400].fill(0xff);
    world.write("b.parquet", &whole);
    let dataset = world.prepare("rows", &needs(&["x"]), "staging").await.unwrap();
    let read = world.read(&dataset, data::all_splits(&dataset), &["x"]).await;
    expect(read, Remedy::FixData, &["b.parquet", "damaged"]);
    expect(world.prepare("t", &needs(&["x"]), "staging").await, Remedy::FixData, &["b.parquet"]);
}
