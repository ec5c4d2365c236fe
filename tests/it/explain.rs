//! `explain` on the built binary.

use std::process::Command;

use crate::command::{wave, write_features, write_pipeline};

/// A thousand files of 2 MB: what is read is their footers (64 KiB are asked for at once), as
/// the kernel counts the bytes that the process has read.
#[test]
fn a_thousand_files_are_explained_from_their_footers() {
    const FILES: u64 = 1_000;
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows");
    write_features(&data.join("part-0.parquet"), 100_000, wave);
    for number in 1..FILES {
        std::fs::hard_link(data.join("part-0.parquet"), data.join(format!("part-{number}.parquet"))).unwrap();
    }
    let file = write_pipeline(folder.path(), &data, "[{ columns: [\"f*\"] }]", "");
    // A shell that has waited for its child shows the child's reads as its own.
    let script = "\"$0\" explain \"$1\" && while read -r name value; do echo \"$name $value\"; done < /proc/$$/io";
    let program = env!("CARGO_BIN_EXE_emberflow");
    let output = Command::new("sh").args(["-c", script, program, &file]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for told in ["1000 files", "100000000 rows to train on", "8 partitions, skew 1.00", "rank 0: 8 partitions"] {
        assert!(text.contains(told), "{told}\n{text}");
    }
    let bytes = text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse::<u64>().unwrap();
    assert!(bytes < FILES * (100 << 10), "{bytes} bytes were read of {FILES} files");
}
