//! A real NameNode and two DataNodes, by `tests/hdfs/cluster.py`. The script ends when this
//! process does, for its stdin ends then.

use std::{
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{LazyLock, Mutex, PoisonError},
};

use emberflow::config::SiteConfig;

pub(crate) struct Cluster {
    /// `hdfs://127.0.0.1:PORT`.
    pub(crate) url: String,
    /// Folder of core-site.xml and hdfs-site.xml.
    pub(crate) conf: PathBuf,
    pipe: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    child: Child,
}

/// The cluster that tests share which do no harm to it.
pub(crate) fn shared() -> &'static Cluster {
    static SHARED: LazyLock<Cluster> = LazyLock::new(Cluster::start);
    &SHARED
}

impl Cluster {
    /// A cluster of one's own, to kill parts of.
    pub(crate) fn start() -> Self {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/hdfs/cluster.py");
        let mut child = Command::new("python3")
            .arg(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("missing: Python 3.11 (python3)");
        let stdin = child.stdin.take().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["ready", url, conf] = words[..] else { panic!("the cluster did not start; it says why above") };
        Self { url: url.to_owned(), conf: conf.into(), pipe: Mutex::new((stdin, stdout)), child }
    }

    /// `kill datanode 0`, `pause namenode`, `admin -safemode enter`...
    pub(crate) fn tell(&self, command: &str) {
        let mut pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(pipe.0, "{command}").unwrap();
        let mut answer = String::new();
        pipe.1.read_line(&mut answer).unwrap();
        assert_eq!(answer.trim(), "done", "{command}");
    }

    pub(crate) fn config(&self) -> SiteConfig {
        SiteConfig { hadoop_conf_dir: Some(self.conf.clone()), ..SiteConfig::default() }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SIGTERM lets the script stop its processes; they die with it in any case.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}
