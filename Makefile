# Everything from a clone: `make study` measures this machine, `make test` tests the project.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INTEGRATIONS := .venv-integrations
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
TESTED := git python3-pip debootstrap chromium docker-registry busybox-static uidmap openssh-server crun runc runsc qemu-system-x86 lz4

.DEFAULT_GOAL := help
.PHONY: help linux setup study study-all test test-slow test-integrations test-vm test-vm-substrate k8s-up k8s-down test-k8s check format bench soak fuzz docs clean

help: ## Show this
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

# In one sentence, before anything is built.
linux:
	@scripts/needs-linux

setup: linux $(INSTALLED) ## Make .venv with the dutyfree command in it
	@echo 'dutyfree is in $(BIN). To go on:'
	@echo '  $(BIN)/dutyfree doctor                what this machine offers, and what is missing'
	@echo '  $(BIN)/dutyfree run -- echo hello     a command in a fresh sandbox'
	@echo '  make study                          measure this machine: a few minutes, ends with a report'

# "pip install '/path/to/dutyfree[...]'" without -e puts a copy there, which would stay as it is after "git pull".
COPIED := $(shell [ -e $(INSTALLED) ] && ! grep -qs '"editable": *true' $(VENV)/lib/python*/site-packages/dutyfree-*.dist-info/direct_url.json && echo copied)
.PHONY: copied

$(INSTALLED): $(COPIED) pyproject.toml hatch_build.py scripts/setup $(wildcard src/dutyfree/engine/init/*.[ch] src/dutyfree/engine/init/*/*.[ch])
	@scripts/needs-linux
	scripts/host-tools gcc musl-tools linux-libc-dev
	scripts/setup "$(PYTHON)" "$(VENV)"
	@touch $@

$(DEVELOPED): $(INSTALLED)
	scripts/setup "$(PYTHON)" "$(VENV)" dev
	@touch $@

study: linux $(INSTALLED) ## Measure this machine: bare, native, and the archetypes that run here; ends with a report
	scripts/host-tools git python3-pip
	$(BIN)/dutyfree study $(ARGS)

study-all: linux $(INSTALLED) ## Set up and measure all archetypes: Docker, crun, runc, gVisor, Kubernetes, QEMU; hours
	scripts/setup "$(PYTHON)" "$(VENV)" "" kubernetes
	scripts/study-all $(BIN)/dutyfree --plan archetypes $(ARGS)

# Tests start hundreds of programs, each of which would else compile all its modules anew.
test test-slow: export PYTHONDONTWRITEBYTECODE :=
test: linux $(DEVELOPED) ## All tests but the long ones, with the real parts that this machine can have
	scripts/host-tools $(TESTED)
	scripts/with-docker scripts/run-tests "$(BIN)/python" "not slow" $(ARGS)

test-slow: linux $(DEVELOPED) ## The long ones: whole studies that are killed, images that are built, endurance
	scripts/host-tools $(TESTED)
	scripts/with-docker scripts/run-tests "$(BIN)/python" slow $(ARGS)

# In an environment of its own: what these frameworks install changes how the other tests behave.
test-integrations: linux $(INSTALLED) ## Other people's frameworks on top of dutyfree; installs them (about a minute)
	scripts/setup "$(PYTHON)" "$(INTEGRATIONS)" dev inspect clients
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations $(ARGS)
	scripts/setup "$(PYTHON)" "$(INTEGRATIONS)-verifiers" dev "" verifiers
	$(INTEGRATIONS)-verifiers/bin/python -m pytest tests/integrations/test_verifiers.py $(ARGS)

test-vm-substrate: linux $(DEVELOPED) ## The substrate vm, its conformance too: machines of QEMU that boot and are restored
	scripts/host-tools $(TESTED)
	$(BIN)/python -m pytest -m "vm or emulated" tests $(ARGS)

test-vm: $(DEVELOPED) ## The native engine in a virtual machine: control groups v2, as root and without
	PYTHON=$(BIN)/python scripts/vm-test $(ARGS)

k8s-up: ## Start a Kubernetes cluster of one node, unless ours runs; prints the path of its kubeconfig
	@scripts/k8s-cluster up

k8s-down: ## End it, and undo what it changed on this machine
	@scripts/k8s-cluster down

test-k8s: linux $(DEVELOPED) ## All checks of pods, in both ways, and a study on them; starts a cluster if there is none
	scripts/host-tools $(TESTED)
	[ -n "$$KUBECONFIG" ] || scripts/k8s-cluster up
	$(BIN)/python -m pytest -n 4 --dist loadscope -m kubernetes tests $(ARGS)
	$(BIN)/dutyfree study --plan smoke --substrates bare,kubernetes --out build/smoke-kubernetes-$$$$

check: $(DEVELOPED) ## Linters, types, and a source for every number in the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_claims.py

format: $(DEVELOPED) ## Put the code into shape, and write the types of dutyfree.sync
	$(BIN)/python scripts/sync_types.py
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: linux $(INSTALLED) ## Measure what dutyfree itself costs
	scripts/host-tools crun runc runsc bubblewrap
	scripts/with-docker $(BIN)/python bench/run.py $(ARGS)

soak: linux $(INSTALLED) ## Endurance of the native engine: cycles, many at once, kills, bombs
	$(BIN)/python bench/soak.py $(ARGS)

fuzz: $(DEVELOPED) ## Coverage-guided fuzzing of the C program's parsers, a minute each: ARGS="SECONDS TARGET..."
	PYTHON=$(BIN)/python scripts/fuzz $(ARGS)

docs: $(DEVELOPED) ## Build the documentation site with the API reference, then check its links and commands
	$(BIN)/python scripts/build-docs
	$(BIN)/python -m pytest tests/docs $(ARGS)

clean: ## Remove what was made here (not the cache, not ./out)
	rm -rf $(VENV) $(INTEGRATIONS) $(INTEGRATIONS)-verifiers build dist docs/reference .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
