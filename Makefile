# The environment is .venv in the repository root; every target makes it first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := executor,hf,notebooks,docs,report,app,test
# The versions of constraints.txt are of Python 3.11 and newer; on 3.10 pip chooses.
export CONSTRAINTS := import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")

.PHONY: help install demo test nightly check docs package notebooks bench results peers frameworks axolotl clean gpu-smoke gpu-test gpu-parity gpu-record gpu-steady \
	gpu-7b gpu-peers gpu-largest gpu-mirror gpu-emulated gpu-emulated-nightly gpu-emulated-memory gpu-environment

help:
	@echo "make install    the environment in $(VENV), every version pinned by constraints.txt"
	@echo "make demo       trace, compare, plan and run GPT-2 124M; writes demo-out/"
	@echo "make test       the test suite"
	@echo "make nightly    the same with --whole: all steps, seeds and rows, and the tests that CONTRIBUTING.md lists"
	@echo "make check      ruff format and lint, mypy --strict, import contracts"
	@echo "make docs       builds the documentation into site/ and checks its links; needs no network"
	@echo "make package    builds wheel and sdist, checks both, installs the wheel without torch; WITH_TORCH=1: and with torch"
	@echo "make notebooks  runs the notebooks in place"
	@echo "make bench      runs benchmarks/*.py, but for those below"
	@echo "make results    lists the results under benchmarks/results whose code has changed since"
	@echo "make peers      beside plain PyTorch, DeepSpeed and FSDP2 on this CPU; DeepSpeed gets $(VENV)-peers"
	@echo "make frameworks exported configurations, loaded by the frameworks, trained ten steps; gets $(VENV)-peers, $(VENV)-titan"
	@echo "make axolotl    a whole axolotl run, as it is and with our plugin; gets $(VENV)-axolotl"
	@echo ""
	@echo "With a CUDA device, the current python3 as it is (PYTHON=...), in this order. OUT=FOLDER: all that is found goes"
	@echo "there as it is known, and a run goes on from what is there (default: benchmarks/results). AGAIN=1: what failed"
	@echo "runs again. Without a device there is one line, and status 3 of the script."
	@echo "make gpu-smoke   4 minutes: versions, context, pinning, copies, the private pool, an MLP beside plain torch"
	@echo "make gpu-test    8 minutes: the tests marked gpu, but for the slow ones"
	@echo "make gpu-parity  3 minutes: GPT-2 and a small Llama shape beside plain AdamW"
	@echo "make gpu-record  6 minutes: calibration; GPT-2 XL at 8, 16 and 24 GB, predicted against measured"
	@echo "make gpu-steady  3 minutes: 2,000 steps, nothing grows"
	@echo "make gpu-7b      6 minutes: a Llama-7B shape within 24 GB, predicted against measured"
	@echo "make gpu-peers   9 minutes: a Llama-7B shape within 24 GB beside DeepSpeed and FSDP2"
	@echo "make gpu-largest 9 minutes: the largest model of that width that trains, two steps"
	@echo "make gpu-mirror  without a device: $(VENV)-mirror, like such a machine, in which all of these end at the device"
	@echo "make gpu-emulated without a device: the tests marked gpu on an emulated one, in $(VENV)-cuda (6 GB, x86-64 Linux)"
	@echo "                  TORCH=2.13.0: with another version of torch, in $(VENV)-cuda-2.13.0"
	@echo "make gpu-emulated-nightly  the same with three seeds, slow tests, then without one synchronisation of the executor at a time"
	@echo "make gpu-emulated-memory   15 minutes: what torch reserves beside plans of ten models, against bounds"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$($(BIN)/python -c "$$CONSTRAINTS") -e ".[$(EXTRAS)]"
	@touch $@

demo: install
	$(BIN)/python -m pstar_sim demo --out demo-out

# One thread each for torch: workers with two threads apiece would fight for two cores. Three workers: tests that wait for
# processes and threads leave a fifth of two cores idle. A file is one worker's, so that what it makes once is made once;
# long files come first (tests/conftest.py). Workers and programs are forked from one process that has imported torch.
# Bytecode is kept, whatever the environment says: a test's process would compile the package anew.
test: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --forked --dist loadfile --no-loadscope-reorder \
		$(WHOLE)

nightly: WHOLE := --whole
nightly: test

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	# Of tests, the arguments of calls alone: a test that calls what has changed is red before it runs.
	! { MYPYPATH=tests/helpers:tests/oracle $(BIN)/mypy --explicit-package-bases pstar_sim executor tests || true; } \
		| grep -F '[call-arg]'
	$(BIN)/lint-imports

# --strict: a link or an anchor that leads nowhere is an error. Links to other sites are not looked at.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Makes environments of its own: what is in $(VENV) would hide a dependency that pyproject.toml lacks.
package:
	PYTHON=$(PYTHON) .ci/package

