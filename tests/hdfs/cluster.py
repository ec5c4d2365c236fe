#!/usr/bin/env python3
"""A real NameNode and two DataNodes on loopback, for tests and for trying things out.

  tests/hdfs/cluster.py [--folder DIR]

Prints `ready hdfs://127.0.0.1:PORT CONF_DIR` once two DataNodes live, then takes one command a
line on stdin and answers each with one line:

  kill datanode N | kill namenode | pause namenode | resume namenode
  admin ARGS...       runs hdfs dfsadmin ARGS

It ends, and stops what it started, at the end of stdin: also when its parent is killed.
Needs java (JDK 17) and, the first time, mvn, which fetches Hadoop's jars into the cache.
"""
import argparse, ctypes, glob, json, os, pathlib, shutil, signal, socket, subprocess, sys, tempfile, time, urllib.request

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "emberflow" / "hdfs"
JARS = CACHE / "jars-3.5.0"
READY_S = 60


def need(program, what):
    if not shutil.which(program):
        sys.exit(f"missing: {what} ({program})")


def fetch_jars():
    need("java", "a Java runtime, JDK 17")
    if JARS.exists():
        return
    need("mvn", "Maven")
    aside = JARS.with_name(f"{JARS.name}.{os.getpid()}")
    pom = pathlib.Path(__file__).with_name("pom.xml")
    command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={aside}"]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        sys.exit("mvn could not fetch Hadoop's jars")
    try:
        aside.rename(JARS)
    except OSError:  # another start was faster
        shutil.rmtree(aside)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def write_xml(file, settings):
    rows = "".join(f"<property><name>{k}</name><value>{v}</value></property>\n" for k, v in settings.items())
    file.write_text(f'<?xml version="1.0"?>\n<configuration>\n{rows}</configuration>\n')


def wait_until_frozen(pid):
    """Threads of a stopped process may work on for a moment."""
    def runs(task):
        with open(f"{task}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "T"

    while any(runs(task) for task in glob.glob(f"/proc/{pid}/task/*")):
        time.sleep(0.01)


class Cluster:
    def __init__(self, folder):
        self.folder = folder
        rpc, http = free_ports(2)
        self.url, self.http = f"hdfs://127.0.0.1:{rpc}", f"127.0.0.1:{http}"
        self.processes = {}
        self.conf = folder / "conf"
        self.write_conf(self.conf, folder / "name")

    def write_conf(self, conf, data):
        conf.mkdir(parents=True)
        write_xml(conf / "core-site.xml", {"fs.defaultFS": self.url, "hadoop.tmp.dir": data})
        write_xml(conf / "hdfs-site.xml", {
            "dfs.namenode.http-address": self.http,
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.namenode.safemode.extension": 0,
            "dfs.namenode.heartbeat.recheck-interval": 1000,
            "dfs.heartbeat.interval": 1,
            "dfs.replication": 2,
            "dfs.blocksize": 8 << 20,
            "dfs.datanode.address": "127.0.0.1:0",
            "dfs.datanode.http.address": "127.0.0.1:0",
            "dfs.datanode.ipc.address": "127.0.0.1:0",
            "dfs.client.socket-timeout": 5000,
        })
        return conf

    def java(self, conf, main, *args):
        return ["java", "-Xmx512m", "-Dhadoop.root.logger=WARN,console", "-cp", f"{conf}:{JARS}/*", main, *args]

    def start(self, name, conf, main):
        log = open(self.folder / f"{name}.log", "w")
        die_with_parent = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        self.processes[name] = subprocess.Popen(
            self.java(conf, main), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent)

    def run(self):
        namenode = "org.apache.hadoop.hdfs.server.namenode.NameNode"
        format = self.java(self.conf, namenode, "-format", "-nonInteractive")
        done = subprocess.run(format, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"the NameNode could not be formatted:\n{done.stderr[-2000:]}")
        self.start("namenode", self.conf, namenode)
        for i in range(2):
            conf = self.write_conf(self.folder / f"conf-datanode-{i}", self.folder / f"data-{i}")
            self.start(f"datanode {i}", conf, "org.apache.hadoop.hdfs.server.datanode.DataNode")
        self.wait_until_ready()

    def wait_until_ready(self):
        deadline = time.monotonic() + READY_S
        query = f"http://{self.http}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        while time.monotonic() < deadline:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    sys.exit(f"{name} ended:\n{(self.folder / f'{name}.log').read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(query, timeout=2) as answer:
                    if json.load(answer)["beans"][0]["NumLiveDataNodes"] == 2:
                        return
            except (OSError, LookupError, ValueError):
                pass
            time.sleep(0.1)
        sys.exit(f"no two DataNodes within {READY_S} s; logs in {self.folder}")

    def stop(self):
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()

    def obey(self, command):
        signals = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "resume": signal.SIGCONT}
        verb, _, rest = command.partition(" ")
        if verb in signals and rest in self.processes:
            self.processes[rest].send_signal(signals[verb])
            if verb == "kill":
                self.processes[rest].wait()
            if verb == "pause":
                wait_until_frozen(self.processes[rest].pid)
            return "done"
        if verb == "admin":
            main = self.java(self.conf, "org.apache.hadoop.hdfs.tools.DFSAdmin", *rest.split())
            done = subprocess.run(main, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            return "done" if done.returncode == 0 else "failed: " + " ".join((done.stdout + done.stderr).split())
        return f"failed: no such command: {command}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, help="where its data go; by default a temporary folder")
    args = parser.parse_args()
    fetch_jars()
    with tempfile.TemporaryDirectory(prefix="emberflow-hdfs-", ignore_cleanup_errors=True) as temporary:
        cluster = Cluster(args.folder or pathlib.Path(temporary))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            cluster.run()
            print(f"ready {cluster.url} {cluster.conf}", flush=True)
            for line in sys.stdin:
                print(cluster.obey(line.strip()), flush=True)
        except KeyboardInterrupt:
            pass
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
