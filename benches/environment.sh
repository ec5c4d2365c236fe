# Sourced by the run.sh of each benchmark, from the repository's root: the cache, one target
# folder, and the virtual environment of the peers.
cache="${XDG_CACHE_HOME:-$HOME/.cache}/emberflow"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$cache/target}"
python="$cache/bench/bin/python"
if [[ ! -x "$python" ]]; then
    python3 -m venv "$cache/bench"
fi
"$python" -m pip install --quiet --requirement benches/requirements.txt
