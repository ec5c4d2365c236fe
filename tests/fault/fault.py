#!/usr/bin/env python3
"""Runs pipelines while their processes are killed, frozen or cut off, one schedule per seed.

  tests/fault/fault.py EMBERFLOW FROM [TO]       seeds FROM to TO
  tests/fault/fault.py EMBERFLOW FROM TO --keep  keeps the folders of schedules that fail

A schedule is drawn from its seed: strategy, executors, whom it hits, how and when. Every fifth seed
troubles hosts: executors in network namespaces that join by address, and a link that goes down, or
delays and loses packets. Whatever happens, the run must end within its deadline: complete, or with an
exit code that says "start me again", after which the same command must complete. Then every row must
be there once, the ledger must balance, and no process may be left. Troubling hosts needs root, network
namespaces and tc; such schedules are skipped, and counted, where there are none.

Needs: pyarrow, numpy (tests/requirements.txt).
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [7, 0, 1, 1999, 4000]
DEADLINE_S = 150
STRATEGIES = ["all_reduce", "{ all_reduce: { batches: 4 } }", "sharded", "{ local_sgd: { steps: 8 } }"]
SERVERS = [f"{{ parameter_server: {{ servers: {n}, mode: {mode} }} }}"
           for n, mode in [(1, "sync"), (2, "sync"), (1, "async"), (2, "bounded")]]


def write_rows(folder):
    """Files of very unequal sizes."""
    rng = np.random.default_rng(0)
    mix, first = rng.normal(size=(4, 16)), 0
    for number, rows in enumerate(ROWS):
        x = (rng.normal(size=(rows, 4)) @ mix + 0.1 * rng.normal(size=(rows, 16))).astype(np.float32)
        columns = {"id": np.arange(first, first + rows)} | {f"f{i}": x[:, i] for i in range(16)}
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")
        first += rows


def write_pipeline(folder, strategy, executors, minimum):
    file = folder / "pipeline.yaml"
    file.write_text(f"""version: 1
name: fault
store: out
run: {{ executors: {executors}, min_executors: {minimum} }}
sources:
  rows: {{ path: rows }}
models:
  m:
    from: rows
    features: [{{ columns: ["f*"], scale: standard }}]
    hidden: [64]
    latent: 4
    train: {{ sync: {strategy}, epochs: 40, batch: 64, checkpoint_steps: 50 }}
embeddings:
  vectors: {{ model: m, key: [id] }}
