//! What schedulers read: the result, events, logs; and what people are spared.

use chrono::DateTime;
use serde_json::Value;

use super::Project;

/// Events, one per line.
pub(super) fn events(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

#[test]
fn a_result_is_one_line_and_a_file() {
    let project = Project::starter();
    let args = ["run", "sensors.yaml", "--output", "json", "--result-file", "new/result.json"];
    for status in ["succeeded", "unchanged"] {
        let answer = project.emberflow(&args).expect(0);
        assert_eq!(answer.stdout.lines().count(), 1, "{}", answer.stdout);
        let result = answer.result();
        assert_eq!(result["status"], status);
        assert_eq!(result["pipeline"], "sensors");
        assert!(result["run_id"].as_str().unwrap().starts_with("sensors-"));
        assert_eq!(result["embeddings"][0]["table"], "sensor_embeddings");
        assert_eq!(result["embeddings"][0]["rows"], 500);
        assert_eq!(result["models"][0]["epochs"], 20);
        assert!(result["models"][0]["loss"].as_f64().unwrap() < 1.0);
        assert!(result["metrics"]["train_rows_per_s"].as_f64().unwrap() > 0.0);
        assert_eq!(serde_json::from_str::<Value>(&project.read("new/result.json")).unwrap(), result);
    }
}

/// A failed run has a result too, and replaces that of an earlier success.
#[test]
fn a_failure_is_a_result() {
    let project = Project::starter();
    let args = ["run", "sensors.yaml", "--output", "json", "--result-file", "result.json"];
    project.emberflow(&args).expect(0);
    for (param, code, named) in [("data=none.csv", 65, "none.csv"), ("dat=x", 64, "did you mean `data`?")] {
        let answer = project.emberflow(&[&args[..], &["--param", param]].concat()).expect(code);
        assert_eq!(answer.stdout.lines().count(), 1, "{}", answer.stdout);
        let result = answer.result();
        assert_eq!(result["status"], "failed");
        assert_eq!(result["error"]["exit_code"], code);
        assert_eq!(result["error"]["retryable"], false);
        assert!(result["error"]["message"].as_str().unwrap().contains(named), "{result}");
        assert_eq!(serde_json::from_str::<Value>(&project.read("result.json")).unwrap(), result);
    }
    let away = ["--param", "out=hdfs://127.0.0.1:1/out", "--run-id", "r"];
    let result = project.emberflow(&[&args[..], &away].concat()).expect(75).result();
    assert_eq!((&result["run_id"], &result["error"]["retryable"]), (&Value::from("r"), &Value::from(true)));
}

#[test]
fn events_tell_a_run_from_start_to_end() {
    let project = Project::starter();
    project.emberflow(&["run", "sensors.yaml", "--run-id", "r", "--events", "events", "--quiet"]).expect(0);
    let events = events(&project.read("events"));
    for event in &events {
        assert_eq!(event["v"], 1, "{event}");
        assert_eq!(event["run_id"], "r", "{event}");
        let time = event["time"].as_str().unwrap();
        assert!(time.ends_with('Z') && DateTime::parse_from_rfc3339(time).is_ok(), "{event}");
    }
    assert_eq!(events[0]["event"], "run_started");
    assert_eq!((&events[0]["attempt"], &events[0]["resumed"]), (&Value::from(1), &Value::from(false)));
    let last = events.last().unwrap();
    assert_eq!((&last["event"], &last["status"]), (&Value::from("run_finished"), &Value::from("succeeded")));
    let stages = |event: &str| -> Vec<String> {
        let of_kind = events.iter().filter(|line| line["event"] == event);
        of_kind.map(|line| line["kind"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(stages("stage_started"), ["prepare", "fit", "train", "embed", "commit"]);
    assert_eq!(stages("stage_started"), stages("stage_finished"));
    assert_eq!(events.iter().filter(|event| event["event"] == "epoch").count(), 20);
    let committed = events.iter().find(|event| event["event"] == "committed").unwrap();
    assert_eq!((&committed["rows"], &committed["version"]), (&Value::from(500), &Value::from(1)));
}

#[test]
fn a_retry_adds_its_events() {
    let project = Project::starter();
    let args = ["run", "sensors.yaml", "--run-id", "r", "--events", "events", "--quiet"];
    project.emberflow(&args).expect(0);
    let before = project.read("events");
    project.emberflow(&args).expect(0);
    let after = project.read("events");
    let added = events(after.strip_prefix(&before).unwrap());
    assert_eq!(added.len(), 1);
    assert_eq!((&added[0]["event"], &added[0]["status"]), (&Value::from("run_finished"), &Value::from("unchanged")));
}

#[test]
fn stdout_holds_events_and_then_the_result() {
    let project = Project::starter();
    let answer = project.emberflow(&["run", "sensors.yaml", "--events", "-", "--output", "json", "--quiet"]).expect(0);
    assert_eq!(answer.stderr, "");
    let lines = events(&answer.stdout);
    let (result, events) = lines.split_last().unwrap();
    assert_eq!(events[0]["event"], "run_started");
    assert_eq!(events.last().unwrap()["event"], "run_finished");
    assert_eq!(result["status"], "succeeded");
    // Without --output json stdout is for events alone.
    let answer = project.emberflow(&["run", "sensors.yaml", "--events", "-"]).expect(0);
    assert_eq!(super::output::events(&answer.stdout).last().unwrap()["status"], "unchanged");
    assert!(answer.stderr.contains("nothing to do: run sensors-"), "{}", answer.stderr);
}

#[test]
fn a_dry_run_writes_nothing_and_knows_its_flags() {
    let project = Project::starter();
    let args = ["run", "sensors.yaml", "--dry-run", "--executors", "3"];
    let text = project.emberflow(&args).expect(0).stdout;
    assert!(text.starts_with("pipeline sensors\n"), "{text}");
    let explained = project.emberflow(&[&args[..], &["--output", "json"]].concat()).expect(0);
    assert_eq!(explained.stdout.lines().count(), 1);
    assert_eq!(explained.result()["pipeline"], "sensors");
    assert!(!project.path("out/_runs").exists());
    project.edit("sensors.yaml", "from: clean", "from: readings");
    project.edit("sensors.yaml", "data/sensors.csv", "out.parquet");
    let rows = ["sql", "--format", "parquet", "--out", "out.parquet", ROWS];
    project.emberflow(&rows).expect(0);
    let explained = project.emberflow(&[&args[..], &["--output", "json"]].concat()).expect(0).result();
    assert_eq!(explained["models"][0]["rows"]["ranks"].as_array().unwrap().len(), 3, "{explained}");
}

const ROWS: &str = "SELECT column1 AS id, column2 AS temperature, column2 AS humidity, column2 AS pressure, \
                    column2 AS vibration FROM (VALUES (1, 0.5), (2, 1.5), (3, 2.5), (4, 3.5))";

#[test]
fn progress_is_told_on_stderr_unless_quiet() {
    for (more, told) in [(&[][..], true), (&["--quiet"], false)] {
        let project = Project::starter();
        let answer = project.emberflow(&[&["run", "sensors.yaml"], more].concat()).expect(0);
        assert!(answer.stdout.starts_with("run sensors-"), "{}", answer.stdout);
        if told {
            for line in ["train   sensors: epoch 20/20, loss", "embed   sensor_embeddings: done", "version 1, 500 rows"]
            {
                assert!(answer.stderr.contains(line), "{line} is not in\n{}", answer.stderr);
            }
        } else {
            assert_eq!(answer.stderr, "");
        }
    }
}

#[test]
fn logs_are_json_if_asked_for() {
    let project = Project::starter();
    // Events that cannot be written are logged; the run goes on.
    let args = ["run", "sensors.yaml", "--quiet", "--events", "/dev/full"];
    let json = project.emberflow(&[&args[..], &["--log-format", "json"]].concat()).expect(0);
    let logs = events(&json.stderr);
    assert_eq!(logs.len(), 1, "{}", json.stderr);
    assert_eq!(logs[0]["level"], "WARN");
    assert_eq!(logs[0]["fields"]["message"], "events can no longer be written");
    let text = project.emberflow(&args).expect(0);
    assert!(text.stderr.contains("WARN") && !text.stderr.contains('{'), "{}", text.stderr);
    let silent = project.command(&args).env("EMBERFLOW_LOG", "error").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&silent.stderr), "");
}

#[test]
fn colours_are_as_asked_for() {
    let project = Project::starter();
    project.edit("sensors.yaml", "latent: 2", "latend: 2");
    for args in [&["run", "sensors.yaml"][..], &["run", "none.yaml"], &["status", "none"]] {
        for (choice, colored) in [("always", true), ("never", false), ("auto", false)] {
            let answer = project.emberflow(&[args, &["--color", choice]].concat());
            assert_eq!(answer.stderr.contains("\u{1b}["), colored, "{args:?} {choice}: {}", answer.stderr);
        }
    }
}
