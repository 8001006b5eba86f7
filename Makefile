# Set-up, demo, tests and checks. Everything runs in one virtual environment, which is made again when pyproject.toml or
# constraints.txt change. `make help` lists the targets.
#   PYTHON=python3.12       the interpreter that the environment is made with (3.11 or newer)
#   VENV=.venv              where the environment lies
#   TORCH_INDEX=URL         one more package index for torch, to choose a CPU or a CUDA build
#   ARGS="name=second"      more settings for the demo, or options for pytest
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
STAMP := $(VENV)/.installed
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all engines peers check format docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv and install the tested versions

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the other tested versions into $(VENV): a few minutes the first time"
	$(PIP) -qq $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP) -qq -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## train a Markov drafter for the default target and measure it
	$(BIN)/python train.py drafter=markov $(ARGS)
	@echo "Report: $$(ls -t outputs/*/report.md | head -n 1)"

test: $(STAMP)  ## the fast test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not gpu and not engines" $(ARGS)

test-all: $(STAMP)  ## every test, slow ones included
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not engines" $(ARGS)

engines: $(STAMP)  ## serve exports with real engines, each in an environment of its own (see docs/export.md)
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m engines $(ARGS)

# Its own requirements name torchvision and torchaudio, which training steps do not need.
peers: $(STAMP)  ## an environment with speculators, for `DRAFTERS_SPECULATORS=.venv-speculators/bin/python python -m tests.bench`
	test -x .venv-speculators/bin/python || $(BIN)/python -m venv .venv-speculators
	.venv-speculators/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt \
	  torch transformers datasets loguru openai pydantic-settings typer
	.venv-speculators/bin/python -m pip --disable-pip-version-check install -qq --no-deps \
	  speculators==0.9.0 hs-connectors==0.9.0

check: $(STAMP)  ## lint, format, spelling, types, notebook outputs: changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(if $(NOTEBOOKS),$(BIN)/nbstripout --verify $(NOTEBOOKS),@echo "no notebooks")

format: $(STAMP)  ## mend what ruff and nbstripout can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(NOTEBOOKS),$(BIN)/nbstripout $(NOTEBOOKS))

docs: $(STAMP)  ## the pages of docs/ as a site, in site/; a link to nowhere fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f .ci/mkdocs.yml
	@echo "Site: site/index.html"

clean:  ## remove the environment and caches; outputs/ stays
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
