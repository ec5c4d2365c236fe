//! The starter project, from its first command to its last; and a file with faults.

use super::{Project, check_snapshot};

#[test]
fn the_starter_project_runs_as_it_stands() {
    let project = Project::empty();
    let query = "SELECT count(*) AS rows, count(embedding) AS embedded, max(id) AS last FROM sensor_embeddings";
    let transcript: Vec<_> = [
        &["init"][..],
        &["init"],
        &["validate", "sensors.yaml"],
        &["explain", "sensors.yaml"],
        &["run", "sensors.yaml", "--quiet"],
        &["run", "sensors.yaml", "--quiet"],
        &["sql", query],
        &["sql", "SELECT * FROM sensor_embedding"],
        &["runs"],
        &["status"],
        &["models"],
    ]
    .iter()
    .map(|args| project.transcript(args))
    .collect();
    let transcript = transcript.join("\n");
    assert!(transcript.contains("FilterExec: temperature"), "{transcript}");
    check_snapshot("starter_project", &project.path(""), &transcript);
}

#[test]
fn all_faults_of_a_file_are_told_at_once() {
    let project = Project::starter();
    project.edit("sensors.yaml", "latent: 2", "latend: 2");
    project.edit("sensors.yaml", "epochs: 20", "epochs: many");
    project.edit("sensors.yaml", "model: sensors", "model: sensor");
    let text = project.transcript(&["validate", "sensors.yaml"]);
    check_snapshot("three_faults", &project.path(""), &text);
    assert!(text.contains("3 faults"), "{text}");
}

#[test]
fn several_files_are_checked_by_one_command() {
    let project = Project::starter();
    project.write("empty.yaml", "");
    let answer = project.emberflow(&["validate", "sensors.yaml", "empty.yaml", "none.yaml"]).expect(78);
    assert_eq!(answer.stdout, "sensors.yaml: fine (1 model, 1 embedding table)\n");
    for file in ["empty.yaml", "none.yaml"] {
        assert!(answer.stderr.contains(file), "{file}: {}", answer.stderr);
    }
}

/// Another machine finds state and data by the store alone, from any working directory.
#[test]
fn a_project_is_used_from_elsewhere() {
    let project = Project::trained();
    let elsewhere = Project::empty();
    let (file, store) = (project.path("sensors.yaml"), project.path("out"));
    let again = elsewhere.emberflow(&["run", &file.display().to_string(), "--output", "json"]).expect(0);
    assert_eq!(again.result()["status"], "unchanged");
    let counted = ["sql", "--format", "csv", "SELECT count(*) AS n FROM sensor_embeddings"];
    let answer = elsewhere.command(&counted).env("EMBERFLOW_DB", &store).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&answer.stdout), "n\n500\n");
}