""")
    return file


def children(pid):
    """Executors of a driver, oldest first."""
    try:
        found = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            found += (task / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return sorted({int(child) for child in found})


def alive(pids):
    def state(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "X"
    return [pid for pid in pids if state(pid) not in "XZ"]


class Run:
    """A run of the binary that is watched to its end."""

    def __init__(self, binary, pipeline, log, prefix=(), extra=()):
        self.log = log
        command = [*prefix, binary, "run", str(pipeline), "--output", "json", "--events", str(log) + ".events",
                   *(extra or ["--launcher", "local"])]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=open(log, "ab"), text=True)
        self.seen = set()

    def look(self):
        self.seen.update(children(self.process.pid))
        return self.process.poll()

    def kill(self):
        for pid in [self.process.pid, *alive(self.seen)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def end(self, deadline):
        """Exit code and the last line of stdout; fails where it hangs."""
        while self.look() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"hangs: not ended within {DEADLINE_S} s")
            time.sleep(0.02)
        lines = self.process.stdout.read().strip().splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else {}


def hit(rng, run, frozen):
    """Waits a while, then hits somebody; gives what was done."""
    until = time.monotonic() + rng.uniform(0.05, 3.0)
    while time.monotonic() < until:
        if run.look() is not None:
            return "nobody, it had ended"
        time.sleep(0.01)
    executors = alive(children(run.process.pid))
    targets = [("an executor", pid) for pid in executors] * 2 + [("the driver", run.process.pid)]
    who, pid = rng.choice(targets)
    how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return "nobody, it had ended"
    if how == signal.SIGSTOP:
        frozen.append((pid, time.monotonic() + rng.choice([1.0, 20.0])))
    return f"{who} by {how.name}"


def thaw(frozen):
    for pid, until in list(frozen):
        if time.monotonic() > until:
            frozen.remove((pid, until))
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass


class Hosts:
    """Executors on hosts of their own, network namespaces behind a bridge; each is started again when
    it ends, as systemd would."""

    def __init__(self, binary, seed, folder, count):
        self.binary, self.folder = binary, folder
        self.net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        # Names of links have 15 characters at most; what was removed may linger for a moment.
        unique = f"{os.getpid() % 10000}s{seed % 1000}"
        self.names = [f"e{unique}-{n}" for n in range(count)]
        self.bridge = f"b{unique}"
        self.port, self.executors = None, {}
        self.ip(f"link add {self.bridge} type bridge")
        self.ip(f"addr add {self.net}.1/24 dev {self.bridge}")
        self.ip(f"link set {self.bridge} up")
        for n, name in enumerate(self.names):
            self.ip(f"netns add {name}")
            self.ip(f"link add v{name} type veth peer name eth0 netns {name}")
            self.ip(f"link set v{name} master {self.bridge} up")
            self.ip(f"-n {name} addr add {self.net}.{n + 2}/24 dev eth0")
            self.ip(f"-n {name} link set eth0 up")
            self.ip(f"-n {name} link set lo up")
        (folder / "token").write_text("a secret of enough bytes")
        with socket.socket() as free:
            free.bind((f"{self.net}.1", 0))
            self.port = free.getsockname()[1]
        self.settings = folder / "settings.yaml"
        self.settings.write_text(f"listen: {self.net}.1:{self.port}\ntoken_file: {folder}/token\nallow_plain: yes\n")

    @staticmethod
    def ip(arguments):
        subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)

    def keep_up(self):
        for name in self.names:
            executor = self.executors.get(name)
            if executor is None or executor.poll() is not None:
                command = ["ip", "netns", "exec", name, self.binary, "executor", "--config", str(self.settings),
                           "--join", f"{self.net}.1:{self.port}"]
                log = open(self.folder / "log", "ab")
                self.executors[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def link(self, name, state):
        self.ip(f"link set v{name} {state}")

    def slow(self, name):
        """Delays and loses what a host sends; where the kernel cannot, a narrow way out that drops
        what does not fit."""
        for how in ["netem delay 30ms 10ms loss 2%", "tbf rate 2mbit burst 16kb latency 100ms"]:
            command = ["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root", *how.split()]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return f"one slowed down ({how})"
        raise AssertionError("tc can slow nothing down")

    def mend(self, name):
        self.link(name, "up")
        command = ["ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", "eth0", "root"]
        # Where nothing was slowed down, there is nothing to delete.
        subprocess.run(command, capture_output=True)

    def close(self):
        for executor in self.executors.values():
            executor.kill()
            executor.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


def cut_off(binary, seed, folder):
    """A run whose executors are on other hosts, one of which is cut off or slowed down, for a while or
    for good."""
    rng = random.Random(seed)
    strategy, executors = rng.choice(STRATEGIES), rng.choice([2, 3])
    minimum = rng.randint(1, executors)
    rows = folder / "rows"
    rows.mkdir()
    write_rows(rows)
    pipeline = write_pipeline(folder, strategy, executors, minimum)
    hosts = Hosts(binary, seed, folder, executors)
    told = [f"{strategy}, {minimum} to {executors} hosts"]
    try:
        for attempt in range(4):
            run = Run(binary, pipeline, folder / "log", extra=["--launcher", "static", "--config", str(hosts.settings)])
            deadline = time.monotonic() + DEADLINE_S
            victim = rng.choice(hosts.names)
            cut = time.monotonic() + rng.uniform(0.5, 2.5)
            slowly = rng.random() < 0.4
            # What is only slow ends in time if it is not slow for good.
            mended = cut + rng.choice([2.0, 20.0] if slowly else [2.0, 20.0, 1000.0])
            while run.look() is None and time.monotonic() < deadline:
                hosts.keep_up()
                if cut and time.monotonic() > cut and attempt == 0:
                    if slowly:
                        told.append(hosts.slow(victim))
                    else:
                        hosts.link(victim, "down")
                        told.append("one cut off")
                    cut = None
                if mended and time.monotonic() > mended:
                    hosts.mend(victim)
                    mended = None
                time.sleep(0.02)
            code, result = run.end(deadline)
            told.append(f"exit {code}")
            assert code in (0, 75), f"exit {code}: {result}"
            hosts.mend(victim)
            if code == 0:
                break
        assert code == 0, "did not complete"
        return "; ".join(told) + f"; loss {check(folder, result):.4f}"
    finally:
        hosts.close()


def can_cut_off():
    name = f"ef{os.getpid()}-try"
    made = shutil.which("ip") and subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return bool(made)


def check(folder, result):
    """Every row once, and the ledger balances."""
    total = sum(ROWS)
    location = result["embeddings"][0]["location"].removeprefix("file://")
    ids = pq.read_table(location, columns=["id"])["id"].to_numpy()
    assert len(ids) == total, f"{len(ids)} rows of {total}"
    assert len(np.unique(ids)) == total, "a row stands twice"
    record = json.loads(next((folder / "out/_runs").glob("*/record.json")).read_text())
    assert record["status"] == "succeeded", record["status"]
    for ledger in record["ledgers"]:
        counted = ledger["trained"] + ledger["held_out"] + ledger["embedded"] + sum(ledger["rejected"].values())
        assert ledger["input"] == counted == total, ledger
    epochs = record["models"][0]["epochs"]
    assert [epoch["rows"] for epoch in epochs] == [total] * 40, "an epoch lacks rows"
    return epochs[-1]["loss"]


def schedule(binary, seed, folder):
    rng = random.Random(seed)
    strategy = rng.choice(STRATEGIES + SERVERS)
    executors = rng.choice([2, 3, 4])
    minimum = rng.randint(1, executors)
    rows = folder / "rows"
    rows.mkdir()
    write_rows(rows)
    pipeline = write_pipeline(folder, strategy, executors, minimum)
    told, frozen, everybody = [f"{strategy}, {minimum} to {executors} executors"], [], set()
    for attempt in range(6):
        run = Run(binary, pipeline, folder / "log")
        deadline = time.monotonic() + DEADLINE_S
        for _ in range(rng.choice([1, 1, 2]) if attempt < 2 else 0):
            told.append(hit(rng, run, frozen))
        while run.look() is None and time.monotonic() < deadline:
            thaw(frozen)
            time.sleep(0.02)
        code, result = run.end(deadline)
        everybody |= run.seen
        told.append(f"exit {code}")
        assert code in (0, 75, 143, -9, -15), f"exit {code}: {result}"
        if code == 0:
            break
    assert code == 0, "did not complete"
    loss = check(folder, result)
    for pid, _ in frozen:
        thaw([(pid, 0)])
    time.sleep(0.5)
    left = alive(everybody)
    assert not left, f"processes are left: {left}"
    return "; ".join(told) + f"; loss {loss:.4f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    parser.add_argument("--keep", action="store_true", help="keep the folders of schedules that fail")
    args = parser.parse_args()
    failed, skipped, hosts = 0, 0, can_cut_off()
    for seed in range(args.first, (args.last or args.first) + 1):
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f"fault-{seed}-"))
        started = time.monotonic()
        try:
            if seed % 5 == 0 and not hosts:
                skipped += 1
                continue
            story = (cut_off if seed % 5 == 0 else schedule)(args.binary, seed, folder)
            print(f"seed {seed}: {story} ({time.monotonic() - started:.0f} s)", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: FAILED: {error}", flush=True)
            print("".join(f"    {line}\n" for line in (folder / "log").read_text().splitlines()[-15:]), flush=True)
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if skipped:
        print(f"{skipped} schedules skipped: no network namespaces here (they need root and iproute2)")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
