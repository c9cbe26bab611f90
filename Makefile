# All commands for the checkout. Nothing is installed outside of it, except the cache (~/.cache/spottrain) of binaries, of
# pip's downloads and of mypy's results. Nothing needs root.
# `make gpu` uses a PYTHON from the environment or the command line as it is.
GIVEN := $(if $(filter environment command,$(firstword $(origin PYTHON))),$(PYTHON))
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest --numprocesses=4 --no-loadscope-reorder
CODE := runtime api planner operator cli trainer-image local-cluster tests examples demo benchmarks release docs
# If it is set, each of the tests' many processes compiles again what it imports.
unexport PYTHONDONTWRITEBYTECODE
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/spottrain
export PIP_CACHE_DIR ?= $(CACHE)/pip
# All checkouts share it, by the contents of files: a new clone checks only what has changed.
export MYPY_CACHE_DIR ?= $(CACHE)/mypy

# Every target with a description is a command, not a file.
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*[#]{2} .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	# One that was interrupted has no pip, and an older Python may have made it.
	$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@echo "Installing spottrain and what it needs (torch is large; a minute or two) ..."
	# Not compiled: that takes pip 30 s more, for modules that nobody imports.
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

env: $(STAMP) ## Create the virtual environment .venv, with all packages pinned by constraints.txt.

binaries: $(STAMP) ## Fetch Kubernetes, etcd and Helm into the cache, once, or build them. Not if KUBEBUILDER_ASSETS is set.
	$(BIN)/python -m spottrain_local.binaries

all-binaries: $(STAMP) ## The same, and what serves `kubectl exec` and `top`, and what restores etcd. Tests need these.
	$(BIN)/python -m spottrain_local.binaries --all

next-kubernetes: $(STAMP) ## Fetch Kubernetes 1.37 into the cache, once, or build it, which takes five minutes on two cores.
	$(BIN)/python -m spottrain_local.binaries --kubernetes 1.37

kueue: $(STAMP) ## Build Kueue for the tests of queues into the cache, once. Takes four minutes on two cores.
	$(BIN)/python -m spottrain_local.binaries kueue

kueue-crds: $(STAMP) ## Fetch the CRDs of Kueue for the contract tests into the cache, once.
	$(BIN)/python -m spottrain_local.binaries kueue-crds

karpenter: $(STAMP) ## Build Karpenter for the tests of node pools into the cache, once. Takes three minutes on two cores.
	$(BIN)/python -m spottrain_local.binaries karpenter

karpenter-crds: $(STAMP) ## Fetch the CRDs of Karpenter for the contract tests into the cache, once.
	$(BIN)/python -m spottrain_local.binaries karpenter-crds

prometheus: $(STAMP) ## Fetch Prometheus and promtool for the tests into the cache, once, if they are not on the PATH.
	$(BIN)/python tests/prometheus_binaries.py

azurite: $(STAMP) ## Install Azurite for the tests of az:// into the cache with npm, once.
	$(BIN)/python tests/azurite_server.py

demo: binaries ## Train a GPT on a local cluster, preempt its nodes, and write demo-out/report.html.
	MPLCONFIGDIR="$(CURDIR)/$(VENV)/matplotlib" $(BIN)/python -m demo --out demo-out

lint: $(STAMP) ## Check style, spelling, types, import contracts and Dockerfiles.
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile trainer-image/Dockerfile

AUDIT := build/audit
audit: binaries ## Check the chart, with each preset, and the Dockerfiles with checkov. Not part of `make test`.
	test -x $(AUDIT)/bin/checkov || ($(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/pip install --quiet checkov==3.3.30)
	rm -rf $(AUDIT)/chart && mkdir $(AUDIT)/chart
	for values in charts/spottrain/values*.yaml; do \
		"$$($(BIN)/python -m spottrain_local.binaries helm)" template spottrain charts/spottrain \
			--namespace spottrain-system --values $$values > $(AUDIT)/chart/$$(basename $$values) || exit; \
	done
	$(AUDIT)/bin/checkov --config-file .checkov.yaml --directory $(AUDIT)/chart
	$(AUDIT)/bin/checkov --config-file .checkov.yaml --file Dockerfile trainer-image/Dockerfile

docs: $(STAMP) ## Build the documentation into build/docs. A dead link is an error.
	$(BIN)/python -m sphinx --builder html --fresh-env --quiet --fail-on-warning --keep-going docs build/docs

unit: $(STAMP) ## Run the unit tests. Fetches or builds Helm for them, once.
	$(BIN)/python -m spottrain_local.binaries helm
	$(PYTEST) -m 'not nightly' tests/unit

# Where HEAD left main: what differs from it is what a change touches.
SINCE ?= origin/main
check: $(STAMP) all-binaries azurite kueue-crds karpenter-crds ## Before a commit: style, types, unit tests, and the tests that the change touches (SINCE=origin/main).
	touched="$$($(BIN)/python tests/touched.py --since $(SINCE))" && \
		$(MAKE) --no-print-directory --jobs=2 lint run-tests TESTS="tests/unit $$touched"

test: $(STAMP) all-binaries prometheus azurite kueue-crds karpenter-crds ## The gate: check style, types and docs, and run all tests.
	$(MAKE) --no-print-directory --jobs=3 lint-and-docs run-tests

# What these print stays together, and the tests' progress shows meanwhile.
lint-and-docs:
	$(MAKE) --no-print-directory --output-sync=target lint docs

TESTS ?= tests
.PHONY: lint-and-docs run-tests
run-tests: $(STAMP)
	$(PYTEST) -m 'not nightly' $(TESTS)

# What these draw differs each time. SPOTTRAIN_SEED, which they print, repeats it.
coverage test-nightly rehearse kill-points: export SPOTTRAIN_SEED ?= random

coverage: $(STAMP) all-binaries prometheus azurite kueue-crds karpenter-crds ## Run the tests of `make test`, and show what none of them reaches.
	$(PYTEST) -m 'not nightly' --cov

test-nightly: $(STAMP) all-binaries next-kubernetes kueue karpenter azurite ## Run the tests that `make test` leaves out: long ones, and further variants.
	$(PYTEST) -m nightly

test-containers: $(STAMP) all-binaries ## Run the tests of `local up --runtime podman`. They need root and podman, and fail without.
	$(BIN)/python -m pytest -n0 --containers -m containers

test-queues: $(STAMP) all-binaries kueue ## Run the tests of queues with the real Kueue, which are nightly ones. Builds it once.
	$(BIN)/python -m pytest -n0 tests/e2e/test_queues.py

test-karpenter: $(STAMP) all-binaries karpenter ## Run the tests of node pools with the real Karpenter, which are nightly ones. Builds it once.
	$(BIN)/python -m pytest -n0 tests/e2e/test_karpenter.py

test-next-kubernetes: $(STAMP) all-binaries next-kubernetes ## Run the tests on Kubernetes 1.37, which are nightly ones. Obtains it once.
	$(BIN)/python -m pytest -n0 tests/e2e/test_next_kubernetes.py

test-clients: $(STAMP) all-binaries ## Run the e2e tests of public Kubernetes clients on a local cluster. Fetches them first.
	$(BIN)/python tests/clients/run.py $(SUITES)

constraints: $(STAMP) ## Update constraints.txt and requirements/ to the newest releases that work together. Then `make test`.
	$(BIN)/uv pip compile --quiet --upgrade --python-version 3.11 --extra dev --no-header --no-annotate \
		--output-file constraints.txt pyproject.toml
	$(BIN)/python release/requirements.py

requirements: $(STAMP) ## Write requirements/: the images' packages of constraints.txt, with their hashes.
	$(BIN)/python release/requirements.py

release: binaries ## Build wheel, sdist, chart, CRD, SBOMs of the images and checksums into dist/.
	rm -rf dist && mkdir dist
	$(BIN)/python -m hatchling build -d dist
	"$$($(BIN)/python -m spottrain_local.binaries helm)" package charts/spottrain --destination dist
	cp crds/*.yaml dist/
	cp requirements/operator.txt dist/operator-requirements.txt
	cat requirements/trainer.txt requirements/trainer-cuda.txt > dist/trainer-image-requirements.txt
	for image in operator trainer-image; do \
		$(BIN)/cyclonedx-py requirements dist/$$image-requirements.txt --pyproject pyproject.toml \
			--output-file dist/$$image-sbom.cdx.json || exit; \
	done
	cd dist && sha256sum -- * > SHA256SUMS

crds: $(STAMP) ## Generate crds/ from the models, and copy them to the chart.
	$(BIN)/python -m spottrain_api.crd
	cp crds/*.yaml charts/spottrain/definitions/

schema: $(STAMP) ## Copy descriptions and defaults of the chart's values.yaml to its values.schema.json.
	$(BIN)/python -m docs.reference_pages.chart_schema

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
include release/images.mk
# The trainer's image: torch with CUDA's libraries; cpu: torch for CPUs; devel: on a base with CUDA's compiler.
VARIANTS := cpu devel
VARIANT ?=
OPERATOR_IMAGE = $(REGISTRY)/spottrain-operator:$(VERSION)
TRAINER_IMAGE = $(REGISTRY)/spottrain-trainer:$(VERSION)$(VARIANT:%=-%)
TRAINER_BASE = $(if $(filter devel,$(VARIANT)),$(CUDA_BASE),$(PYTHON_BASE))
TRAINER_TORCH = $(if $(filter cpu,$(VARIANT)),cpu,cuda)
BUILDER ?= $(firstword $(foreach tool,docker podman buildah,$(shell command -v $(tool))))
CHECK_IMAGES = $(if $(REGISTRY),,$(error REGISTRY is not set: make images push REGISTRY=registry.example/team)) \
	$(if $(BUILDER),,$(error None of docker, podman and buildah is on the PATH: install one of them)) \
	$(if $(filter-out $(VARIANTS),$(VARIANT)),$(error VARIANT=$(VARIANT) is none of: $(VARIANTS)))

image-operator: ## Build the operator's image alone.
	$(CHECK_IMAGES)
	$(BUILDER) build -t $(OPERATOR_IMAGE) --build-arg BASE=$(PYTHON_BASE) .

images: image-operator ## Build both images: make images REGISTRY=registry.example/team [VARIANT=cpu|devel]
	$(BUILDER) build -t $(TRAINER_IMAGE) --build-arg BASE=$(TRAINER_BASE) --build-arg TORCH=$(TRAINER_TORCH) \
		-f trainer-image/Dockerfile .

# `make images push` pushes what it built, with --jobs, too.
push: $(filter images image-operator,$(MAKECMDGOALS)) ## Push the images of `make images`, with the version as tag.
	$(CHECK_IMAGES)
	$(BUILDER) push $(OPERATOR_IMAGE)
	$(BUILDER) push $(TRAINER_IMAGE)

pins-images: $(STAMP) ## Renew the digests of base images, and the hashes of torch for CPUs. Needs skopeo, crane or docker.
	$(BIN)/python release/pin_images.py
	$(BIN)/python release/requirements.py --torch-cpu

bench-recovery: binaries build/recovery-peers/.installed ## Benchmark: recovery, compared with elastic torchrun and torchft.
	$(BIN)/python -m benchmarks.bench_recovery --peers build/recovery-peers/bin/python

rehearse: binaries ## Preempt 1 to 3 of 6 nodes at random, twenty times. Fails if a step is repeated.
	SPOTTRAIN_PREEMPTIONS=20 $(BIN)/python -m pytest -s --timeout=1800 tests/e2e/test_preemptions.py

kill-points: $(STAMP) azurite ## SIGKILL at every store operation, damage to every object, 1,000 rounds of rivals; on each store.
	SPOTTRAIN_KILL_POINTS=all $(BIN)/python -m pytest -s -n0 --timeout=900 tests/integration/test_checkpoint_kills.py \
		tests/integration/test_checkpoint_damage.py tests/integration/test_checkpoint_rivals.py

crash-points: binaries ## Kill the operator before and after each of its writes, on a real API server. Fails if a run ends otherwise.
	PYTHONPATH=tests $(BIN)/python -m crash_points

explore: $(STAMP) ## Model checker: the nightly worlds, 300,000 states each at most. Prints the shortest counterexample.
	PYTHONPATH=tests $(BIN)/python -m explorer --max-states 300000

explore-bugs: $(STAMP) ## Model checker: see that it finds every seeded bug in tests/explorer/bugs, with the way to it.
	PYTHONPATH=tests $(BIN)/python -m explorer --bugs

bench-checkpoint: $(STAMP) ## Benchmark: checkpoints compared with torch.save, DCP and DeepSpeed (stall, throughput, resume).
	$(BIN)/python -m benchmarks.bench_checkpoint

bench-replicas: $(STAMP) ## Benchmark: cost of replicas in members' memory in a step, and time to resume from them.
	$(BIN)/python -m benchmarks.bench_replicas

bench-notice: binaries ## Benchmark: time from the notice of each cloud to the flag that ranks read.
	$(BIN)/python -m benchmarks.bench_notice

bench-control-api: binaries ## Benchmark: time from a notice to the operator's drain, under a flood of bogus tokens.
	$(BIN)/python -m benchmarks.bench_control_api

bench-agreement: $(STAMP) ## Benchmark: cost of agreement and heartbeat in a step.
	$(BIN)/torchrun --nproc-per-node=4 --standalone benchmarks/bench_agreement.py

bench-boundary: $(STAMP) ## Benchmark: cost of a boundary in a script's own loop, on one rank and on two.
	for ranks in 1 2; do $(BIN)/torchrun --nproc-per-node=$$ranks --standalone benchmarks/bench_boundary.py; done

bench-memory: $(STAMP) ## Benchmark: estimated memory compared with the measured peak, by model and strategy.
	$(BIN)/python -W ignore -m benchmarks.bench_memory

# The packages of the operator's image, and no others.
OPERATOR := build/operator
$(OPERATOR)/.installed: requirements/operator.txt
	test -x $(OPERATOR)/bin/python || $(PYTHON) -m venv $(OPERATOR)
	$(OPERATOR)/bin/pip install --quiet --upgrade pip
	$(OPERATOR)/bin/pip install --quiet --no-deps --require-hashes --requirement requirements/operator.txt
	touch $@

bench-operator: binaries $(OPERATOR)/.installed ## Benchmark: the operator with 1,000 jobs: at rest, at notices for a tenth of the nodes, restarted.
	$(BIN)/python -m benchmarks.bench_operator --python $(OPERATOR)/bin/python

bench-plan: $(STAMP) ## Benchmark: time to plan 1,000 jobs.
	$(BIN)/python -m benchmarks.bench_plan

bench-throughput: $(STAMP) ## Benchmark: tokens a second and MFU compared with a plain torch loop.
	$(BIN)/python -W ignore -m benchmarks.bench_throughput

# The peers of a benchmark, beside the packages of .venv. An older package of theirs comes first.
build/data-peers/.installed: PEERS := mosaicml-streaming==0.13.0 litdata==0.2.76 webdataset==1.0.2 torchdata==0.11.0
build/recovery-peers/.installed: PEERS := torchft-nightly==2026.10.26
build/%-peers/.installed: $(STAMP)
	$(BIN)/python -m venv --clear $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/environment.pth"
	$(@D)/bin/pip install --quiet --no-compile $(PEERS)
	touch $@

bench-data: build/data-peers/.installed ## Benchmark: data from shards compared with MosaicML Streaming, LitData, WebDataset and torch.
	$(BIN)/python -m benchmarks.bench_data --peers build/data-peers/bin/python

bench-workers: $(STAMP) ## Benchmark: time of a step by the number of data workers, for cheap and expensive samples.
	$(BIN)/python -m benchmarks.bench_workers

bench-restart: $(STAMP) ## Benchmark: seconds of each part of a restart, for a model of 1 GB on the CPU.
	$(BIN)/python -m benchmarks.bench_restart

gpu: $(if $(GIVEN),,$(STAMP)) ## On a machine with a GPU: its tests, then checkpoints and tokens a second. 8 minutes.
	$(or $(GIVEN),$(BIN)/python) -W ignore -m benchmarks.on_gpu

clean: ## Remove the output of demos and benchmarks. A cluster of a demo that was killed is stopped first.
	test ! -d demo-out/cluster/demo || SPOTTRAIN_LOCAL_HOME=demo-out/cluster $(BIN)/spottrain local down --name demo
	rm -rf demo-out bench-out .spottrain
