# Two commands do everything on a fresh machine: make demo, make test. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test serve check fix proto bench reliability fuzz pins clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.run ## do the main job on a real list; KEEP=1 leaves the daemon up
	@$(BIN)/bloomgate demo $(if $(filter-out 0,$(KEEP)),--keep)

test: $(VENV)/.dev ## run the whole test suite; ARGS="-k journal" runs a part of it
	@$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),-n 2 --dist loadfile --cov --cov-report=term)

serve: $(VENV)/.run ## run the daemon in the foreground, data in ./data
	@exec $(BIN)/bloomgated serve --data-dir ./data $(ARGS)

check: $(VENV)/.dev ## lint, types, proto, architecture; edits nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	cd proto && ../$(BIN)/buf lint
	$(BIN)/python -m pytest -q tests/test_architecture.py

fix: $(VENV)/.dev ## format, and repair what the linter can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: $(VENV)/.venv ## regenerate the stubs in client/bloomgate/v1
	PYTHON=$(PYTHON) bash proto/generate.sh

bench: $(VENV)/.bench ## measure against peers, side by side in one run
	@$(BIN)/python benchmarks/run.py $(ARGS)

reliability: $(VENV)/.dev ## break everything at length, and print the table; ARGS=--save keeps it
	@$(BIN)/python tests/support/reliability.py $(ARGS)

fuzz: $(VENV)/.fuzz ## a million hostile inputs; ARGS="--only settings --scale 0.1" tries some
	@PYTHONPATH=tests $(BIN)/python -m fuzz.run $(ARGS)

pins: $(VENV)/.dev ## pin the newest versions that fit, with hashes
	$(PIP) install --quiet uv
	bash deploy/pin.sh $(BIN)/uv

clean: ## remove what the commands above made; never ./data
	rm -rf $(VENV) fuzz-findings .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache

# -- set-up: each stamp is a step that is done

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "bloomgate needs Python 3.11 or newer as $(PYTHON); set PYTHON=... to name another" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  v=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "$(PYTHON) -m venv is missing: install the package python$$v-venv (apt-get install python$$v-venv)" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# What the daemon, the client and the demo run with.
$(VENV)/.run: $(VENV)/.venv constraints.txt pyproject.toml
	@echo "installing into $(VENV) ..."
	@$(PIP) install --quiet --only-binary :all: --require-hashes -r constraints.txt
	@$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# And what the tests and checks need beyond.
$(VENV)/.dev: $(VENV)/.run constraints-dev.txt
	@$(PIP) install --quiet --only-binary :all: --require-hashes -r constraints-dev.txt
	@touch $@

# pybloom-live comes as a pure-Python source package only, so it is a peer in the benchmark and nothing else.
$(VENV)/.bench: $(VENV)/.dev deploy/constraints-bench.txt
	@$(PIP) install --quiet --only-binary :all: --require-hashes -r deploy/constraints-bench.txt
	@$(PIP) install --quiet --no-deps pybloom-live==4.0.0
	@touch $@

# Not everywhere is there a wheel of atheris: the inputs that need no guide are tried all the same.
$(VENV)/.fuzz: $(VENV)/.dev
	@$(PIP) install --quiet --no-deps --only-binary :all: 'atheris>=3.0' || echo "going without atheris" >&2
	@touch $@
