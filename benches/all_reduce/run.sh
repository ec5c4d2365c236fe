#!/usr/bin/env bash
# The all-reduce between processes of this machine beside gloo's and iperf3:
#
#   benches/all_reduce/run.sh [--ranks N] [--mib N] [--rounds N] [--turns N]
#
# Needs iperf3. BENCH_ALL_REDUCE names another build of examples/all_reduce.rs to measure.
set -euo pipefail
cd "$(dirname "$0")/../.."
. benches/environment.sh
command -v iperf3 >/dev/null || { echo "missing: iperf3 (Debian: apt-get install iperf3)" >&2; exit 1; }

if [[ -z "${BENCH_ALL_REDUCE:-}" ]]; then
    # As in benches/run.sh: only our own crate is built again.
    CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo build --locked --example all_reduce
    BENCH_ALL_REDUCE="$cache/bench/all_reduce"
    cp "$CARGO_TARGET_DIR/debug/examples/all_reduce" "$BENCH_ALL_REDUCE"
fi
exec "$python" benches/all_reduce/compare.py --binary "$BENCH_ALL_REDUCE" "$@"
