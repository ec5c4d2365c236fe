//! SIGTERM and SIGINT in the middle of a run: a checkpoint, one exit code everywhere, and a
//! rerun that ends as if nothing had happened.

use std::{
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{Project, output::events};
use crate::{
    command::Answer,
    run::{losses, rows},
};

const ARGS: [&str; 9] = ["run", "sensors.yaml", "--run-id", "r", "--output", "json", "--quiet", "--events", "events"];

/// A starter project that trains for a second or more.
fn slow() -> Project {
    let project = Project::starter();
    project.edit("sensors.yaml", "epochs: 20, batch: 64", "epochs: 80, batch: 8");
    project
}

#[test]
fn a_stopped_run_says_so_everywhere_and_is_resumed() {
    let reference = slow();
    let expected = reference.emberflow(&ARGS).expect(0).result();
    let reference = reference.path("out").display().to_string();
    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        let project = slow();
        let out = project.path("out").display().to_string();
        let stopped = stop(&project, signal).expect(code);
        assert!(stopped.stderr.contains("stopped on request; the same command resumes"), "{}", stopped.stderr);
        let error = |error: &Value| {
            assert_eq!((&error["exit_code"], &error["retryable"]), (&Value::from(code), &Value::from(true)), "{error}");
        };
        assert_eq!(stopped.result()["status"], "interrupted");
        error(&stopped.result()["error"]);
        let status = project.emberflow(&["status", "r", "--json"]).expect(0);
        let record: Value = serde_json::from_str(&status.stdout).unwrap();
        assert_eq!(record["status"], "interrupted");
        error(&record["error"]);
        let told = events(&project.read("events"));
        error(told.iter().find(|event| event["event"] == "error").unwrap());
        assert_eq!(told.last().unwrap()["status"], "interrupted");

        let resumed = project.emberflow(&ARGS).expect(0).result();
        assert_eq!(resumed["embeddings"][0]["fingerprint"], expected["embeddings"][0]["fingerprint"], "{signal}");
        assert_eq!(losses(&out), losses(&reference), "{signal}");
        assert_eq!(rows(&out, "sensor_embeddings"), rows(&reference, "sensor_embeddings"), "{signal}");
        // The file holds both attempts, one after the other.
        let told = events(&project.read("events"));
        let starts: Vec<_> = told.iter().filter(|event| event["event"] == "run_started").collect();
        assert_eq!(starts.iter().map(|event| &event["attempt"]).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(starts[1]["resumed"], true);
        let epochs: Vec<_> =
            told.iter().filter(|event| event["event"] == "epoch").map(|event| &event["epoch"]).collect();
        assert_eq!(epochs, (1..=80).collect::<Vec<_>>(), "{signal}: no epoch is lost or told twice");
    }
}

/// Starts the run, sends the signal once an epoch is done, and gives its answer; that must
/// come within the bound of docs/commands.md.
fn stop(project: &Project, signal: &str) -> Answer {
    let child = project.spawn(&ARGS);
    let deadline = Instant::now() + Duration::from_mins(1);
    while !std::fs::read_to_string(project.path("events")).is_ok_and(|text| text.contains("\"epoch\"")) {
        assert!(Instant::now() < deadline, "no epoch within a minute");
        sleep(Duration::from_millis(5));
    }
    let sent = Instant::now();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success());
    let answer = child.wait_with_output().unwrap().into();
    assert!(sent.elapsed() < Duration::from_secs(21), "{signal}: stopped only after {:?}", sent.elapsed());
    answer
}
