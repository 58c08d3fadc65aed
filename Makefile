# `make demo` and `make test` work on a fresh machine with Python 3.11+ and make, in either order.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# vLLM has an environment of its own (4 GB): configs/vllm/environment.sh says why.
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/ready
# Two OpenMP threads on two shared cores can be slower than one; more cores are used by more processes.
export OMP_NUM_THREADS ?= 1

# Files of tests side by side, a process a core, each with one thread.
PARALLEL ?= --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-vllm vllm-env lint docs pair clean

demo: $(READY)
	$(BIN)/accept-head demo --out runs/demo

test: $(READY) lint
	$(BIN)/python -m pytest -m "not slow" --durations=20 $(PARALLEL)

test-all: $(READY) lint
	$(BIN)/python -m pytest $(PARALLEL)
	$(MAKE) test-vllm VLLM_TESTS=

# The adapter's tests with vLLM, VLLM_TESTS= takes the slow ones too; and those of our own kernels, as Triton comes with it:
# in its interpreter what they compute, and through its compiler what a GPU would be given.
VLLM_TESTS ?= -m "not slow"
test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest tests/integration/vllm $(VLLM_TESTS) $(PARALLEL) --maxprocesses=2
	TRITON_INTERPRET=1 $(VLLM_VENV)/bin/python -m pytest tests/inference/kernels --ignore tests/inference/kernels/test_compile.py $(PARALLEL)
	$(VLLM_VENV)/bin/python -m pytest tests/inference/kernels/test_compile.py $(PARALLEL)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The reference of the Python interface, from the docstrings.
docs: $(READY)
	$(BIN)/python docs/api.py build/docs

# Makes the embedded pair from the data in DATA, in OUT: over an hour and a half on one core. A stage whose result is there is
# skipped. Big freed blocks are kept, not given back to the system: page faults are a fifth of the time otherwise.
DATA ?= ../shared/data
OUT ?= checkpoints/tiny
pair: $(READY)
	MALLOC_MMAP_THRESHOLD_=2000000000 MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_TOP_PAD_=268435456 \
	$(BIN)/python checkpoints/recipe/make_pair.py --data $(DATA) --out $(OUT)

# torch first and alone: with it installed, nothing else asks the registry for another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

vllm-env: $(VLLM_READY)

$(VLLM_READY): pyproject.toml configs/vllm/environment.sh configs/vllm/constraints.txt
	PYTHON=$(PYTHON) configs/vllm/environment.sh $(VLLM_VENV)

clean:
	rm -rf $(VENV) .venv-vllm runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
