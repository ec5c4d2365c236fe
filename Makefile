# Emberflow. `make help` lists what can be done.

SHELL := /bin/bash
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/emberflow
export CARGO_TARGET_DIR := $(or $(CARGO_TARGET_DIR),$(CACHE)/target)
export EMBERFLOW_TEST_PYTHON := $(CACHE)/python/bin/python
TOOLS := $(CACHE)/tools
EMBERFLOW := $(CARGO_TARGET_DIR)/debug/emberflow
PIPELINE := pipelines/mnist.yaml
SEEDS := 1 60
CARGO_DENY_VERSION := 0.20.2
# What is checked but not built. DOCS_RS lets CUDA's crates be checked without CUDA; as the build
# scripts of common crates look at it too, it has a folder of its own: in that of builds it would
# have everything built again. All with the GPU code, so that dependencies are checked once.
CHECKING := DOCS_RS=1 CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)-check

.DEFAULT_GOAL := help
.PHONY: help run test check fmt clippy doc deny cuda ci fault hdfs bench build clean needs-rust needs-test

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: build ## Train the MNIST pipeline on this machine and write its embeddings
	$(EMBERFLOW) run $(PIPELINE) $(ARGS)
	@command -v emberflow >/dev/null || printf '\nfor this shell to find it:\n    alias emberflow=%s\n' $(EMBERFLOW)

test: needs-test ## Run all tests, real HDFS included
	cargo test --locked

build: needs-rust
	cargo build --locked

check: fmt clippy doc deny cuda ## Formatting, lints, documentation, licences, GPU type-check

fmt: needs-rust ## Check the formatting
	cargo fmt --check

clippy: needs-rust ## Lints
	$(CHECKING) cargo clippy --locked --all-targets --features cuda -- -D warnings

doc: needs-rust ## API documentation, without warnings
	$(CHECKING) RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --features cuda

deny: $(TOOLS)/bin/cargo-deny ## Licences and sources of everything linked
	$(TOOLS)/bin/cargo-deny --locked check licenses bans sources

cuda: needs-rust ## Type-check the GPU code
	$(CHECKING) cargo check --locked --features cuda

ci: check test ## What CI runs

fault: build $(EMBERFLOW_TEST_PYTHON) ## Kill, freeze and cut off executors and drivers: make fault SEEDS="1 60"
	$(EMBERFLOW_TEST_PYTHON) tests/fault/fault.py $(EMBERFLOW) $(SEEDS)

hdfs: needs-test ## A NameNode and two DataNodes on this machine, until Ctrl-C
	tests/hdfs/cluster.py

bench: build ## Emberflow beside PyTorch on the same job
	benches/run.sh

clean: ## Remove what runs of the shipped pipelines wrote
	rm -rf out

# Clones share what is built. Cargo tells them apart by times alone, so that another clone's
# younger build would pass for this one's; a touch tells it.
CLONE := $(CARGO_TARGET_DIR)/.clone
needs-rust:
	@command -v cargo >/dev/null || { echo "missing: a Rust toolchain (cargo 1.95 or later)" >&2; exit 1; }
	@mkdir -p $(CARGO_TARGET_DIR) && touch -a $(CLONE) && [ "$$(cat $(CLONE))" = "$(CURDIR)" ] || \
		{ touch src/lib.rs src/main.rs tests/it/main.rs tests/tidy.rs && echo "$(CURDIR)" > $(CLONE); }

needs-test: needs-rust $(EMBERFLOW_TEST_PYTHON)
	@command -v java >/dev/null || { echo "missing: a Java runtime, JDK 17 (java)" >&2; exit 1; }
	@command -v mvn >/dev/null || { echo "missing: Maven (mvn)" >&2; exit 1; }

$(EMBERFLOW_TEST_PYTHON): tests/requirements.txt
	@command -v python3 >/dev/null || { echo "missing: Python 3.11 or later (python3)" >&2; exit 1; }
	python3 -m venv $(CACHE)/python
	$(CACHE)/python/bin/pip install --quiet --requirement tests/requirements.txt
	touch $@

$(TOOLS)/bin/cargo-deny: | needs-rust
	cargo install --locked --root $(TOOLS) --version $(CARGO_DENY_VERSION) cargo-deny
