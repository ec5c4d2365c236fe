#!/usr/bin/env bash
# Emberflow beside PyTorch on the same jobs: benches/README.md says what is compared.
#
#   benches/run.sh [--runs N] [--rows N] [--only mnist|table]
#
# BENCH_BINARY names another emberflow to measure, such as one built with --release.
set -euo pipefail
cd "$(dirname "$0")/.."
. benches/environment.sh

if [[ -z "${BENCH_BINARY:-}" ]]; then
    # Dependencies are optimised in the dev profile; this optimises our own crate as much and
    # rebuilds nothing else. A copy, for the next build replaces the original.
    CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo build --locked
    BENCH_BINARY="$cache/bench/emberflow"
    cp "$CARGO_TARGET_DIR/debug/emberflow" "$BENCH_BINARY"
fi
exec "$python" benches/compare.py --binary "$BENCH_BINARY" "$@"
