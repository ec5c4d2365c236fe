"""Runs the all-reduce of Emberflow, that of gloo and iperf3, in turn, and prints ratios.

Algorithm bandwidth is the bytes of the bucket over the median seconds of a round. Which of the
three runs first changes from turn to turn, so that a busy machine slows none of them alone.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def seconds(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return [float(line) for line in done.stdout.split()]


def iperf3():
    """Gigabytes per second of one stream over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    server = subprocess.Popen(["iperf3", "-s", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", "3", "--json"]
    until = time.monotonic() + 20
    try:
        while True:
            done = subprocess.run(client, capture_output=True, text=True, timeout=60)
            end = json.loads(done.stdout).get("end", {})
            if "sum_received" in end:
                return end["sum_received"]["bits_per_second"] / 8e9
            if time.monotonic() > until:
                sys.exit(f"iperf3: {done.stdout}")
            time.sleep(0.1)
    finally:
        server.terminate()
        server.wait(10)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--mib", default="64")
    parser.add_argument("--rounds", default="10")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    sizes = [args.ranks, args.mib, args.rounds]
    gloo = [sys.executable, os.path.join(HERE, "peer_gloo.py"), *sizes]
    jobs = {
        "emberflow, unix, f32": [args.binary, *sizes, "unix", "f32"],
        "emberflow, tcp, f32": [args.binary, *sizes, "tcp", "f32"],
        "emberflow, unix, bf16": [args.binary, *sizes, "unix", "bf16"],
        "gloo, tcp, f32": gloo,
    }
    found, wires = {name: [] for name in jobs}, []
    for turn in range(args.turns):
        wires.append(iperf3())
        order = list(jobs.items())
        for name, command in order[turn % len(order):] + order[:turn % len(order)]:
            found[name] += seconds(command)
    wire = statistics.median(wires)
    gigabytes = int(args.mib) * 2**20 / 1e9
    rates = {name: gigabytes / statistics.median(all) for name, all in found.items()}
    peer = rates["gloo, tcp, f32"]
    print(f"{args.ranks} ranks, {args.mib} MiB; load {os.getloadavg()[0]:.1f}")
    print("| | GB/s, median | best | of iperf3 | of gloo |\n| --- | --- | --- | --- | --- |")
    print(f"| iperf3, tcp | {wire:.2f} | {max(wires):.2f} | | |")
    for name, rate in rates.items():
        best = gigabytes / min(found[name])
        print(f"| {name} | {rate:.2f} | {best:.2f} | {rate / wire:.2f} | {rate / peer:.2f} |")


main()
