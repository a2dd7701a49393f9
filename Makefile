# Every target creates the virtual environment that it needs. PYTHON chooses the interpreter and
# VENV the environment, so that two stacks can live side by side:
#   make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# Which tests `make slow` runs.
SLOW ?= slow
# What checks annotations in `make test`. Checks take a third of the tests' time, so that those
# which take long go without, as users do.
CHECKS ?= jaxmp,beartype.beartype

.PHONY: demo test slow check lint types bench bench-absent

# The main job: a small language model in float32, mixed bfloat16 and mixed float16.
demo: $(VENV)/.installed
	$(RUN) examples/train_lm.py --out runs/demo

# Tests and doctests, without those that take long.
test: $(VENV)/.installed
	$(RUN) -m pytest --jaxtyping-packages=$(CHECKS) -m "not slow"

slow: $(VENV)/.installed
	$(RUN) -m pytest --jaxtyping-packages= -m "$(SLOW)"

check: lint types test slow

lint: $(VENV)/.installed
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

types: $(VENV)/.installed
	$(RUN) -m mypy

bench: $(VENV)/.installed
	$(RUN) benchmarks/bench_optimizer.py
	$(RUN) benchmarks/bench_train_step.py
	$(RUN) benchmarks/bench_rules.py
	$(RUN) benchmarks/bench_autocast.py

# Benchmarks that compile for TPUs and GPUs which are not there, with compilers of their own.
bench-absent:
	$(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install --quiet --upgrade pip
	.venv-aot/bin/python -m pip install --quiet --editable '.[test,aot]'
	.venv-aot/bin/python benchmarks/bench_skipping.py
	.venv-aot/bin/python benchmarks/bench_distributed.py

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[dev]'
	touch $@
