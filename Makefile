# Every target creates the virtual environment that it needs. PYTHON chooses the interpreter, VENV the
# environment, and AOT that with compilers for absent TPUs and GPUs, which are large; it may be the
# same. So two stacks can live side by side:
#   make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
AOT ?= .venv-aot
# In an environment of its own: with compilers for GPUs, JAX writes into notebooks that it found none.
DOCS ?= .venv-docs
# Where an NVIDIA GPU is, an environment of its own with JAX for it.
GPU := $(shell command -v nvidia-smi)
DEVICE ?= $(if $(GPU),.venv-device,$(VENV))
RUN = $(VENV)/bin/python
comma := ,
# What compilers for TPUs and GPUs make of programs, without any.
RUN_AOT = JAXMP_AOT=1 $(AOT)/bin/python -m pytest tests/aot

# The tests that run before each change lands: by their marks, at most so many cases of each, of these
# a share, from 0/4 to 3/4, and one part of all others, from 0/96 to 95/96.
LANDING ?= not exhaustive
CASES ?= 2
SHARE ?= 0/1
PART ?= 0/96
CHECKED = --jaxtyping-packages=jaxmp,beartype.beartype
CHOICE = -m "$(LANDING)" --cases=$(CASES) --share=$(SHARE) --part=$(PART) --durations=40

.PHONY: environments demo test annotations slow landing coming landing-aot aot full check lint types docs bench bench-absent device

environments: $(VENV)/.installed $(AOT)/.compilers

# The main job: a small language model in float32, mixed bfloat16 and mixed float16.
demo: $(VENV)/.installed
	$(RUN) examples/train_lm.py --out runs/demo

# Tests and doctests, without those that take long, and with few cases of each.
test: $(VENV)/.installed
	$(RUN) -m pytest -m "not slow and not exhaustive" --cases=$(CASES) --share=$(SHARE)

# The annotations of the package, checked as it runs.
annotations: $(VENV)/.installed
	$(RUN) -m pytest $(CHECKED) jaxmp
	$(RUN) -m pytest $(CHECKED) -m "annotations and not slow and not exhaustive" --cases=1 tests

slow: $(VENV)/.installed
	$(RUN) -m pytest -m "slow and not exhaustive"

landing: $(VENV)/.installed
	$(RUN) -m pytest $(CHOICE)

# Under the flags of JAX that are to become its defaults.
coming: $(VENV)/.installed
	JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_REMAT_BARRIER_NO_COTANGENTS=1 \
	$(RUN) -m pytest -m "jax and not slow and not exhaustive" --cases=1

landing-aot: $(AOT)/.compilers
	$(RUN_AOT) $(CHOICE)

aot: $(AOT)/.compilers
	$(RUN_AOT)

# Every test there is, on one stack.
full: aot $(VENV)/.installed
	$(RUN) -m pytest

check: lint types test slow

lint: $(VENV)/.installed
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

types: $(VENV)/.installed
	$(RUN) -m mypy

# The site, in build/site/html. Anything that is not right fails it: links, notebooks, public names that
# the reference does not have.
docs: $(DOCS)/.docs
	$(DOCS)/bin/python -m sphinx -b html -W --keep-going docs build/site/html

bench: $(VENV)/.installed
	$(RUN) benchmarks/bench_optimizer.py
	$(RUN) benchmarks/bench_train_step.py
	$(RUN) benchmarks/bench_eager.py
	$(RUN) benchmarks/bench_nnx_step.py
	$(RUN) benchmarks/bench_rules.py
	$(RUN) benchmarks/bench_autocast.py
	$(RUN) benchmarks/bench_tracing.py

# Ten minutes on a GPU: is it right, is it fast, is it small? ARGS="--small" is a dry run on a CPU.
device: $(DEVICE)/.device
	$(DEVICE)/bin/python benchmarks/device.py $(ARGS)

# Benchmarks that compile for TPUs and GPUs which are not there.
bench-absent: $(AOT)/.compilers
	$(AOT)/bin/python benchmarks/bench_skipping.py
	$(AOT)/bin/python benchmarks/bench_distributed.py
	$(AOT)/bin/python benchmarks/bench_float8_compiled.py --device tpu7x
	$(AOT)/bin/python benchmarks/bench_float8_compiled.py --device h100 --checkpoints yes no
	$(AOT)/bin/python benchmarks/bench_recompute.py --platform gpu
	$(AOT)/bin/python benchmarks/bench_recompute.py --platform tpu --effort least

$(VENV)/.installed: EXTRAS = test,dev
$(AOT)/.compilers: EXTRAS = test,aot
$(DOCS)/.docs: EXTRAS = docs
$(DEVICE)/.device: EXTRAS = test$(if $(GPU),$(comma)cuda)
$(VENV)/.installed $(AOT)/.compilers $(DOCS)/.docs $(DEVICE)/.device: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

ifeq ($(abspath $(VENV)),$(abspath $(AOT))) # one environment, filled by one at a time
$(AOT)/.compilers: $(VENV)/.installed
endif
