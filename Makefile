# `make test` and `make demo` are all a stranger needs. Caches live in $HPU_CACHE (default ~/.cache/hpu-inference).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help test demo down clean bench soak images lock setup kernels machine system-packages python
# One after the other, also with -j: `machine` says what is missing before anything is made.
.NOTPARALLEL:

ifeq ($(origin PYTHON),undefined)
# Not that of our own environment, should the caller have it on PATH: it is made, and removed, by this one.
PYTHON := $(shell own="$(CURDIR)/.venv/bin:"; PATH="$${PATH//"$$own"/}"; \
  command -v python3.11 || command -v python3.12 || command -v python3 || echo python3)
endif
# An empty one is none. Absolute: programs run in other folders.
override HPU_CACHE := $(abspath $(or $(HPU_CACHE),$(HOME)/.cache/hpu-inference))
$(if $(word 2,$(HPU_CACHE)),$(error HPU_CACHE=$(HPU_CACHE): make cannot handle spaces in it, choose another folder))
export HPU_CACHE
UV_VERSION := 0.13.9
UV_FOLDER := $(HPU_CACHE)/uv-$(UV_VERSION)
UV := $(UV_FOLDER)/bin/uv
RUN := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(UV_FOLDER)/bin:$(PATH)
export UV_PYTHON_DOWNLOADS := never
STARTED := $(shell date +%s)
since_start = $$(( $$(date +%s) - $(STARTED) )) s

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: machine setup ## everything that CI runs: set-up, then every test tier
	$(RUN) -m tests.cluster build
	$(RUN) -m tests.images build --for-nodes
	@echo "set-up: everything is there after $(since_start)"
	@$(RUN) -m pytest -n 2 $(PYTEST_ARGS); code=$$?; echo "make test: $(since_start) in all, set-up included"; exit $$code

soak: machine setup ## five steady minutes without a write
	HPU_STEADY_SECONDS=300 $(RUN) -m pytest -s --timeout 900 tests/control_plane/test_steady.py

demo: machine setup ## a cluster, the operator, a model, an answer
	$(RUN) -m tests.demo

down: python ## end and remove every cluster that was started here; caches stay
	@$(PYTHON) -m tests.cluster.removal

clean: python ## down, and remove the caches and the environment too
	@$(PYTHON) -m tests.cluster.removal --caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis $(KERNELS)/kernels-*.so

bench: setup ## the engine's workloads over HTTP; see hpu-engine bench --help
	$(RUN) -m tests.bench

images: machine setup ## build the images; REGISTRY=host/prefix also pushes them, GAUDI_BASE=image adds engine-gaudi
	$(RUN) -m tests.images build $(if $(GAUDI_BASE),operator engine-cpu engine-gaudi --gaudi-base "$(GAUDI_BASE)")
	$(if $(REGISTRY),$(RUN) -m tests.images push "$(REGISTRY)")

python:
	@command -v "$(PYTHON)" >/dev/null || { echo "missing: Python 3.11 or 3.12 ($(PYTHON) is not there)" >&2; \
	  echo "         install it (Debian, as root: apt-get install python3), or set PYTHON" >&2; exit 1; }

machine: python
	@$(PYTHON) -m tests.machine --node

system-packages: python ## (root, Debian) install the packages that the node and the images need
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $$($(PYTHON) -m tests.machine --packages)

setup: .venv/.synced kernels ## the Python environment, from the lock, and the kernels for processors with AMX

# The stamp is what is made last: half of an installation does not count. One at a time, of whichever checkout.
$(UV_FOLDER)/.whole: | python
	@echo "set-up: uv $(UV_VERSION)"
	@mkdir -p "$(HPU_CACHE)"
	@exec 9>"$(HPU_CACHE)/uv.lock" && flock 9 && if [ ! -e $@ ]; then rm -rf "$(UV_FOLDER)" && \
	  $(PYTHON) -m venv "$(UV_FOLDER)" && \
	  "$(UV_FOLDER)/bin/pip" install --quiet --disable-pip-version-check uv==$(UV_VERSION) && touch $@; fi

WITHOUT_CUDA := images/without_cuda.py

.venv/.synced: requirements/dev.txt pyproject.toml $(WITHOUT_CUDA) | $(UV_FOLDER)/.whole
	@echo "set-up: Python environment from requirements/dev.txt (about 2 GB)"
	@$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv
	@$(RUN) $(WITHOUT_CUDA) lock requirements/dev.txt >.venv/lock.txt
	@set -o pipefail; VIRTUAL_ENV=.venv $(UV) pip sync .venv/lock.txt 2>&1 | sed -u '/^ [+~-] /d; s/^ */set-up: /'
	@$(RUN) $(WITHOUT_CUDA) libraries $$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') >/dev/null
	@VIRTUAL_ENV=.venv $(UV) pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

KERNELS := engine/hpu_engine/device/cpu/native

# The library's name says which sources it is of, so whether it is there is all there is to know. Where it cannot be built
# the engine computes with torch's, and this says so.
kernels: .venv/.synced
	@$(RUN) $(KERNELS)/build.py $(KERNELS) || true

LOCKS := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
  --custom-compile-command "make lock"

lock: | $(UV_FOLDER)/.whole ## resolve the dependencies anew into requirements/
	@for extra in operator engine cpu dev; do \
	  $(LOCKS) --extra $$extra pyproject.toml --output-file requirements/$$extra.txt || exit 1; done
	@$(LOCKS) requirements/build.in --output-file requirements/build.txt
