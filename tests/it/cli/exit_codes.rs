//! The exit table, docs/exit-codes.md.

use super::Project;

/// Runs commands in a trained starter project; each must end with that code and name these.
#[track_caller]
fn check(code: i32, cases: &[(&[&str], &[&str])]) {
    let project = Project::trained();
    std::fs::create_dir(project.path("empty")).unwrap();
    project.write("file", "in the way");
    project.write("settings.yaml", "hadop_user: me\n");
    project.write("bad.yaml", "version: 1\nname: bad\nstor: out\n");
    project.write("rows.csv", "id,temperature,humidity,pressure,vibration\n1,2,3,4,5\n2,3,4,5,\n");
    for (args, named) in cases {
        let answer = project.emberflow(args);
        assert_eq!(answer.code, Some(code), "{args:?}\nstdout:\n{}\nstderr:\n{}", answer.stdout, answer.stderr);
        for name in *named {
            assert!(answer.stderr.contains(name), "{args:?} does not name {name}:\n{}", answer.stderr);
        }
        assert!(!answer.stderr.contains("bug"), "{args:?}:\n{}", answer.stderr);
    }
}

#[test]
fn the_command_line_is_wrong() {
    check(
        64,
        &[
            (&[], &["Usage: emberflow"]),
            (&["rum"], &["unrecognized subcommand 'rum'", "'run'"]),
            (&["run"], &["<FILE>"]),
            (&["run", "sensors.yaml", "--output", "xml"], &["xml", "text, json"]),
            (&["run", "sensors.yaml", "--executors", "0"], &["expected a number from 1 to 1024, or `auto`"]),
            (&["run", "sensors.yaml", "--run-id", ".hidden"], &["not starting with a dot"]),
            (&["run", "sensors.yaml", "--param", "out"], &["NAME=VALUE"]),
            (&["run", "sensors.yaml", "--param", "data="], &["--param data: expected a path", "1 fault"]),
            (&["run", "sensors.yaml", "--param", "dat=x"], &["--param dat", "did you mean `data`?", "command line"]),
            (&["validate", "sensors.yaml", "--param", "dat=x"], &["--param dat"]),
            (&["init"], &["sensors.yaml: exists already"]),
            (&["sql", ""], &["there is no query"]),
            (&["sql"], &["there is no query"]),
            (&["sql", "SELEC 1"], &["SELEC"]),
            (&["sql", "SELECT nothing FROM sensor_embeddings"], &["nothing"]),
            (&["sql", "SELECT 1 FROM sensor_embedding"], &["sensor_embedding", "sensor_embeddings"]),
            (&["sql", "COPY sensor_embeddings TO 'x.parquet'"], &["DML not supported: COPY"]),
            (&["sql", "--file", "none.sql"], &["none.sql"]),
            (&["sql", "--file", "clean.sql", "SELECT 1"], &["cannot be used with"]),
            (&["sql", "--format", "parquet", "SELECT 1"], &["--out"]),
            (&["status", "none"], &["no such run", "emberflow runs"]),
            (&["status", ".hidden"], &["no run ID"]),
        ],
    );
}

#[test]
fn the_data_are_wrong() {
    check(
        65,
        &[
            (&["run", "sensors.yaml", "--param", "data=none.csv"], &["none.csv", "no such file"]),
            (&["run", "sensors.yaml", "--param", "data=empty"], &["no rows", "--empty"]),
            (&["run", "sensors.yaml", "--param", "data=rows.csv"], &["vibration", "row"]),
        ],
    );
}

#[test]
fn the_target_cannot_be_written() {
    check(
        73,
        &[
            (&["run", "sensors.yaml", "--param", "out=file/below"], &["file/below"]),
            (&["run", "sensors.yaml", "--events", "none/events"], &["none/events: events cannot be written"]),
            (&["sql", "--out", "none/rows", "SELECT 1"], &["none/rows"]),
            (&["sql", "--out", "/dev/full", "SELECT 1"], &["No space left"]),
            (&["sql", "--out", "/dev/full", "--format", "csv", "SELECT 1"], &["No space left"]),
            (&["init", "file"], &["file"]),
        ],
    );
}

