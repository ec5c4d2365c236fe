//! Executors as processes: the same result as threads give, and what becomes of a run when they are
//! killed, come late, or are not let in.

use std::{
    fs,
    io::Write,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::command::{Answer, command, emberflow, spawn, wave, write_features};

/// A folder with rows and a pipeline over them.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(files: &[usize], run: &str, train: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut first = 0;
        for (index, rows) in files.iter().enumerate() {
            let path = folder.path().join(format!("rows/part-{index}.parquet"));
            write_features(&path, *rows, |row, feature| wave(row + first, feature));
            first += rows;
        }
        let text = format!(
            "version: 1\nname: fleet\nstore: ${{out}}\nrun: {{ {run} }}\nparams:\n  out: {{ type: path, default: out }}\n\
             sources:\n  rows: {{ path: rows }}\nmodels:\n  m:\n    from: rows\n    features: [{{ columns: [\"f*\"] }}]\n    \
             hidden: [8]\n    latent: 2\n    train: {{ batch: 32, {train} }}\nembeddings:\n  vectors: {{ model: m, key: [id] }}\n"
        );
        fs::write(folder.path().join("pipeline.yaml"), text).unwrap();
        Self { folder }
    }

    /// The same with another line in its file.
    fn with(self, line: &str, other: &str) -> Self {
        let file = self.path("pipeline.yaml");
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(line));
        fs::write(file, text.replace(line, other)).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn args(&self, out: &str, more: &[&str]) -> Vec<String> {
        let file = self.path("pipeline.yaml").display().to_string();
        let out = format!("out={}", self.path(out).display());
        let mut args =
            vec!["run".to_owned(), file, "--param".to_owned(), out, "--output".to_owned(), "json".to_owned()];
        args.extend(more.iter().map(|more| (*more).to_owned()));
        args
    }

    fn run(&self, out: &str, more: &[&str]) -> Answer {
        let args = self.args(out, more);
        emberflow(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn spawn(&self, out: &str, more: &[&str]) -> Child {
        let args = self.args(out, more);
        spawn(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn record(&self, out: &str) -> Value {
        let runs = fs::read_dir(self.path(out).join("_runs")).unwrap().next().unwrap().unwrap().path();
        serde_json::from_str(&fs::read_to_string(runs.join("record.json")).unwrap()).unwrap()
    }
}

fn losses(record: &Value) -> Vec<f64> {
    record["models"][0]["epochs"].as_array().unwrap().iter().map(|epoch| epoch["loss"].as_f64().unwrap()).collect()
}

fn assert_near(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() <= 1e-4 * expected, "{got}, not {expected}");
    }
}

/// Every row of every epoch, and every embedding.
fn assert_balanced(record: &Value, rows: u64) {
    assert_eq!(record["status"], "succeeded");
    for epoch in record["models"][0]["epochs"].as_array().unwrap() {
        assert_eq!(epoch["rows"], rows);
    }
    assert_eq!(record["embeddings"][0]["rows"], rows);
}

/// Child processes of a driver.
fn executors(driver: &Child) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{}/task", driver.id())).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<String> = children.collect();
    children.iter().flat_map(|pids| pids.split_whitespace()).map(|pid| pid.parse().unwrap()).collect()
}

fn kill(pid: i32) {
    Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
}

fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        if let Some(found) = ready() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} does not happen");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn processes_come_to_what_threads_come_to_over_unequal_and_empty_files() {
    let rows = [0, 1, 7, 100_003];
    for train in [
        "sync: all_reduce",
        "sync: sharded",
        "sync: { parameter_server: { servers: 2 } }",
        "sync: { local_sgd: { steps: 1 } }, optimizer: sgd, learning_rate: 0.1",
    ] {
        let bench = Bench::new(&rows, "executors: 3", &format!("epochs: 2, {train}")).with("batch: 32", "batch: 1024");
        bench.run("threads", &[]).expect(0);
        bench.run("processes", &["--launcher", "local"]).expect(0);
        let (threads, processes) = (bench.record("threads"), bench.record("processes"));
        assert_near(&losses(&processes), &losses(&threads));
        for record in [threads, processes] {
            assert_balanced(&record, rows.iter().sum::<usize>() as u64);
        }
    }
    for train in ["sync: { parameter_server: { mode: async } }", "sync: { parameter_server: { mode: bounded } }"] {
        let bench = Bench::new(&rows, "executors: 3, launcher: local", &format!("epochs: 2, {train}"));
        let bench = bench.with("batch: 32", "batch: 1024");
        bench.run("out", &[]).expect(0);
        assert_balanced(&bench.record("out"), rows.iter().sum::<usize>() as u64);
    }
}

#[test]
fn what_is_left_open_is_measured_decided_and_kept() {
    let bench = Bench::new(&[2000, 3], "executors: auto, max_executors: 2", "epochs: 3, sync: auto");
    for (out, more) in [("threads", &[][..]), ("processes", &["--launcher", "local"])] {
        bench.run(out, more).expect(0);
        let record = bench.record(out);
        assert_balanced(&record, 2003);
        let decision = &record["decisions"][0];
        assert!([1, 2].contains(&decision["executors"].as_u64().unwrap()), "{decision}");
        assert_eq!(decision["executors"], record["executors"]);
        assert_eq!(decision["executors"], record["models"][0]["ranks"].as_array().unwrap().len());
        assert!(decision["single_rows_per_s"].as_f64().unwrap() > 0.0, "{decision}");
        assert!(decision["why"].as_str().unwrap().contains("one executor alone was measured at"), "{decision}");
        let speed_up = record["metrics"]["speed_up"].as_f64().unwrap();
        assert!(speed_up > 0.0, "{speed_up}");
    }
}

#[test]
fn partitions_that_are_left_open_are_shared_evenly() {
    let bench = Bench::new(&[3000, 900], "executors: 5", "epochs: 2");
    let bench = bench.with("latent: 2", "latent: 2\n    partition: auto");
    bench.run("out", &[]).expect(0);
    let record = bench.record("out");
    assert_balanced(&record, 3900);
    // 8 partitions would give a fifth executor half of what others have.
    let ranks: Vec<u64> =
        record["models"][0]["ranks"].as_array().unwrap().iter().map(|rank| rank["rows"].as_u64().unwrap()).collect();
    assert_eq!(ranks.len(), 5);
    assert!(ranks.iter().all(|rows| (1400..=1720).contains(rows)), "{ranks:?}");
    assert!(record["decisions"][0]["partitions"].as_u64().unwrap() > 8);
    let out = format!("out={}", bench.path("out").display());
    let answer = emberflow(&["explain", &bench.path("pipeline.yaml").display().to_string(), "--param", &out]).expect(0);
    assert!(answer.stdout.contains("left to a measurement: partition"), "{}", answer.stdout);
    assert!(answer.stdout.contains("decided last: 5 executors by all_reduce"), "{}", answer.stdout);
}

/// A command beside any run, as JSON; it leaves nothing in the store.
fn aside(bench: &Bench, command: &str, more: &[&str]) -> Value {
    let (file, out) =
        (bench.path("pipeline.yaml").display().to_string(), format!("out={}", bench.path("out").display()));
    let args = [command, &file, "--param", &out, "--output", "json"];
    let answer = emberflow(&[&args[..], more].concat()).expect(0);
    assert_eq!(fs::read_dir(bench.path("out")).map_or(0, Iterator::count), 0);
    serde_json::from_str(&answer.stdout).unwrap()
}

