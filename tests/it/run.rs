//! Runs of the built binary: the main job, its reruns, its deaths.

use std::{
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::command::{Answer, emberflow, pipelines, spawn, wave, write_features, write_pipeline};

/// `run` of the MNIST pipeline into `out`; `more` are further arguments.
pub(crate) fn run_mnist(out: &str, more: &[&str]) -> Answer {
    let file = pipelines().join("mnist.yaml").display().to_string();
    let out = format!("out={out}");
    let mut args = vec!["run", &file, "--param", &out, "--output", "json"];
    args.extend(more);
    emberflow(&args)
}

/// Losses by epoch, from the run's record.
pub(crate) fn losses(out: &str) -> Vec<f64> {
    let sql = "SELECT loss FROM epochs ORDER BY epoch";
    let answer = emberflow(&["sql", "--db", out, sql, "--format", "csv"]).expect(0);
    answer.stdout.lines().skip(1).map(|line| line.parse().unwrap()).collect()
}

/// Every row of the embedding table, as CSV.
pub(crate) fn rows(out: &str, table: &str) -> String {
    let sql = format!("SELECT * FROM {table} ORDER BY id");
    emberflow(&["sql", "--db", out, &sql, "--format", "json"]).expect(0).stdout
}

fn fingerprint(result: &Value) -> String {
    result["embeddings"][0]["fingerprint"].as_str().unwrap().to_owned()
}

/// All files and folders below a folder, but for run records and leases.
fn tree(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().display().to_string();
            if path.is_dir() {
                folders.push(path);
            } else if !name.contains("attempts/") {
                names.push(name);
            }
        }
    }
    names.sort();
    names
}

/// As good as PyTorch with the same settings (`benches/peer_torch.py`): its last loss was 0.0159,
/// and 94.6% of its nearest neighbours shared the digit.
#[test]
fn the_main_job_runs_and_a_rerun_does_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let first = run_mnist(&out, &[]).expect(0).result();
    assert_eq!(first["status"], "succeeded");
    assert_eq!(first["embeddings"][0]["rows"], 10_000);
    let losses = losses(&out);
    assert_eq!(losses.len(), 10);
    assert!(losses[9] < 1.03 * 0.0159, "{losses:?}");
    let query = pipelines().join("../sql/label_agreement.sql").display().to_string();
    let agreement = emberflow(&["sql", "--db", &out, "--file", &query, "--format", "json"]).expect(0).result();
    assert_eq!(agreement[0]["rows"], 1_000);
    assert!(agreement[0]["agreement"].as_f64().unwrap() >= 0.94, "{agreement}");

    let again = run_mnist(&out, &[]).expect(0);
    assert_eq!(again.result()["status"], "unchanged");
    assert_eq!(again.result()["run_id"], first["run_id"]);
    let versions = std::fs::read_dir(folder.path().join("embeddings/digit_embeddings/_manifests")).unwrap().count();
    assert_eq!(versions, 1);
}

#[test]
fn a_run_id_stands_for_one_meaning() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    run_mnist(&out, &["--param", "epochs=1", "--run-id", "a"]).expect(0);
    let other = run_mnist(&out, &["--param", "epochs=2", "--run-id", "a"]).expect(78);
    assert!(other.stderr.contains("another version"), "{}", other.stderr);
    run_mnist(&out, &["--param", "epochs=2", "--run-id", "b"]).expect(0);
    let sql = "SELECT count(*) AS n FROM \"digit_embeddings@2\"";
    let count = emberflow(&["sql", "--db", &out, sql, "--format", "csv"]).expect(0);
    assert_eq!(count.stdout, "n\n10000\n");
}

/// A finished run is finished, even if its input is gone; without a name it is another run.
#[test]
fn a_finished_run_needs_no_input() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.parquet");
    write_features(&data, 100, wave);
    let file = write_pipeline(folder.path(), &data, "[{ columns: [\"f*\"] }]", "");
    let args = ["run", &file, "--run-id", "a", "--output", "json"];
    emberflow(&args).expect(0);
    std::fs::remove_file(&data).unwrap();
    assert_eq!(emberflow(&args).expect(0).result()["status"], "unchanged");
    emberflow(&["run", &file]).expect(65);
}

/// However many executors share the work, the same rows meet in the same steps.
#[test]
fn executors_do_not_change_the_result() {
    let reference = tempfile::tempdir().unwrap();
    let reference = reference.path().display().to_string();
    run_mnist(&reference, &["--param", "epochs=3"]).expect(0);
    let expected = losses(&reference);
    for executors in ["2", "4", "11"] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().display().to_string();
        run_mnist(&out, &["--param", "epochs=3", "--executors", executors]).expect(0);
        let got = losses(&out);
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(&expected) {
            assert!((got / expected - 1.0).abs() < 1e-4, "{executors} executors: {got} is not {expected}");
        }
    }
}

