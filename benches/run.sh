#!/usr/bin/env bash
# Emberflow beside PyTorch on the same jobs: benches/README.md says what is compared.
#
#   benches/run.sh [--runs N] [--rows N] [--only mnist|table]
#
# BENCH_BINARY names another emberflow to measure, such as one built with --release.
set -euo pipefail
cd "$(dirname "$0")/.."
. benches/environment.sh
. benches/binary.sh
exec "$python" benches/compare.py --binary "$BENCH_BINARY" "$@"
