# make setup   the three environments (.venv/core, .venv/train, .venv/vllm) from locks/
# make demo    setup, then a real small model from prompts to a served pair
# make check   lint, types and the fast tests (under 3 minutes on 2 cores)
# make test    every test; make test-{vllm,train,e2e,containers,core,memory} one part of them
# make lint    lint and types only
# make clean   remove the environments and caches (not the artifacts in .qdflash)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

PYTHON ?= python3
ACCELERATOR ?= cpu
export HF_HUB_OFFLINE ?= 1

CORE := contract store prompts bundle gate deploy report
TRAIN := chats checkpoint model ptq sequences training qad select pack drafter gptq
VLLM := serving regen measure
core_tests := $(CORE:%=tests/components/%) tests/pipelines tests/images tests/charts tests/manifests
# minutes on one core, beside tests that mostly wait
long_test := tests/components/prompts/test_memory.py
train_tests := $(TRAIN:%=tests/components/%) tests/benchmarks
vllm_tests := $(VLLM:%=tests/components/%)
# they share a Docker engine and the images that they build
container_tests := tests/e2e/test_containers.py tests/e2e/test_tiny_in_containers.py
# the longest first
suites := containers vllm e2e train memory core

.PHONY: setup demo test check lint clean $(suites:%=test-%)

setup:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || {
	  echo "setup: $(PYTHON) is missing or is not Python 3.11 or 3.12; name one with PYTHON=" >&2; exit 2; }
	$(PYTHON) images/setup.py --accelerator $(ACCELERATOR)

demo: setup
	@.venv/core/bin/qdflash run pipelines/recipes/smol.yaml

lint: setup
	@.venv/core/bin/ruff check .
	.venv/core/bin/ruff format --check .
	.venv/core/bin/mypy

check: lint
	@.venv/core/bin/python -m pytest -q -m "not slow" $(core_tests) & core=$$!
	trap 'kill $$core 2>/dev/null || true' EXIT
	.venv/train/bin/python -m pytest -q -m "not slow" $(train_tests)
	.venv/vllm/bin/python -m pytest -q -m "not slow" $(vllm_tests)
	wait $$core

test: lint
	@echo "test: $(suites), two at a time; each prints when it has ended"
	$(MAKE) --no-print-directory --keep-going -j2 --output-sync=target $(suites:%=test-%)

test-vllm:
	@.venv/vllm/bin/python -m pytest -q $(vllm_tests)

test-train:
	@.venv/train/bin/python -m pytest -q $(train_tests)

test-core:
	@.venv/core/bin/python -m pytest -q --ignore $(long_test) $(core_tests)

test-e2e:
	@.venv/core/bin/python -m pytest -q $(container_tests:%=--ignore %) tests/e2e

test-containers:
	@.venv/core/bin/python -m pytest -q $(container_tests)

test-memory:
	@.venv/core/bin/python -m pytest -q $(long_test)

clean:
	@rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