/// Root may write into any folder, but for the kernel's own.
#[test]
fn permission_is_missing() {
    let project = Project::starter();
    let folder = project.path("closed");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o555)).unwrap();
    let root = std::fs::write(folder.join("probe"), "").is_ok();
    let out = format!("out={}", if root { "/sys/emberflow" } else { "closed" });
    let answer = project.emberflow(&["run", "sensors.yaml", "--param", &out]);
    if root && answer.code == Some(73) {
        eprintln!("not checked: /sys is mounted read-only");
        return;
    }
    let answer = answer.expect(77);
    assert!(answer.stderr.contains("permission denied"), "{}", answer.stderr);
}

#[test]
fn a_file_of_the_store_is_damaged() {
    let project = Project::trained();
    let record = std::fs::read_dir(project.path("out/_runs")).unwrap().next().unwrap().unwrap().path();
    std::fs::write(record.join("record.json"), "{").unwrap();
    let answer = project.emberflow(&["runs"]).expect(74);
    assert!(answer.stderr.contains("record.json: not written by this version"), "{}", answer.stderr);
}

#[test]
fn a_service_is_away() {
    check(
        75,
        &[
            (&["runs", "--db", "hdfs://127.0.0.1:1/out"], &["hdfs://127.0.0.1:1/out", "cannot be reached"]),
            (&["run", "sensors.yaml", "--param", "out=hdfs://127.0.0.1:1/out"], &["cannot be reached"]),
        ],
    );
}

#[test]
fn the_file_or_a_setting_is_wrong() {
    check(
        78,
        &[
            (&["run", "bad.yaml"], &["bad.yaml:3", "did you mean `store`?"]),
            (&["run", "none.yaml"], &["none.yaml"]),
            (&["run", "bad.yaml", "--param", "x=1"], &["bad.yaml:3", "--param x"]),
            (&["validate", "sensors.yaml", "bad.yaml"], &["bad.yaml:3"]),
            (&["runs", "--config", "settings.yaml"], &["settings.yaml", "hadop_user"]),
            (&["runs", "--config", "none.yaml"], &["none.yaml"]),
            (&["runs", "--db", "ftp://host/x"], &["ftp://host/x", "hdfs"]),
            (&["runs", "--db", "hdfs:///x"], &["hdfs:///x", "fs.defaultFS", "HADOOP_CONF_DIR is not set"]),
            (&["runs", "--db", "hdfs://nn/x"], &["nn is no name service", "hdfs://nn:8020"]),
            (&["runs", "--db", "s3://bucket/x"], &["s3://bucket/x"]),
        ],
    );
}

/// A Hadoop configuration that is partial or damaged: the error names the file and the key.
#[test]
fn hadoops_configuration_is_wrong() {
    let project = Project::empty();
    std::fs::create_dir(project.path("conf")).unwrap();
    project.write("conf/emberflow.yaml", "hadoop_conf_dir: conf\n");
    for (core_site, named) in [
        ("<configuration/>", "fs.defaultFS in conf/core-site.xml"),
        ("<configuration><property><name>fs.defaultFS</name><value>hdfs://nn</value></property></configuration>", "nn"),
        ("<configuration>", "conf/core-site.xml or conf/hdfs-site.xml cannot be used"),
    ] {
        project.write("conf/core-site.xml", core_site);
        let answer = project.emberflow(&["runs", "--db", "hdfs:///x"]).expect(78);
        assert!(answer.stderr.contains(named), "{core_site}: {}", answer.stderr);
    }
}

#[test]
fn there_was_nothing_to_do() {
    let data = "data=empty";
    check(99, &[(&["run", "sensors.yaml", "--param", data, "--empty", "skip"], &[])]);
    check(0, &[(&["run", "sensors.yaml", "--param", data, "--empty", "ok"], &["no rows"])]);
}

#[test]
fn a_wrong_log_filter() {
    let answer = Project::empty().command(&["runs"]).env("EMBERFLOW_LOG", "a=b=c").output().unwrap();
    assert_eq!(answer.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&answer.stderr).contains("EMBERFLOW_LOG=a=b=c"));
}
