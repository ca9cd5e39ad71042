# `make` alone lists the targets.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARTS := worker api controller
# The program that builds images: the first of these that is installed.
ENGINE ?= $(firstword $(foreach engine,docker podman buildah,$(if $(shell command -v $(engine) 2>/dev/null),$(engine))))
# Additional options for it, such as --build-arg BASE=...
BUILD_FLAGS ?=
IMAGE_TAG ?= dev
KIND_CLUSTER := adascale
READY := $(VENV)/.ready
# Tests start hundreds of processes, each of which would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE
UV := 0.13.8
LOWEST_VENV := .venv-lowest
LOWEST_READY := $(LOWEST_VENV)/.ready
# Tests of what uses private parts of torch (worker/adascale_worker/torch_private/), of the Kubernetes client, and of
# uvicorn (api/adascale_api/http/connections.py).
LOWEST_TESTS := $(patsubst %,tests/worker/test_%.py,torch_private adascale adascale_state adascale_adam adascale_ranks \
	gradient_exchange hyperparameters patching previous_gradient program_gradients) \
	tests/frameworks/test_lightning.py \
	tests/frameworks/test_huggingface_lowest.py tests/frameworks/test_private_parts.py \
	$(patsubst %,tests/api/test_%.py,token_review attacks connection_limits tls) \
	$(patsubst %,tests/controller/test_%.py,kubernetes_cluster kubernetes_lease lease node_capacity) \
	tests/frameworks/test_accelerate.py

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; \`$(PYTHON)\` is `$(PYTHON) --version`. Say which one to use: make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	$(BIN)/uv pip install --quiet --compile-bytecode --require-hashes --requirement requirements.lock
	$(BIN)/uv pip install --quiet --no-deps --editable .
	@touch $@

.PHONY: setup
setup: $(READY) ## create the virtual environment in .venv

.PHONY: run
run: $(READY) ## train deploy/adascalejob.yaml on this machine
	$(BIN)/adascale run deploy/adascalejob.yaml

# Files of tests, such as TESTS=tests/worker/test_loops.py. Without: all of them.
TESTS ?=
# The tests of a file run in one process, so that they share its fixtures. Without: make test PARALLEL=
PARALLEL ?= --numprocesses auto --dist loadfile

.PHONY: test
test: $(READY) ## run the fast tests
	$(BIN)/python -m pytest -m "not slow and not cluster" $(PARALLEL) $(TESTS)

.PHONY: test-slow
test-slow: $(READY) ## run the slower tests
	$(BIN)/python -m pytest -m "slow and not cluster" $(PARALLEL) $(or $(TESTS),$$(grep -rl --include='test_*.py' mark.slow tests))

.PHONY: test-gpu
test-gpu: $(READY) ## run the tests that need a GPU with CUDA
	$(BIN)/python -m pytest -m gpu

.PHONY: test-failed
test-failed: $(READY) ## run the tests that failed last once more, one by one
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

.PHONY: test-packaging
test-packaging: $(READY) ## build the distributions, and test them as users install them
	.ci/packaging

# Options of the fault harness, such as CHAOS="--runs 1 --faults 8 --seed 5"; --help lists them.
CHAOS ?= --runs 25 --faults 200

.PHONY: chaos
chaos: $(READY) ## train under 200 faults, drawn from a seed
	PYTHONPATH=tests $(BIN)/python -m chaos $(CHAOS)

$(LOWEST_READY): pyproject.toml requirements-lowest.lock $(READY)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST_VENV)
	VIRTUAL_ENV=$(LOWEST_VENV) $(BIN)/uv pip install --quiet --compile-bytecode --require-hashes --requirement requirements-lowest.lock
	VIRTUAL_ENV=$(LOWEST_VENV) $(BIN)/uv pip install --quiet --no-deps --editable .
	@touch $@

# Needs Python 3.11 or 3.12: the lowest versions have no wheels for newer ones.
.PHONY: test-lowest
test-lowest: $(LOWEST_READY) ## run fast tests with the lowest versions of torch, kubernetes and uvicorn
	$(LOWEST_VENV)/bin/python -m pytest -p no:cacheprovider -m "not slow and not cluster" $(PARALLEL) $(LOWEST_TESTS)

.PHONY: check
check: $(READY) ## check format, lint, types, imports and sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/limits.py

.PHONY: format
format: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: crd
crd: $(READY) ## generate deploy/base/crd.yaml, and the table of the fields of pods
	$(BIN)/python deploy/crd.py > deploy/base/crd.yaml.new
	mv deploy/base/crd.yaml.new deploy/base/crd.yaml
	$(BIN)/python deploy/pod_fields.py > controller/adascale_controller/pod_fields.json.new
	mv controller/adascale_controller/pod_fields.json.new controller/adascale_controller/pod_fields.json

.PHONY: chart
chart: $(READY) ## write the Helm chart to build/chart/adascale-operator
	$(BIN)/python deploy/chart.py build/chart/adascale-operator

.PHONY: release
release: $(READY) ## build and check the distributions, images and chart of VERSION in dist/; PUBLISH=yes publishes them
	@test -n "$(VERSION)" || { echo "which version? run: make release VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" >&2; exit 2; }
	ENGINE="$(ENGINE)" BUILD_FLAGS="$(BUILD_FLAGS)" .ci/release "$(VERSION)"

.PHONY: reference
reference: $(READY) ## generate docs/reference.md from the docstrings
	$(BIN)/python docs/reference.py > docs/reference.md.new
	mv docs/reference.md.new docs/reference.md

LOCK := uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-emit-find-links --no-header --quiet

.PHONY: lock
lock: $(READY) ## resolve the versions in requirements.lock and requirements-lowest.lock again
	$(BIN)/$(LOCK) --group dev --output-file requirements.lock
	$(BIN)/$(LOCK) --group test --resolution lowest-direct --output-file requirements-lowest.lock

# $(call need,PROGRAM,why)
need = @command -v $(1) >/dev/null || { echo "\`$(1)\` is needed $(2), and is not installed" >&2; exit 2; }

.PHONY: images
images: $(PARTS:%=image-%) ## build the images adascale-worker, -api and -controller, with the tag dev

.PHONY: $(PARTS:%=image-%)
$(PARTS:%=image-%): image-%:
	@test -n "$(ENGINE)" || { echo "docker, podman or buildah is needed to build images, and none is installed; for another program with the same options, run: make images ENGINE=..." >&2; exit 2; }
	$(ENGINE) build $(BUILD_FLAGS) --target $* --tag adascale-$*:$(IMAGE_TAG) \
		--label org.opencontainers.image.version=$(IMAGE_TAG) \
		--label org.opencontainers.image.revision=$(shell git rev-parse HEAD 2>/dev/null || echo unknown) .

# Restarts the workloads, because an image with an unchanged name does not replace pods.
.PHONY: kind-up
kind-up: ## create a kind cluster with the images and the operator
	$(call need,kind,for a cluster on this machine)
	$(call need,kubectl,to access the cluster)
	@kind get clusters 2>/dev/null | grep -qx $(KIND_CLUSTER) || kind create cluster --name $(KIND_CLUSTER) --config deploy/kind/cluster.yaml
	@$(MAKE) --no-print-directory images
	@for part in $(PARTS); do $(MAKE) --no-print-directory kind-load-$$part || exit 1; done
	kubectl --context kind-$(KIND_CLUSTER) apply -k deploy/kind
	kubectl --context kind-$(KIND_CLUSTER) -n adascale-system rollout restart statefulset/adascale-api deployment/adascale-controller
	kubectl --context kind-$(KIND_CLUSTER) -n adascale-system rollout status --timeout=5m statefulset/adascale-api
	kubectl --context kind-$(KIND_CLUSTER) -n adascale-system rollout status --timeout=5m deployment/adascale-controller
	@echo "ready; train with: kubectl apply -f deploy/adascalejob.yaml"

# Loads an archive, which every engine can write; kind itself can read only docker's images.
.PHONY: $(PARTS:%=kind-load-%)
$(PARTS:%=kind-load-%): kind-load-%:
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT \
		&& $(MAKE) --no-print-directory archive-$* ARCHIVES="$$folder" \
		&& kind load image-archive --name $(KIND_CLUSTER) "$$folder/adascale-$*.tar"

# A node resolves names without a registry to docker.io/library, not to localhost/...
.PHONY: $(PARTS:%=archive-%)
$(PARTS:%=archive-%): archive-%:
	@mkdir -p "$(ARCHIVES)" && rm -f "$(ARCHIVES)/adascale-$*.tar"
ifeq ($(notdir $(ENGINE)),docker)
	$(ENGINE) save --output "$(ARCHIVES)/adascale-$*.tar" adascale-$*:$(IMAGE_TAG)
else
	$(ENGINE) push --quiet adascale-$*:$(IMAGE_TAG) "docker-archive:$(ARCHIVES)/adascale-$*.tar:docker.io/library/adascale-$*:$(IMAGE_TAG)"
endif

.PHONY: kind-down
kind-down: ## remove that cluster
	$(call need,kind,for a cluster on this machine)
	kind delete cluster --name $(KIND_CLUSTER)

# Most of the tests wait, each in a namespace of its own.
E2E_PARALLEL ?= --numprocesses 5 --dist worksteal
# $(call e2e,OPTIONS): pytest exits with 5 if no test is selected.
e2e = $(BIN)/python -m pytest $(1) $(or $(TESTS),tests/cluster) || [ $$? -eq 5 ]

.PHONY: e2e
e2e: $(READY) ## run the tests on the cluster that KUBECONFIG selects
	@$(MAKE) --no-print-directory e2e-parallel
	@$(MAKE) --no-print-directory e2e-disturbing

.PHONY: cluster-answers
cluster-answers:
	$(call need,kubectl,to access the cluster)
	@kubectl version >/dev/null 2>&1 || { echo "no cluster answers: set KUBECONFIG to that of one for tests, or run: make kind-up" >&2; exit 2; }

.PHONY: e2e-parallel
e2e-parallel: $(READY) cluster-answers
	$(call e2e,-m "not disturbs" $(E2E_PARALLEL))

# One by one: they change nodes, and stop parts of the cluster and of the installation.
.PHONY: e2e-disturbing
e2e-disturbing: $(READY) cluster-answers
	$(call e2e,-m disturbs)

# Those that CI leaves out, selected by words of their names, such as E2E_RELEASE=kueue.
E2E_RELEASE ?=
.PHONY: e2e-release
e2e-release: $(READY) cluster-answers
	$(BIN)/python -m pytest -m release -k "$(E2E_RELEASE)" $(or $(TESTS),tests/cluster)

# All take hours. CHECKS="kueue helm" runs these, and leaves the rows of the others.
CHECKS ?=
.PHONY: release-check
release-check: $(READY) ## run the long forms of what CI runs, and write docs/release-check.md
	$(BIN)/python tests/release_check.py $(CHECKS)

.PHONY: clean
clean: ## remove the virtual environment and the state of runs
	rm -rf $(VENV) $(LOWEST_VENV) .adascale
