#!/usr/bin/env python3
"""Runs jobs with every fixed choice of executors and strategy, and with `auto`, and prints ratios.

Called by run.sh. Rows/s are those of all epochs of a training, without start and end; each figure is the
median over the turns, in which all choices take part one after the other. Jobs on several hosts need root:
each executor gets a core and a network namespace of its own, whose link `tc` bounds.
"""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
LOCAL_SGD = "{ local_sgd: { steps: 8 } }"
FIXED = {
    "one executor": (1, "all_reduce", "none"),
    "2, all_reduce": (2, "all_reduce", "none"),
    "2, sharded": (2, "sharded", "none"),
    "2, all_reduce, bf16": (2, "all_reduce", "bf16"),
    "2, local_sgd": (2, LOCAL_SGD, "none"),
    "2, local_sgd, bf16": (2, LOCAL_SGD, "bf16"),
}
# Name: source, columns, hidden layers, batch, epochs, megabits per second between hosts of one core each;
# without these, executors share this machine.
JOBS = {
    "tiny model": ("table", 'columns: ["f*"]', [8], 256, 4, None),
    "wide model, 2 hosts": ("digits", "column: pixels, scale: { divide: 255 }", [1024], 256, 3, 10_000),
    "slow link, 2 hosts": ("digits", "column: pixels, scale: { divide: 255 }", [256], 256, 5, 400),
}


def pipeline(folder, job, sources, choice):
    source, features, hidden, batch, epochs, _ = JOBS[job]
    executors, sync, compression = choice or ("auto, max_executors: 2", "auto", "none")
    compression = "" if choice is None else f"compression: {compression}, "
    file = folder / "pipeline.yaml"
    file.write_text(f"""version: 1
name: choose
store: out
run: {{ executors: {executors} }}
sources:
  rows: {{ path: {sources[source]} }}
models:
  m:
    from: rows
    features: [{{ {features} }}]
    hidden: {hidden}
    latent: 8
    train: {{ sync: {sync}, {compression}batch: {batch}, epochs: {epochs} }}
embeddings:
  vectors: {{ model: m, key: [id] }}
""")
    return file


class Hosts:
    """Two hosts, each with one core, whose way out is so many megabits per second."""

    def __init__(self, binary, folder, megabits):
        self.binary, self.names = binary, [f"ef{os.getpid()}-{n}" for n in range(2)]
        self.bridge, self.net = f"b{os.getpid()}", "10.199.0"
        for command in [f"ip link add {self.bridge} type bridge", f"ip addr add {self.net}.1/24 dev {self.bridge}",
                        f"ip link set {self.bridge} up"]:
            subprocess.run(command.split(), check=True)
        for n, name in enumerate(self.names):
            inside = f"ip netns exec {name}"
            for command in [f"ip netns add {name}", f"ip link add v{name} type veth peer name eth0 netns {name}",
                            f"ip link set v{name} master {self.bridge} up",
                            f"ip -n {name} addr add {self.net}.{n + 2}/24 dev eth0", f"ip -n {name} link set eth0 up",
                            f"ip -n {name} link set lo up",
                            f"{inside} tc qdisc add dev eth0 root tbf rate {megabits}mbit burst 64kb latency 50ms"]:
                subprocess.run(command.split(), check=True)
        (folder / "token").write_text("a secret of enough bytes")
        with socket.socket() as free:
            free.bind((f"{self.net}.1", 0))
            self.address = f"{self.net}.1:{free.getsockname()[1]}"
        self.settings = folder / "settings.yaml"
        self.settings.write_text(f"listen: {self.address}\ntoken_file: {folder}/token\nallow_plain: yes\n")

    @contextlib.contextmanager
    def joined(self, count):
        started = []
        for core, name in enumerate(self.names[:count]):
            host = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
            command = [*host, "taskset", "-c", str(core), self.binary, "executor", "--config", str(self.settings),
                       "--join", self.address]
            started.append(subprocess.Popen(command, stdout=sys.stderr))
        try:
            yield ["--launcher", "static", "--config", str(self.settings)]
        finally:
            for executor in started:
                executor.kill()
                executor.wait()

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name])
        subprocess.run(["ip", "link", "del", self.bridge])


def measure(binary, folder, job, sources, choice, hosts):
    """Rows per second of a training, and what was chosen."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    file = pipeline(folder, job, sources, choice)
    joined = hosts.joined(choice[0] if choice else 2) if hosts else contextlib.nullcontext(["--launcher", "local"])
    with joined as how:
        command = [binary, "run", str(file), "--quiet", "--output", "json", *how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    record = json.loads(next((folder / "out/_runs").glob("*/record.json")).read_text())
    epochs = record["models"][0]["epochs"]
    speed = sum(epoch["rows"] for epoch in epochs) / sum(epoch["elapsed_s"] for epoch in epochs)
    return speed, record["decisions"][0]["why"] if choice is None else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=JOBS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="emberflow-choose-") as scratch:
        scratch = pathlib.Path(scratch)
        table = scratch / "table"
        make = [sys.executable, HERE.parent / "make_table.py", "--rows", "300000", "--out", table]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        sources = {"table": table, "digits": HERE.parents[1] / "pipelines/data/mnist-t10k.parquet"}
        for job in [args.only] if args.only else JOBS:
            compare(args, scratch, job, sources)


def compare(args, scratch, job, sources):
    megabits = JOBS[job][-1]
    if megabits and os.geteuid():
        print(f"## {job}: skipped, for it needs root\n")
        return
    hosts = Hosts(args.binary, scratch, megabits) if megabits else None
    choices = {**FIXED, "auto": None}
    speeds, reasons = {name: [] for name in choices}, set()
    try:
        for _ in range(args.turns):
            for name, choice in choices.items():
                speed, why = measure(args.binary, scratch, job, sources, choice, hosts)
                speeds[name].append(speed)
                reasons.add(why)
    finally:
        if hosts:
            hosts.close()
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    best = max(speed for name, speed in medians.items() if name != "auto")
    print(f"## {job}; load {os.getloadavg()[0]:.1f}\n\n| choice | rows/s | lowest | highest | of the best fixed |")
    print("| --- | --- | --- | --- | --- |")
    for name, found in speeds.items():
        print(f"| {name} | {medians[name]:,.0f} | {min(found):,.0f} | {max(found):,.0f} | {medians[name] / best:.2f} |")
    print("\n" + "\n".join(f"auto: {why}" for why in sorted(reasons) if why) + "\n", flush=True)


if __name__ == "__main__":
    main()