notebooks: install
	$(BIN)/python notebooks/execute.py notebooks/*.ipynb

# Not those that need a GPU or an environment of their own.
APART := $(addprefix benchmarks/,axolotl_run.py frameworks.py peers.py preflight.py $(notdir $(wildcard benchmarks/gpu_*.py)))

bench: install
	set -e; for file in $(filter-out $(APART),$(wildcard benchmarks/[a-z]*.py)); do echo "== $$file"; $(BIN)/python "$$file"; done

results: install
	$(BIN)/python benchmarks/_results.py

peers: install
	$(BIN)/python benchmarks/peers.py

frameworks: install
	$(BIN)/python benchmarks/frameworks.py

axolotl: install
	$(BIN)/python benchmarks/axolotl_run.py

# The machine's own interpreter, not $(VENV): it has the torch that fits the device.
GPU_PYTHON := PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(if $(filter command% environment%,$(origin PYTHON)),$(PYTHON),python3)

GPU_KEEP := $(if $(OUT),--out $(OUT)) $(if $(AGAIN),--again)

gpu-smoke:
	@$(GPU_PYTHON) benchmarks/gpu_smoke.py --minutes 4 $(GPU_KEEP)

gpu-test:
	@$(GPU_PYTHON) benchmarks/gpu_test.py --minutes 8 $(GPU_KEEP)

gpu-parity:
	@$(GPU_PYTHON) benchmarks/gpu_parity.py --minutes 3 $(GPU_KEEP)

gpu-record:
	@$(GPU_PYTHON) benchmarks/gpu_record.py --minutes 6 --models gpt2-xl --caps 8GB,16GB,24GB $(GPU_KEEP)

gpu-steady:
	@$(GPU_PYTHON) benchmarks/gpu_test.py --minutes 3 --slow $(GPU_KEEP)

gpu-7b:
	@$(GPU_PYTHON) benchmarks/gpu_record.py --minutes 6 --name gpu_7b --models llama-7b --caps 24GB $(GPU_KEEP)

# What nine minutes have room for. PEERS= adds the search of micro-batches, clipping and the largest models: several runs.
PEERS ?= --contenders ours_eager,zero3,fsdp2 --micro 8 --clip no --largest 0

gpu-peers:
	@$(GPU_PYTHON) benchmarks/peers.py --device cuda --minutes 9 $(PEERS) $(GPU_KEEP)

gpu-largest:
	@$(GPU_PYTHON) benchmarks/gpu_largest.py --minutes 9 $(GPU_KEEP)

# About 3 GB to fetch. Python 3.12 where there is one; the script says where it is another.
MIRROR_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python) $(shell command -v python3.12) python3)
MIRROR := $(VENV)-mirror

$(MIRROR)/.installed: benchmarks/mirror.txt
	$(MIRROR_PYTHON) -m venv $(MIRROR)
	$(MIRROR)/bin/python -m pip install --quiet -r benchmarks/mirror.txt
	@touch $@

gpu-mirror: $(MIRROR)/.installed
	@PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(MIRROR)/bin/python benchmarks/gpu_mirror.py $(if $(OUT),--out $(OUT))

# The seed of the delays is printed; EMULATED_CUDA_SEED=... repeats it. TESTS=... runs a part. TORCH=... takes another
# version of torch, in an environment of its own.
TORCH ?=
CUDA_VENV := $(VENV)-cuda$(addprefix -,$(TORCH))

$(CUDA_VENV)/.installed: tests/cuda_emulation/requirements.txt tests/cuda_emulation/environment.py constraints.txt pyproject.toml
	@$(PYTHON) tests/cuda_emulation/environment.py $(CUDA_VENV) $(TORCH)

gpu-environment: $(CUDA_VENV)/.installed

gpu-emulated: gpu-environment
	$(CUDA_VENV)/bin/python tests/cuda_emulation/suite.py $(TESTS)

NIGHTLY_SEEDS := 1 2 3

gpu-emulated-nightly: gpu-environment
	for seed in $(NIGHTLY_SEEDS); do EMULATED_CUDA_SEED=$$seed $(CUDA_VENV)/bin/python tests/cuda_emulation/suite.py; done
	EMULATED_CUDA_ARITHMETIC=0 $(CUDA_VENV)/bin/python tests/cuda_emulation/suite.py --slow
	$(CUDA_VENV)/bin/python tests/cuda_emulation/mutations.py
	$(MAKE) gpu-emulated-memory

# Ten models at real sizes on a card of 40 GB that takes no memory; operators compute nothing.
gpu-emulated-memory: gpu-environment
	$(CUDA_VENV)/bin/python tests/cuda_emulation/emulated.py python benchmarks/gpu_memory.py --fresh $(if $(OUT),--out $(OUT))

clean:
	rm -rf dist demo-out site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
