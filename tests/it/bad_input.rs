//! Bad input: each gives one clear error with the right exit code, or works.

use std::{path::Path, process::Command, sync::Arc};

use arrow::array::{ArrayRef, Float32Array, Int64Array, StringArray};

use crate::command::{Answer, emberflow, lists, wave, write_features, write_parquet, write_pipeline};

const FEATURES: &str = "[{ columns: [\"f*\"] }]";

/// Runs a small pipeline over `data` and checks the exit code and what the error names.
fn check(prepare: impl Fn(&Path), features: &str, code: i32, named: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows");
    prepare(&data);
    let answer = run(folder.path(), &data, features).expect(code);
    for name in named {
        assert!(answer.stderr.contains(name), "{name} is not named:\n{}", answer.stderr);
    }
    assert!(!answer.stderr.contains("panicked"), "{}", answer.stderr);
}

fn run(folder: &Path, data: &Path, features: &str) -> Answer {
    emberflow(&["run", &write_pipeline(folder, data, features, "")])
}

fn one_column(folder: &Path, name: &str, column: ArrayRef) {
    let ids: ArrayRef = Arc::new((0..column.len() as i64).collect::<Int64Array>());
    write_parquet(&folder.join("a.parquet"), vec![("id", ids), (name, column)]);
}

#[test]
fn a_missing_path() {
    check(|_| {}, FEATURES, 65, &["rows", "no such file"]);
}

#[test]
fn an_empty_folder() {
    check(|data| std::fs::create_dir(data).unwrap(), FEATURES, 65, &["rows", "no rows", "--empty"]);
}

#[test]
fn an_empty_folder_as_asked() {
    for (choice, code) in [("skip", 99), ("ok", 0)] {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("rows");
        std::fs::create_dir(&data).unwrap();
        let file = write_pipeline(folder.path(), &data, FEATURES, "");
        let answer = emberflow(&["run", &file, "--run-id", "r", "--empty", choice]).expect(code);
        assert!(format!("{}{}", answer.stdout, answer.stderr).contains("no rows"), "{answer:?}");
    }
}

#[test]
fn a_file_without_rows() {
    check(|data| write_features(&data.join("a.parquet"), 0, wave), FEATURES, 65, &["no rows"]);
}

#[test]
fn a_zero_byte_file() {
    let prepare = |data: &Path| {
        write_features(&data.join("a.parquet"), 10, wave);
        std::fs::write(data.join("b.parquet"), "").unwrap();
    };
    check(prepare, FEATURES, 65, &["b.parquet", "empty"]);
}

#[test]
fn a_truncated_file() {
    let prepare = |data: &Path| {
        write_features(&data.join("a.parquet"), 1_000, wave);
        let whole = std::fs::read(data.join("a.parquet")).unwrap();
        std::fs::write(data.join("b.parquet"), &whole[..whole.len() / 2]).unwrap();
    };
    check(prepare, FEATURES, 65, &["b.parquet"]);
}

#[test]
fn a_file_whose_pages_are_damaged() {
    let prepare = |data: &Path| {
        let file = data.join("a.parquet");
        write_features(&file, 1_000, wave);
        let mut whole = std::fs::read(&file).unwrap();
        whole[4..400].fill(0xff);
        std::fs::write(&file, whole).unwrap();
    };
    check(prepare, FEATURES, 65, &["a.parquet"]);
}

#[test]
fn hidden_and_temporary_files_are_not_data() {
    let prepare = |data: &Path| {
        write_features(&data.join("a.parquet"), 10, wave);
        for name in ["_SUCCESS", ".a.parquet.crc", "._COPYING_", "_temporary/0/b.parquet"] {
            std::fs::create_dir_all(data.join(name).parent().unwrap()).unwrap();
            std::fs::write(data.join(name), "not data").unwrap();
        }
    };
    check(prepare, FEATURES, 0, &[]);
}

#[test]
fn an_unusable_type() {
    let strings = |data: &Path| one_column(data, "f0", Arc::new(StringArray::from(vec!["a", "b"])));
    check(strings, FEATURES, 78, &["f0", "pipeline.yaml:9"]);
}

#[test]
fn an_unknown_column() {
    let prepare = |data: &Path| write_features(&data.join("a.parquet"), 10, wave);
    check(prepare, "[{ column: f00 }]", 78, &["f00", "did you mean", "f0", "pipeline.yaml:9"]);
}

