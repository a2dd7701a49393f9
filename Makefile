# Every target creates the virtual environment that it needs. PYTHON chooses the interpreter, VENV the
# environment, and AOT that with the compilers for absent TPUs and GPUs, which are large and change
# what jax finds at start. So two stacks can live side by side:
#   make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
AOT ?= .venv-aot
RUN = $(VENV)/bin/python
# Which tests `make slow` runs, and which `make aot`.
SLOW ?= slow
AHEAD ?= slow or not slow

.PHONY: environments demo test slow aot check lint types bench bench-absent

environments: $(VENV)/.installed $(AOT)/.installed

# The main job: a small language model in float32, mixed bfloat16 and mixed float16.
demo: $(VENV)/.installed
	$(RUN) examples/train_lm.py --out runs/demo

# Tests and doctests, without those that take long.
test: $(VENV)/.installed
	$(RUN) -m pytest -m "not slow"

# Without checks of annotations, which take a third of the time.
slow: $(VENV)/.installed
	$(RUN) -m pytest --jaxtyping-packages= -m "$(SLOW)"

# What compilers for TPUs and GPUs make of programs, without any.
aot: $(AOT)/.installed
	JAXMP_REQUIRE_AOT=1 JAX_PLATFORMS=cpu $(AOT)/bin/python -m pytest --jaxtyping-packages= \
	  --dist load -m "$(AHEAD)" tests/aot

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

# Benchmarks that compile for TPUs and GPUs which are not there.
bench-absent: $(AOT)/.installed
	$(AOT)/bin/python benchmarks/bench_skipping.py
	$(AOT)/bin/python benchmarks/bench_distributed.py

$(VENV)/.installed: EXTRAS = dev
$(AOT)/.installed: EXTRAS = test,aot
$(VENV)/.installed $(AOT)/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@
