# Sourced after environment.sh: BENCH_BINARY is the emberflow to measure. Dependencies are optimised in
# the dev profile; this optimises our own crate as much and rebuilds nothing else. A copy, for the
# next build replaces the original.
if [[ -z "${BENCH_BINARY:-}" ]]; then
    CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo build --locked
    BENCH_BINARY="$cache/bench/emberflow"
    cp "$CARGO_TARGET_DIR/debug/emberflow" "$BENCH_BINARY"
fi
