# `make` alone lists the targets.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV := 0.13.8

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; \`$(PYTHON)\` is `$(PYTHON) --version`. Say which one to use: make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	$(BIN)/uv pip install --quiet --compile-bytecode --require-hashes --requirement requirements.lock
	$(BIN)/uv pip install --quiet --no-deps --editable .
	@touch $@

.PHONY: setup
setup: $(READY) ## make the virtual environment in .venv

.PHONY: run
run: $(READY) ## train deploy/adascalejob.yaml on this machine
	$(BIN)/adascale run deploy/adascalejob.yaml

.PHONY: test
test: $(READY) ## the fast tests
	$(BIN)/python -m pytest -m "not slow"

.PHONY: test-slow
test-slow: $(READY) ## the tests that take longer
	$(BIN)/python -m pytest -m slow

.PHONY: check
check: $(READY) ## format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: lock
lock: $(READY) ## resolve the versions in requirements.lock anew
	$(BIN)/uv pip compile pyproject.toml --extra local --extra examples --group dev --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header --quiet --output-file requirements.lock

.PHONY: clean
clean: ## remove the environment and the state of runs
	rm -rf $(VENV) .adascale
