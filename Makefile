# The environment is .venv in the repository root; every target makes it first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := executor,hf,notebooks,test
# The versions of constraints.txt are of Python 3.11 and newer; on 3.10 pip chooses.
export CONSTRAINTS := import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")

.PHONY: help install demo test check notebooks bench results peers gpu-test gpu-record gpu-peers clean

help:
	@echo "make install    the environment in $(VENV), every version pinned by constraints.txt"
	@echo "make demo       trace, compare, plan and run GPT-2 124M; writes demo-out/"
	@echo "make test       the whole test suite"
	@echo "make check      ruff format and lint, mypy --strict, import contracts"
	@echo "make notebooks  runs the notebooks in place"
	@echo "make bench      runs benchmarks/*.py, but for those below"
	@echo "make results    lists the results under benchmarks/results whose code has changed since"
	@echo "make peers      beside plain PyTorch, DeepSpeed and FSDP2 on this CPU; DeepSpeed gets $(VENV)-peers"
	@echo ""
	@echo "With a CUDA device, the current python3 as it is (PYTHON=...) and at most 8 minutes a run; what was cut off goes"
	@echo "on when run again, what cannot be imported is skipped and said, without a device there is one line:"
	@echo "make gpu-test   the tests marked gpu"
	@echo "make gpu-record calibration, traces, predicted against measured; writes benchmarks/results, traces/measured"
	@echo "make gpu-peers  a Llama-7B shape within 24 GB beside DeepSpeed and FSDP2"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$($(BIN)/python -c "$$CONSTRAINTS") -e ".[$(EXTRAS)]"
	@touch $@

demo: install
	$(BIN)/python -m pstar_sim demo --out demo-out

# One thread each for torch: two workers with two threads apiece would fight for two cores.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

notebooks: install
	$(BIN)/python notebooks/execute.py notebooks/*.ipynb

# Not those that need a GPU or an environment of their own.
APART := $(addprefix benchmarks/,peers.py preflight.py gpu_record.py gpu_test.py)

bench: install
	set -e; for file in $(filter-out $(APART),$(wildcard benchmarks/[a-z]*.py)); do echo "== $$file"; $(BIN)/python "$$file"; done

results: install
	$(BIN)/python benchmarks/_results.py

peers: install
	$(BIN)/python benchmarks/peers.py

# The machine's own interpreter, not $(VENV): it has the torch that fits the device.
GPU_PYTHON := PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(if $(filter command% environment%,$(origin PYTHON)),$(PYTHON),python3)

gpu-test:
	@$(GPU_PYTHON) benchmarks/gpu_test.py

gpu-record:
	@$(GPU_PYTHON) benchmarks/gpu_record.py

gpu-peers:
	@$(GPU_PYTHON) benchmarks/peers.py --device cuda

clean:
	rm -rf dist demo-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
