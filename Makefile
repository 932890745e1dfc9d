# Needs make, git and Python 3.11 or newer; everything else goes into .venv. `make` alone lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := daemon/llmd/kernels
LIBRARY := $(KERNELS)/libllmd_kernels.so
ARGS ?=
# Files of tests that run beside each other: one more than cores, because most tests wait for processes. TEST_WORKERS=0: one after another.
TEST_WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
# All time bounds of tests are stretched by this factor: they catch hangs, and a machine may be slow.
export LLMD_TEST_SLOWNESS ?= 3
# And so is the time that one test may take (pyproject.toml has it for a fast machine).
export PYTEST_TIMEOUT ?= 360

.PHONY: help setup run test check format docs bench soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) $(LIBRARY) ## make .venv with all that llmd and its tests need

$(STAMP): pyproject.toml setup.py
	@if [ ! -x $(BIN)/python ]; then \
	  for python in "$$PYTHON" python3 python3.13 python3.12 python3.11; do \
	    if [ -n "$$python" ] && "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "making $(VENV) with $$("$$python" -V)"; "$$python" -m venv $(VENV) && exit 0; exit 1; \
	    fi; \
	  done; \
	  echo "no Python 3.11 or newer (with venv) found; install one, or say make setup PYTHON=/path/to/python" >&2; exit 1; \
	fi
	@echo "installing llmd and its packages into $(VENV): about 0.5 GB to download, 1.7 GiB on disk, 2 to 10 minutes the first time"
	@set -o pipefail; $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check --editable '.[dev]' \
	  | awk -v terminal=$$([ -t 2 ] && echo 1 || echo 0) -f packaging/pip-progress.awk
	@echo "installed"
	@touch $@

# Installing builds it too; this is for a change in its sources. Without a compiler llmd works without it.
$(LIBRARY): $(KERNELS)/build.py $(shell find $(KERNELS)/src -name '*.cpp' -o -name '*.h') | $(STAMP)
	@$(BIN)/python -m llmd.kernels.build || echo 'going on without the native kernels' >&2

run: setup ## run llmd in the foreground; ARGS='-c FILE --set key=value' are passed on
	@exec $(BIN)/llmd run $(ARGS)

test: setup ## all checks, then all tests; ARGS are passed to pytest
	@$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: setup ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup ## bring all files into form
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

docs: setup ## write what follows from code: etc/llmd/*, docs/configuration.md, docs/llmctl.md, man page, completions
	$(BIN)/python -m llmd.config.docs .
	$(BIN)/python -m llmd.frontend.openapi.document
	$(BIN)/python -m llmctl.generate .
	$(BIN)/python -m llmd.control.openapi .
	$(BIN)/python -m llmd.control.metrics_doc .

bench: setup ## measure what is in tests/bench; prints numbers, judges nothing
	@for file in tests/bench/bench_*.py; do \
	  name=$$(basename "$$file" .py); echo "== $$name"; $(BIN)/python -m "tests.bench.$$name" $(ARGS) || exit 1; \
	done

soak: setup ## tests that run for minutes
	$(BIN)/python -m pytest -m soak --timeout=3600 $(ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) $(LIBRARY) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
