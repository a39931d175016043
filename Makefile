# make run      sets up and runs the default job;  make run ARGS="recipe=transformer nprocs=2" passes other overrides
# make test     sets up and runs the whole suite; brings Debian's Chromium for the tests in a browser where it may
# make quick    sets up and runs what starts no ranks, in less than a minute
# Needs Python 3.11 with its venv module, and make (Debian: apt-get install python3 python3-venv make).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?= backend=gloo nprocs=4
# Ranks wait for each other much of the time: two files of tests at once use two cores well.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: run test browser quick lint format bench bench-peers zoo ddp-tests setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("harness needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

run: setup
	$(BIN)/python run.py $(ARGS)

test: setup browser
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

quick: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not ranks and not slow"

# As root or by sudo without a password; elsewhere the suite goes on, and says in its last line what it left out.
browser:
	@command -v chromedriver >/dev/null || ! command -v apt-get >/dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then as_root=; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else exit 0; fi; \
	  echo "make test: apt-get installs chromium and chromium-driver, for the tests in a browser."; \
	  { $$as_root apt-get update && $$as_root env DEBIAN_FRONTEND=noninteractive \
	    apt-get install --yes --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 \
	  || echo "make test: apt-get could not install them."; }

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

# Models of transformers, and what torch's own tests need, in an environment of their own; torchvision would break beside torch
# for the CPU, and without its version torch would come for GPUs.
zoo: .venv-zoo/.ready
	.venv-zoo/bin/python -m benchmarks.zoo

ddp-tests: .venv-zoo/.ready
	.venv-zoo/bin/python -m benchmarks.ddp_tests

.venv-zoo/.ready: constraints.txt
	$(PYTHON) -m venv .venv-zoo
	.venv-zoo/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . \
	    torch==2.13.0 transformers safetensors expecttest
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