/// SIGKILL at ten moments spread over a run by a fixed seed, each followed by the same
/// command until it ends by itself.
#[test]
fn killed_runs_end_as_if_nothing_had_happened() {
    let folder = tempfile::tempdir().unwrap();
    let reference = folder.path().join("reference");
    let more = ["--param", "epochs=4", "--run-id", "r", "--executors", "2"];
    let started = Instant::now();
    let expected = run_mnist(&reference.display().to_string(), &more).expect(0).result();
    let whole = started.elapsed();
    let expected_rows = rows(&reference.display().to_string(), "digit_embeddings");
    let mut seed = 20_261_201_u64;
    for round in 0..10 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = whole.mul_f64((seed >> 33) as f64 / f64::from(1u32 << 31));
        let out = folder.path().join(format!("killed-{round}"));
        let out_text = out.display().to_string();
        let file = pipelines().join("mnist.yaml").display().to_string();
        let param = format!("out={out_text}");
        let args = ["run", &file, "--param", &param, "--output", "json"];
        let mut child = spawn(&[&args[..], &more].concat());
        sleep(moment);
        child.kill().unwrap();
        child.wait().unwrap();
        let result = run_mnist(&out_text, &more).expect(0).result();
        assert_eq!(fingerprint(&result), fingerprint(&expected), "killed after {moment:?}");
        assert_eq!(rows(&out_text, "digit_embeddings"), expected_rows, "killed after {moment:?}");
        assert_eq!(tree(&out), tree(&reference), "killed after {moment:?}");
    }
}

#[test]
fn sigterm_makes_a_checkpoint_and_the_next_start_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let reference = folder.path().join("reference").display().to_string();
    let out = folder.path().join("stopped").display().to_string();
    let more = ["--param", "epochs=4", "--run-id", "r"];
    let expected = run_mnist(&reference, &more).expect(0).result();
    let events = folder.path().join("events");
    let file = pipelines().join("mnist.yaml").display().to_string();
    let (param, events_text) = (format!("out={out}"), events.display().to_string());
    let args = ["run", &file, "--param", &param, "--events", &events_text];
    let child = spawn(&[&args[..], &more].concat());
    wait_for_event(&events, "\"epoch\"");
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let stopped: Answer = child.wait_with_output().unwrap().into();
    let stopped = stopped.expect(143);
    assert!(stopped.stderr.contains("resume"), "{}", stopped.stderr);
    let status = emberflow(&["status", "r", "--db", &out, "--json"]).expect(0);
    assert!(status.stdout.contains("interrupted"), "{}", status.stdout);
    let result = run_mnist(&out, &more).expect(0).result();
    assert_eq!(fingerprint(&result), fingerprint(&expected));
    assert_eq!(losses(&out), losses(&reference));
}

#[test]
fn a_live_run_is_refused_to_others() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out").display().to_string();
    let events = folder.path().join("events");
    let file = pipelines().join("mnist.yaml").display().to_string();
    let (param, events_text) = (format!("out={out}"), events.display().to_string());
    let args = ["run", &file, "--param", &param, "--param", "epochs=500", "--run-id", "r", "--events", &events_text];
    let mut first = spawn(&args);
    wait_for_event(&events, "\"epoch\"");
    let second = run_mnist(&out, &["--param", "epochs=500", "--run-id", "r"]);
    first.kill().unwrap();
    first.wait().unwrap();
    let second = second.expect(75);
    assert!(second.stderr.contains("is working on this run"), "{}", second.stderr);
}

/// Waits, within a bound, until the events file tells of `event`.
fn wait_for_event(file: &Path, event: &str) {
    let deadline = Instant::now() + Duration::from_mins(1);
    while !std::fs::read_to_string(file).is_ok_and(|text| text.contains(event)) {
        assert!(Instant::now() < deadline, "no {event} event within a minute");
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn few_rows_and_empty_ranks_train() {
    for (rows, executors) in [(1, "1"), (1, "4"), (3, "8"), (17, "2")] {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("rows.parquet");
        write_features(&data, rows, wave);
        let file = write_pipeline(folder.path(), &data, "[{ columns: [\"f*\"] }]", "");
        let result = emberflow(&["run", &file, "--executors", executors, "--output", "json"]).expect(0).result();
        assert_eq!(result["embeddings"][0]["rows"], rows, "{rows} rows, {executors} executors");
    }
}

/// The ledger, as events tell it, balances whatever the split.
#[test]
fn every_row_is_accounted_for() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.parquet");
    write_features(&data, 1_003, |row, feature| if row % 100 == 7 { None } else { wave(row, feature) });
    let features = "[{ columns: [\"f*\"], missing: reject, scale: standard }]";
    let file = write_pipeline(folder.path(), &data, features, "    partition: { by: hash, columns: [id], count: 5 }\n");
    let events = emberflow(&["run", &file, "--events", "-"]).expect(0).stdout;
    let ledgers: Vec<Value> = (events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()))
        .filter(|event| event["event"] == "ledger")
        .collect();
    assert_eq!(ledgers.len(), 2, "{events}");
    assert_eq!(ledgers[0]["trained"], 993);
    assert_eq!(ledgers[1]["embedded"], 993);
    for ledger in ledgers {
        assert_eq!(ledger["input"], 1_003);
        assert_eq!(ledger["rejected"]["missing value in column f0"], 10);
    }
}
