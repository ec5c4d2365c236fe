#!/usr/bin/env bash
# `auto` beside every fixed choice of executors and strategy:
#
#   benches/choose/run.sh [--turns N] [--only "tiny model"|"wide model, 2 hosts"|"slow link, 2 hosts"]
#
# BENCH_BINARY names another emberflow to measure, such as one built with --release.
set -euo pipefail
cd "$(dirname "$0")/../.."
. benches/environment.sh
. benches/binary.sh
exec "$python" benches/choose/compare.py --binary "$BENCH_BINARY" "$@"