#[test]
fn ragged_lists() {
    check(|data| one_column(data, "f0", lists(&[3, 3, 4])), FEATURES, 65, &["f0", "a.parquet", "row 3"]);
}

#[test]
fn nulls_nans_and_infinities() {
    for (value, what) in [(None, "f0"), (Some(f32::NAN), "f0"), (Some(f32::INFINITY), "f0")] {
        let prepare = |data: &Path| {
            let odd = |row, feature| if (row, feature) == (7, 0) { value } else { wave(row, feature) };
            write_features(&data.join("a.parquet"), 20, odd);
        };
        check(prepare, FEATURES, 65, &[what, "row 8", "a.parquet"]);
    }
}

#[test]
fn nulls_that_are_provided_for() {
    for (missing, indicator) in [("mean", true), ("median", true), ("reject", false), ("{ constant: 0.5 }", true)] {
        let prepare = |data: &Path| {
            write_features(
                &data.join("a.parquet"),
                50,
                |row, feature| if row == 7 { None } else { wave(row, feature) },
            );
        };
        let features =
            format!("[{{ columns: [\"f*\"], missing: {missing}, indicator: {indicator}, scale: standard }}]");
        check(prepare, &features, 0, &[]);
    }
}

#[test]
fn constant_columns() {
    for scale in ["min_max", "standard", "robust"] {
        let prepare = |data: &Path| write_features(&data.join("a.parquet"), 20, |_, _| Some(3.0));
        check(prepare, &format!("[{{ columns: [\"f*\"], scale: {scale} }}]"), 0, &[]);
    }
}

#[test]
fn values_that_overflow_the_loss() {
    let prepare = |data: &Path| write_features(&data.join("a.parquet"), 40, |_, _| Some(3e38));
    check(prepare, FEATURES, 65, &["rank 0", "step 1", "f0"]);
}

#[test]
fn values_beyond_cross_entropy() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.parquet");
    write_features(&data, 40, |row, _| Some(row as f32));
    let file = write_pipeline(folder.path(), &data, FEATURES, "");
    let text = std::fs::read_to_string(&file).unwrap().replace("epochs: 2", "epochs: 2, loss: binary_cross_entropy");
    std::fs::write(&file, &text).unwrap();
    let answer = emberflow(&["run", &file]).expect(78);
    assert!(answer.stderr.contains("feature f0 is") && answer.stderr.contains("min_max"), "{answer:?}");
    std::fs::write(&file, text.replace("\"f*\"]", "\"f*\"], scale: min_max")).unwrap();
    emberflow(&["run", &file]).expect(0);
}

#[test]
fn columns_that_disagree_across_files() {
    let prepare = |data: &Path| {
        one_column(data, "f0", Arc::new(Float32Array::from(vec![1.0, 2.0])));
        let ids: ArrayRef = Arc::new(Int64Array::from(vec![3]));
        write_parquet(&data.join("b.parquet"), vec![("id", ids), ("f0", Arc::new(StringArray::from(vec!["x"])))]);
    };
    check(prepare, FEATURES, 65, &["f0", "a.parquet", "b.parquet"]);
}

#[test]
fn a_target_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.parquet");
    write_features(&data, 10, wave);
    // A file stands where the store's folder should be; root may write into read-only folders.
    std::fs::write(folder.path().join("out"), "in the way").unwrap();
    let answer = run(folder.path(), &data, FEATURES);
    assert!([Some(73), Some(74), Some(77)].contains(&answer.code), "{answer:?}");
    assert!(answer.stderr.contains("out"), "{answer:?}");
}

/// Needs the right to mount; where that is missing the test says so and ends.
#[test]
fn a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.parquet");
    write_features(&data, 200_000, wave);
    let out = folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).arg(&out).status();
    if !mount.is_ok_and(|status| status.success()) {
        eprintln!("not checked: this user may not mount a small file system");
        return;
    }
    let answer = run(folder.path(), &data, FEATURES);
    assert!(Command::new("umount").arg("-l").arg(&out).status().unwrap().success());
    let answer = answer.expect(73);
    assert!(answer.stderr.contains("space"), "{answer:?}");
}
