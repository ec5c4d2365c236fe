//! What is printed without any data: help, schema, completions, the doctor.

use std::fmt::Write;

use serde_json::Value;

use super::{Project, check_snapshot};
use crate::command::emberflow;

const COMMANDS: [&str; 13] = [
    "init",
    "validate",
    "explain",
    "run",
    "verify",
    "simulate",
    "sql",
    "runs",
    "status",
    "models",
    "doctor",
    "schema",
    "completions",
];

#[test]
fn help_of_every_command() {
    let project = Project::empty();
    let mut text = project.transcript(&["--help"]);
    for command in COMMANDS {
        write!(text, "\n{}", project.transcript(&[command, "--help"])).unwrap();
    }
    check_snapshot("help", &project.path(""), &text);
    for line in text.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   ")) {
        let word = line.split_whitespace().next().unwrap();
        assert!(!word.starts_with(char::is_lowercase) || COMMANDS.contains(&word), "{word} is not in COMMANDS");
    }
}

#[test]
fn the_version() {
    let answer = emberflow(&["--version"]).expect(0);
    assert_eq!(answer.stdout, format!("emberflow {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_schema_is_the_one_in_docs() {
    let printed = emberflow(&["schema"]).expect(0).stdout;
    assert_eq!(printed, std::fs::read_to_string("docs/pipeline.schema.json").unwrap());
}

#[test]
fn completions_for_every_shell() {
    for (shell, start) in [("bash", "_emberflow()"), ("zsh", "#compdef emberflow"), ("fish", "__fish_emberflow")] {
        let script = emberflow(&["completions", shell]).expect(0).stdout;
        assert!(script.contains(start), "{shell}: {script}");
        for command in COMMANDS {
            assert!(script.contains(command), "{shell} does not complete {command}");
        }
    }
    let script = emberflow(&["completions", "bash"]).stdout;
    let project = Project::empty();
    project.write("completions", &script);
    let checked = std::process::Command::new("bash").arg("-n").arg(project.path("completions")).status().unwrap();
    assert!(checked.success());
}

#[test]
fn the_doctor_looks_at_everything() {
    let project = Project::empty();
    let text = project.emberflow(&["doctor"]).expect(0).stdout;
    let answer = project.emberflow(&["doctor", "--json"]).expect(0);
    let findings: Vec<Value> = serde_json::from_str(&answer.stdout).unwrap();
    let names: Vec<_> = findings.iter().map(|finding| finding["what"].as_str().unwrap()).collect();
    let expected = [
        "versions",
        "processor",
        "memory",
        "scratch folder",
        "device cpu",
        "device wgpu",
        "device cuda",
        "Hadoop configuration",
        "Kerberos",
    ];
    assert_eq!(names, expected);
    for finding in &findings {
        let (what, fine) = (finding["what"].as_str().unwrap(), finding["fine"].as_bool().unwrap());
        assert!(!finding["detail"].as_str().unwrap().is_empty(), "{what}");
        assert!(text.lines().any(|line| line.starts_with(if fine { "ok" } else { "--" }) && line.contains(what)));
    }
    assert!(answer.stdout.contains("set HADOOP_CONF_DIR"), "{}", answer.stdout);
}

#[test]
fn the_doctor_reaches_a_store_and_sees_bad_settings() {
    let project = Project::starter();
    let reached = project.emberflow(&["doctor", "--db", "data"]).expect(0);
    assert!(reached.stdout.contains("1 entries listed"), "{}", reached.stdout);
    let away = project.emberflow(&["doctor", "--db", "hdfs://127.0.0.1:1/"]).expect(75);
    assert!(away.stdout.contains("hdfs://127.0.0.1:1: the store cannot be reached"), "{}", away.stdout);
    std::fs::create_dir(project.path("conf")).unwrap();
    project.write("conf/emberflow.yaml", "scratch_dir: none/such\nhadoop_conf_dir: data\n");
    let answer = project.emberflow(&["doctor"]).expect(78);
    assert!(answer.stdout.contains("none/such: No such file"), "{}", answer.stdout);
    assert!(answer.stdout.contains("data: no core-site.xml, no hdfs-site.xml"), "{}", answer.stdout);
}
