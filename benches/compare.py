#!/usr/bin/env python3
"""Runs the same jobs with Emberflow and with PyTorch, in turn, and prints both beside each other.

Called by run.sh. Medians over the runs; a ratio above 1 says that Emberflow is faster.
"""
import argparse, json, os, pathlib, platform, shutil, statistics, subprocess, sys, tempfile, time

HERE = pathlib.Path(__file__).resolve().parent
CORES = len(os.sched_getaffinity(0))
# Set on some machines for old builds of OpenBLAS; PyTorch does not need them.
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}


class Job:
    def __init__(self, name, pipeline, data, params, peer, batch):
        self.name, self.pipeline, self.data, self.params = name, pipeline, data, params
        self.peer, self.batch = peer, batch

    def emberflow(self, binary, executors, out):
        params = {"data": self.data, "out": out, **self.params}
        given = [word for name, value in params.items() for word in ("--param", f"{name}={value}")]
        command = [binary, "run", self.pipeline, *given, "--executors", executors, "--output", "json", "--quiet"]
        result, wall_s, peak = measure(command)
        metrics = result["metrics"]
        return {"train": metrics["train_rows_per_s"], "embed": metrics["embed_rows"] / metrics["embed_s"],
                "loss": result["models"][0]["loss"], "peak": peak, "wall": wall_s}

    def pytorch(self, workers, out):
        # The rows of one step are shared by the workers, the cores too.
        command = [sys.executable, HERE / "peer_torch.py", "--data", self.data, *self.peer, "--out", out,
                   "--batch", self.batch // workers, "--workers", workers, "--threads", max(1, CORES // workers)]
        result, wall_s, peak = measure(command)
        return {"train": result["train_rows_per_s"], "embed": result["embed_rows_per_s"],
                "loss": result["last_loss"], "peak": peak, "wall": wall_s}


def measure(command):
    """The last line of stdout as JSON, seconds, and the most memory (bytes) of one process."""
    started = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, env=ENVIRONMENT, text=True)
    stdout = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    if status != 0:
        sys.exit(f"failed ({os.waitstatus_to_exitcode(status)}): {' '.join(map(str, command))}")
    return json.loads(stdout.splitlines()[-1]), wall_s, usage.ru_maxrss * 1024


def jobs(args, scratch):
    digits = HERE.parent / "pipelines/data/mnist-t10k.parquet"
    if args.only in (None, "mnist"):
        peer = ["--column", "pixels", "--scale", 255, "--hidden", 256, "--latent", 32, "--epochs", 10]
        yield Job("MNIST: 10,000 x 784, 784-256-32-256-784, batch 256, 10 epochs",
                  HERE.parent / "pipelines/mnist.yaml", digits, {"epochs": 10}, peer, 256)
    if args.only in (None, "table"):
        table = scratch / "table"
        subprocess.run([sys.executable, HERE / "make_table.py", "--rows", str(args.rows), "--out", table], check=True)
        peer = ["--hidden", 32, "--latent", 8, "--epochs", 3]
        yield Job(f"table: {args.rows:,} x 64, 64-32-8-32-64, batch 1024, 3 epochs",
                  HERE / "table.yaml", table, {}, peer, 1024)


def compare(job, args, scratch):
    ways = {"emberflow, 1 executor": lambda out: job.emberflow(args.binary, 1, out),
            "pytorch, 1 process": lambda out: job.pytorch(1, out)}
    if CORES > 1:
        ways[f"emberflow, {CORES} executors"] = lambda out: job.emberflow(args.binary, CORES, out)
        ways[f"pytorch DDP, {CORES} processes"] = lambda out: job.pytorch(CORES, out)
    runs = {name: [] for name in ways}
    for _ in range(args.runs):
        for name, way in ways.items():
            out = scratch / "out"
            runs[name].append(way(out))
            shutil.rmtree(out)
    median = {name: {k: statistics.median(run[k] for run in of) for k in of[0]} for name, of in runs.items()}
    print(f"\n{job.name}; median of {args.runs}\n")
    print(f"{'':26} {'train rows/s':>12} {'embed rows/s':>12} {'last loss':>10} {'peak MiB':>9} {'seconds':>8}")
    for name, m in median.items():
        print(f"{name:26} {m['train']:12,.0f} {m['embed']:12,.0f} {m['loss']:10.5f} {m['peak'] / 2**20:9,.0f} {m['wall']:8.1f}")
    best = lambda product: min((m for name, m in median.items() if name.startswith(product)), key=lambda m: m["wall"])
    ours, theirs = best("emberflow"), best("pytorch")
    print(f"{'ratio, quicker of each':26} {ours['train'] / theirs['train']:11.2f}x {ours['embed'] / theirs['embed']:11.2f}x "
          f"{'':10} {theirs['peak'] / ours['peak']:8.2f}x {theirs['wall'] / ours['wall']:7.2f}x", flush=True)


def machine():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {CORES} cores, {memory:.0f} GiB"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the emberflow to measure")
    parser.add_argument("--runs", type=int, default=3, help="of each way, in turn")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--only", choices=["mnist", "table"])
    args = parser.parse_args()
    load = os.getloadavg()[0]
    import torch
    print(f"{machine()}; PyTorch {torch.__version__}; load at the start {load:.1f}", flush=True)
    if load > 0.5:
        print("this machine is not idle: take the figures as indications", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="emberflow-bench-") as scratch:
        for job in jobs(args, pathlib.Path(scratch)):
            compare(job, args, pathlib.Path(scratch))


if __name__ == "__main__":
    main()
