//! `sql`: every format, a reader that leaves early, and the shell on a terminal.

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
};

use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

use super::Project;

const ROWS: &str = "SELECT column1 AS id, column2 AS name, make_array(column1, 2) AS list \
                    FROM (VALUES (1, 'a'), (2, NULL), (3, 'x,\"y\"')) ORDER BY id";

/// An answer of more than a pipe holds.
const MANY: &str = "SELECT a.id, b.id AS other FROM sensor_embeddings a CROSS JOIN sensor_embeddings b";

#[test]
fn rows_in_every_format() {
    let project = Project::empty();
    let sql = |format: &str| project.emberflow(&["sql", "--format", format, ROWS]).expect(0).stdout;
    let table = "\
+----+-------+--------+
| id | name  | list   |
+----+-------+--------+
| 1  | a     | [1, 2] |
| 2  |       | [2, 2] |
| 3  | x,\"y\" | [3, 2] |
+----+-------+--------+
";
    assert_eq!(sql("table"), table);
    assert_eq!(sql("csv"), "id,name,list\n1,a,\"[1, 2]\"\n2,,\"[2, 2]\"\n3,\"x,\"\"y\"\"\",\"[3, 2]\"\n");
    let rows = [
        json!({ "id": 1, "name": "a", "list": [1, 2] }),
        json!({ "id": 2, "list": [2, 2] }),
        json!({ "id": 3, "name": "x,\"y\"", "list": [3, 2] }),
    ];
    assert_eq!(serde_json::from_str::<Value>(&sql("json")).unwrap(), json!(rows));
    let lines: Vec<Value> = sql("ndjson").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines, rows);
    let args = ["sql", "--format", "parquet", "--out", "rows.parquet", ROWS];
    assert_eq!(project.emberflow(&args).expect(0).stdout, "");
    let file = File::open(project.path("rows.parquet")).unwrap();
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let batches: Vec<_> = reader.map(Result::unwrap).collect();
    assert_eq!(batches.iter().map(arrow::array::RecordBatch::num_rows).sum::<usize>(), 3);
    assert_eq!(batches[0].num_columns(), 3);
}

#[test]
fn no_rows_in_every_format() {
    let project = Project::empty();
    let expected = [("table", "+----+\n| id |\n+----+\n+----+\n"), ("csv", "id\n"), ("json", "[]\n"), ("ndjson", "")];
    for (format, text) in expected {
        let args = ["sql", "--format", format, "SELECT 1 AS id WHERE false"];
        assert_eq!(project.emberflow(&args).expect(0).stdout, text, "{format}");
    }
}

#[test]
fn queries_come_from_a_file_or_stdin() {
    let project = Project::empty();
    project.write("two.sql", "-- Two queries.\nSELECT 1 AS a;\nSELECT 2 AS b;\n");
    let answer = project.emberflow(&["sql", "--file", "two.sql", "--format", "csv"]).expect(0);
    assert_eq!(answer.stdout, "a\n1\nb\n2\n");
    let mut command = project.command(&["sql", "--format", "csv"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"SELECT 3 AS c").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"c\n3\n");
}

/// `emberflow sql ... | head -1` is no failure.
#[test]
fn a_reader_may_leave_early() {
    let project = Project::trained();
    for format in ["table", "csv", "json", "ndjson"] {
        let mut child = project.spawn(&["sql", "--format", format, MANY]);
        let mut line = String::new();
        BufReader::with_capacity(16, child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let answer = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&answer.stderr);
        assert_eq!((answer.status.code(), &*stderr), (Some(0), ""), "{format}");
    }
}

/// What is typed at the prompts of a shell on a terminal, and what it shows.
fn check(project: &Project, typed: &[&str], code: i32, shown: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/cli/terminal.py");
    let answer = Command::new("python3")
        .arg(script)
        .arg(env!("CARGO_BIN_EXE_emberflow"))
        .arg(serde_json::to_string(typed).unwrap())
        .args(["sql"])
        .current_dir(project.path(""))
        .env("XDG_STATE_HOME", project.path("state"))
        .env_remove("EMBERFLOW_DB")
        .output()
        .expect("missing: Python 3.11 (python3)");
    let screen = String::from_utf8_lossy(&answer.stdout);
    assert_eq!(answer.status.code(), Some(code), "{screen}\n{}", String::from_utf8_lossy(&answer.stderr));
    for text in shown {
        assert!(screen.contains(text), "{text:?} is not on the screen:\n{screen}");
    }
}

#[test]
fn the_shell_answers_on_a_terminal() {
    let project = Project::trained();
    check(
        &project,
        &[
            "\\d\r",
            "\\d sensor_embeddings\r",
            "SELECT count(*) AS n\rFROM sensor_embeddings;\r",
            "SELECT 1 FROM sensor_embedding;\r",
            "SELECT max(id) AS last FROM sensor_em\t;\r",
            "\\x\r",
            "\\q\r",
        ],
        0,
        &[
            "\\d lists tables",
            "epochs",
            "reconstruction_error",
            "| 500 |",
            "error: there is no table",
            "| last |",
            "| 499  |",
            "\\x is no command",
        ],
    );
    let history = project.read("state/emberflow/history");
    assert!(history.contains("sensor_embeddings") && history.contains("\\d"), "{history}");
    // Ctrl-C drops the line, Ctrl-D ends.
    check(&project, &["SELECT no\u{3}", "SELECT 7 * 6 AS answer;\r", "\u{4}"], 0, &["| 42     |"]);
}