#[test]
fn every_strategy_is_verified_beside_one_executor() {
    let bench = Bench::new(&[2000, 3], "seed: 1", "epochs: 3");
    let verified = aside(&bench, "verify", &["--executors", "2", "--launcher", "local"]);
    let strategies = verified["models"][0]["strategies"].as_array().unwrap();
    let synchronous = strategies.iter().filter(|strategy| strategy["synchronous"] == true);
    assert_eq!((strategies.len(), synchronous.clone().count()), (8, 4));
    for strategy in synchronous {
        assert!(strategy["largest_difference"].as_f64().unwrap() < 1e-4, "{strategy}");
    }
    let rounded = strategies[1]["largest_difference"].as_f64().unwrap();
    assert!(rounded > 0.0 && rounded < 1e-4, "{rounded}");
    let exchanged = strategies.iter().filter(|strategy| strategy["bytes_per_step"].as_f64().unwrap() > 0.0);
    assert_eq!(exchanged.count(), 6);
}

#[test]
fn fleets_of_any_size_are_simulated() {
    let bench = Bench::new(&[2000, 3], "seed: 1", "epochs: 3");
    let simulated = aside(&bench, "simulate", &["--executors", "1,2,10000", "--check", "1,2"]);
    let model = &simulated["models"][0];
    let ways = model["ways"].as_array().unwrap();
    assert_eq!(ways.len(), 3 * 6);
    assert!(ways.iter().all(|way| way["rows_per_s"].as_f64().unwrap() > 0.0), "{ways:?}");
    let checks = model["checks"].as_array().unwrap();
    assert_eq!(checks.iter().map(|check| check["executors"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    // Two hosts, joined by a network that costs nothing and by one that costs a second and more.
    let two = |bandwidth, latency| {
        let link = ["--executors", "2", "--bandwidth", bandwidth, "--latency", latency];
        aside(&bench, "simulate", &link)["models"][0]["ways"][0]["speed_up"].as_f64().unwrap()
    };
    let (fast, slow) = (two("1000", "0.001"), two("0.001", "100000"));
    assert!(fast > 10.0 * slow && slow < 0.1, "{fast}, {slow}");
}

#[test]
fn a_run_goes_on_without_the_one_that_it_loses() {
    let bench = Bench::new(&[4000], "executors: 4, min_executors: 2", "epochs: 30");
    bench.run("whole", &[]).expect(0);
    let driver =
        bench.spawn("lossy", &["--launcher", "local", "--events", &bench.path("events").display().to_string()]);
    let trained = || fs::read_to_string(bench.path("events")).unwrap_or_default().contains("\"epoch\":2,");
    until("an epoch", || trained().then_some(()));
    let before = executors(&driver);
    assert_eq!(before.len(), 4);
    kill(before[1]);
    let answer = Answer::from(driver.wait_with_output().unwrap()).expect(0);
    assert!(answer.stderr.contains("is lost"), "{}", answer.stderr);
    let (lossy, whole) = (bench.record("lossy"), bench.record("whole"));
    assert_balanced(&lossy, 4000);
    assert_near(&losses(&lossy), &losses(&whole));
    until("their end", || before.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()).then_some(()));
}

#[test]
fn a_driver_that_is_killed_leaves_no_process_and_the_rerun_resumes() {
    let bench = Bench::new(&[4000], "executors: 2, launcher: local", "epochs: 30");
    let events = bench.path("events").display().to_string();
    let mut driver = bench.spawn("out", &["--events", &events]);
    let trained = || fs::read_to_string(bench.path("events")).unwrap_or_default().contains("\"epoch\":3,");
    until("an epoch", || trained().then_some(()));
    let children = executors(&driver);
    driver.kill().unwrap();
    driver.wait().unwrap();
    let gone = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z"));
    until("their end", || children.iter().all(gone).then_some(()));
    bench.run("out", &["--events", &events]).expect(0);
    assert_balanced(&bench.record("out"), 4000);
    assert_eq!(losses(&bench.record("out")).len(), 30);
}

/// A certificate authority, and a certificate for this machine.
fn certificates(folder: &Path) {
    let openssl = |args: &str| {
        let done = Command::new("openssl").args(args.split(' ')).current_dir(folder).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&format!("req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=authority -days 2"));
    openssl(&format!("req {key} -keyout node.key -out node.csr -subj /CN=node"));
    openssl("x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out node.pem -days 2 -extfile names");
}

fn settings(bench: &Bench, name: &str, token: &str, more: &str) -> String {
    let token_file = bench.path(&format!("{name}.token"));
    fs::write(&token_file, token).unwrap();
    let file = bench.path(&format!("{name}.yaml"));
    fs::write(&file, format!("token_file: {}\n{more}", token_file.display())).unwrap();
    file.display().to_string()
}

fn executor(settings: &str, address: &str) -> Child {
    let mut command = command(&["executor", "--config", settings, "--join", address]);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn executors_join_by_address_through_tls_and_strangers_are_turned_away() {
    let bench = Bench::new(&[500], "executors: 2, launcher: static", "epochs: 3");
    certificates(bench.folder.path());
    let pem = |name: &str| bench.path(name).display().to_string();
    let tls = format!(
        "tls_certificate: {}\ntls_key: {}\ntls_authority: {}\n",
        pem("node.pem"),
        pem("node.key"),
        pem("ca.pem")
    );
    let good = settings(&bench, "good", "a secret of enough bytes", &format!("{tls}listen: 127.0.0.1:0\n"));
    let other = settings(&bench, "other", "another secret of bytes", &tls);
    let plain = settings(&bench, "plain", "a secret of enough bytes", "");
    let events = bench.path("events");
    let driver = bench.spawn("out", &["--config", &good, "--events", &events.display().to_string()]);
    let address = until("the driver listening", || {
        let told = fs::read_to_string(&events).ok()?;
        let (_, rest) = told.split_once("executors to join at ")?;
        rest.split('"').next().map(str::to_owned)
    });
    let scanner = TcpStream::connect(&address).unwrap();
    (&scanner).write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    let idle = TcpStream::connect(&address).unwrap();
    let refused = |settings: &str, code: i32, reason: &str| {
        let answer = Answer::from(executor(settings, &address).wait_with_output().unwrap());
        assert_eq!(answer.code, Some(code), "{answer:?}");
        assert!(answer.stderr.contains(reason), "{answer:?}");
    };
    refused(&other, 78, "another token");
    refused(&plain, 75, "");
    let joined: Vec<Child> = (0..2).map(|_| executor(&good, &address)).collect();
    Answer::from(driver.wait_with_output().unwrap()).expect(0);
    for child in joined {
        assert!(child.wait_with_output().unwrap().status.success());
    }
    assert_balanced(&bench.record("out"), 500);
    assert_eq!(bench.record("out")["models"][0]["ranks"].as_array().unwrap().len(), 2);
    drop((scanner, idle));
}

#[test]
fn another_machine_needs_tls_and_a_token() {
    let bench = Bench::new(&[10], "executors: 2, launcher: static", "epochs: 1");
    let open = settings(&bench, "open", "a secret of enough bytes", "listen: 0.0.0.0:0\n");
    let answer = bench.run("out", &["--config", &open]).expect(78);
    assert!(answer.stderr.contains("is not on this machine and there is no TLS"), "{}", answer.stderr);
    let answer = bench.run("out", &[]).expect(78);
    assert!(answer.stderr.contains("there is no token; set `token_file`"), "{}", answer.stderr);
}

/// A handful of the schedules that `make fault` runs by the dozen.
#[test]
fn schedules_of_kills_end_with_every_row_once() {
    let python = std::env::var("EMBERFLOW_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fault/fault.py");
    let mut command = Command::new(python);
    command.arg(script).arg(env!("CARGO_BIN_EXE_emberflow")).args(["5", "9"]);
    let answer = Answer::from(command.output().unwrap());
    assert_eq!(answer.code, Some(0), "{}{}", answer.stdout, answer.stderr);
}
