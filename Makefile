# make run      sets up and runs the default job;  make run ARGS="recipe=transformer nprocs=2" passes other overrides
# make test     sets up and runs the whole suite
# Needs Python 3.11 with its venv module, and make (Debian: apt-get install python3 python3-venv make).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?= backend=gloo nprocs=4

.PHONY: run test quick lint format bench bench-peers setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("harness needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

run: setup
	$(BIN)/python run.py $(ARGS)

test: setup
	$(BIN)/python -m pytest

quick: setup
	$(BIN)/python -m pytest -m "not ranks and not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m benchmarks.bench $(ROWS)

# Accelerate, Lightning Fabric and Paddle, where there is one for this Python, in an environment of their own; then make bench.
bench-peers: .venv-peers/.ready

.venv-peers/.ready: constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy accelerate lightning-fabric
	-.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check paddlepaddle
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
