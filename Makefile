# Every target creates the virtual environment that it needs. PYTHON chooses the interpreter,
# VENV the environment, so that two stacks can live side by side.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
export JAX_PLATFORMS ?= cpu

.PHONY: demo test check lint types

demo: $(VENV)/.installed
	$(RUN) examples/train_lm.py --out runs/demo

test: $(VENV)/.installed
	$(RUN) -m pytest

check: lint types test

lint: $(VENV)/.installed
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

types: $(VENV)/.installed
	$(RUN) -m mypy

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[dev]'
	touch $@
