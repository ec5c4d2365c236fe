//! Integration tests of `query`.

mod small_store;

use std::{fs::File, path::Path};

use arrow::{array::AsArray, datatypes::Float64Type};
use small_store::{ROWS, Session, SmallStore, chain};

use crate::command::emberflow;

/// Every file of `tests/sql` against the store, each in a session of its own.
#[tokio::test]
async fn sql_logic() {
    let store = SmallStore::make();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sql");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 3);
    let mut faults = Vec::new();
    for file in files {
        let mut runner = sqllogictest::Runner::new(async || Ok(store.open(false).await));
        if let Err(error) = runner.run_file_async(&file).await {
            faults.push(error.to_string());
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[tokio::test]
async fn a_top_k_query_keeps_k_rows_and_agrees_with_plain_arithmetic() {
    let store = SmallStore::make();
    let session = store.open(false).await;
    for (function, plain) in [
        ("array_distance", distance as fn(&[f64], &[f64]) -> f64),
        ("cosine_distance", |a, b| 1.0 - dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()),
        ("negative_inner_product", |a, b| -dot(a, b)),
    ] {
        let sql = format!(
            "SELECT id, {function}(embedding, (SELECT embedding FROM vectors WHERE id = 3)) AS distance \
             FROM vectors ORDER BY distance LIMIT 10"
        );
        let plan = session.texts(&format!("EXPLAIN {sql}")).await.unwrap().concat().concat();
        assert!(plan.contains("SortExec: TopK(fetch=10)"), "{plan}");
        let batches = session.rows(&sql).await.unwrap();
        let column = |place: usize| batches.iter().map(move |batch| batch.column(place));
        let ids: Vec<i64> =
            column(0).flat_map(|c| c.as_primitive::<arrow::datatypes::Int64Type>().values()).copied().collect();
        let got: Vec<f64> = column(1).flat_map(|c| c.as_primitive::<Float64Type>().values()).copied().collect();
        let vectors = vectors(&session).await;
        let mut expected: Vec<f64> = vectors.iter().map(|vector| plain(vector, &vectors[3])).collect();
        for (id, got) in ids.iter().zip(&got) {
            assert!((got - expected[*id as usize]).abs() < 1e-9, "{function} of {id}: {got}");
        }
        expected.sort_by(f64::total_cmp);
        assert_eq!(got.len(), 10);
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-9, "{function}: {got} is not {expected}");
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

/// The vectors in the order of their ids.
async fn vectors(session: &Session) -> Vec<Vec<f64>> {
    let batches = session.rows("SELECT CAST(embedding AS DOUBLE[]) FROM vectors ORDER BY id").await.unwrap();
    let lists = batches.iter().flat_map(|batch| batch.column(0).as_list::<i32>().iter().flatten().collect::<Vec<_>>());
    let vectors: Vec<Vec<f64>> = lists.map(|list| list.as_primitive::<Float64Type>().values().to_vec()).collect();
    assert_eq!(vectors.len(), ROWS);
    vectors
}

/// What `mixed_models.slt` finds refused is answered where it is forced.
#[tokio::test]
async fn mixing_models_can_be_forced() {
    let store = SmallStore::make();
    let session = store.open(true).await;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sql/mixed_models.slt");
    let mut faults = Vec::new();
    for record in sqllogictest::parse_file::<sqllogictest::DefaultColumnType>(file).unwrap() {
        if let sqllogictest::Record::Query { sql, .. } = record
            && let Err(error) = session.rows(&sql).await
        {
            let error = chain(&error);
            // What DataFusion cannot do, it cannot do with any vectors.
            if !error.contains("This feature is not implemented") {
                faults.push(format!("{sql}\n{error}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}

/// Exit code and message of queries that cannot be answered.
#[test]
fn errors_tell_what_to_do() {
    let store = SmallStore::make();
    let mut faults = Vec::new();
    let mut check = |sql: &str, code: i32, told: &[&str]| {
        let answer = emberflow(&["sql", "--db", &store.db(), sql]);
        if answer.code != Some(code) || told.iter().any(|text| !answer.stderr.contains(text)) {
            faults.push(format!("{sql}: not {code} with {told:?}, but {answer:?}"));
        }
    };
    check("SELECT * FROM vector", 64, &["\"vector\"", "did you mean \"vectors\"?"]);
    check("SELECT * FROM vectors WHERE id IN (SELECT id FROM vectores)", 64, &["did you mean \"vectors\"?"]);
    check("SELECT * FROM nothing_like_it", 64, &["epochs", "labels", "others", "points", "run_metrics", "vectors"]);
    check("SELECT * FROM \"vectors@7\"", 64, &["vectors has no version 7", "1, 2"]);
    check("SELECT * FROM \"../x\"", 64, &["there is no table"]);
    check("SELECT ide FROM vectors", 64, &["ide", "Did you mean", "id"]);
    check("SELECT array_distanse(embedding, embedding) FROM vectors", 64, &["Did you mean 'array_distance'?"]);
    check("SELEC 1", 64, &["SELEC"]);
    check("DELETE FROM vectors", 64, &["DML not supported"]);
    check(
        "SELECT array_distance(v.embedding, w.embedding) FROM vectors v JOIN wides w ON v.id = w.id",
        64,
        &["--mix-models"],
    );
    check("SELECT array_distance(embedding, [1, 2, 3]) FROM vectors", 65, &["width 2 and 3"]);
    check("SELECT array_distance(embedding, [1, 2, 3]) FROM others", 65, &["width 2 and 3"]);
    check("SELECT array_distance(label, label) FROM vectors", 64, &["lists of numbers"]);
    check("SELECT 1 / (id - id) FROM vectors", 65, &["ivide by zero"]);
    check("SELECT CAST(label AS INT) FROM labels", 65, &["red"]);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// A file that is not what was published is named, and only those who read it notice.
#[test]
fn a_broken_table_breaks_no_other() {
    let store = SmallStore::make();
    let file = store.version("vectors", 2).join("part-00000.parquet");
    let whole = std::fs::read(&file).unwrap();
    let query = |sql: &str, code: i32| emberflow(&["sql", "--db", &store.db(), sql]).expect(code).stderr;
    let check = |told: &[&str]| {
        let error = query("SELECT sum(v.embedding[1]), max(label) FROM vectors AS v JOIN others USING (id)", 65);
        for text in told.iter().chain(&["part-00000.parquet", "vectors"]) {
            assert!(error.contains(text), "{text:?} is not in\n{error}");
        }
        for sql in
            ["SELECT count(*) FROM others", "SELECT * FROM \"vectors@1\"", "SELECT * FROM runs", "SELECT * FROM points"]
        {
            query(sql, 0);
        }
    };
    std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    check(&["version 2", "bytes", "published"]);
    // Of the right length, but damaged: at the end the footer, in the middle the rows.
    let mut damaged = whole.clone();
    damaged[whole.len() - 1] ^= 0xff;
    std::fs::write(&file, &damaged).unwrap();
    check(&["cannot be read as Parquet"]);
    let mut damaged = whole.clone();
    damaged[4..200].fill(0x55);
    std::fs::write(&file, &damaged).unwrap();
    check(&["cannot be read as Parquet"]);
    std::fs::remove_file(&file).unwrap();
    check(&["version 2", "is gone"]);
    std::fs::remove_dir_all(store.version("vectors", 2)).unwrap();
    check(&["version 2", "is gone"]);
    std::fs::write(store.folder().join("out/embeddings/vectors/_manifests/000002.json"), "{").unwrap();
    query("SELECT count(*) FROM vectors", 74);
    query("SELECT count(*) FROM others", 0);
    File::create(store.folder().join("points.parquet")).unwrap();
    let error = query("SELECT * FROM points", 65);
    assert!(error.contains("points.parquet") && error.contains("pipeline small"), "{error}");
    query("SELECT count(*) FROM labels", 0);
}
