# `make demo` and `make test` work from a fresh clone; `make help` lists the rest.
# Each environment is a folder made once; its stamp is older than pyproject.toml after a change there, and then it is brought up to date.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
VENV_TORCH ?= .venv-torch
PYTHON ?=
PYTHON_OLDEST ?=
PYTHON_TORCH ?=
# pip's own settings (index, find-links) decide whether this is the CPU build or a CUDA one of several GB.
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
# Test processes: each holds a JAX with 8 virtual devices, so more than 8 do not pay.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
PYTEST_ARGS ?=

PIP = -m pip install --quiet --quiet --disable-pip-version-check
PYTEST = -m pytest -q -n $(JOBS) --dist worksteal
PROMPT ?= And the woman said unto the serpent,

# Fewer comparison cases than these means that a part of the tests vanished unnoticed.
MIN_CASES ?= 6500
MIN_CASES_FULL ?= 1
MIN_CASES_OLDEST ?= 4500
MIN_CASES_PYTORCH ?= 39
# The oldest jax runs this many cases of each test function.
OLDEST_CASES ?= 1
# What the oldest jax has to run: each block kind, each implementation, weights, generation, the program, processes. Of what
# hardly depends on jax (programs that are killed, say) one test or none.
OLDEST_TESTS ?= tests/pallas_kernels tests/test_model.py tests/test_reference.py tests/test_moe.py tests/test_mtp.py \
  tests/test_fusion.py tests/test_plans.py tests/test_bfloat16.py tests/test_sampling.py tests/test_generation.py \
  tests/test_cli_generate.py tests/test_weights.py tests/test_orbax.py::test_saved_at_four_restored_anywhere \
  tests/test_orbax.py::test_convert_command tests/test_inspect.py::test_kernels_are_counted_for_gpus_that_are_not_here \
  tests/test_processes.py::test_generate_in_two_processes

.PHONY: help demo test test-full test-oldest test-pytorch check wheel clean

help:
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

demo: $(VENV)/.installed ## set up .venv and write text with the shipped model, tensor parallel over 4 devices, sums deferred
	$(VENV)/bin/nemotron-jax generate --prompt "$(PROMPT)" --max-new-tokens 48 --tensor-parallel 4 --fusion all/gather

test: $(VENV)/.installed-dev ## set up .venv and run the default tests (CPU, under 15 minutes on 2 cores)
	$(VENV)/bin/python $(PYTEST) --min-cases $(MIN_CASES) $(PYTEST_ARGS)

test-full: $(VENV)/.installed-dev ## every case of the grids, and the slow tests
	$(VENV)/bin/python $(PYTEST) --full --min-cases $(MIN_CASES_FULL) $(PYTEST_ARGS)

test-oldest: $(VENV_OLDEST)/.installed ## blocks, kernels, weights, generation and program with the oldest supported jax
	$(VENV_OLDEST)/bin/python $(PYTEST) --thin $(OLDEST_CASES) --min-cases $(MIN_CASES_OLDEST) $(OLDEST_TESTS) $(PYTEST_ARGS)

test-pytorch: $(VENV)/.installed-dev $(VENV_TORCH)/.installed ## compare with PyTorch live, in its own Python 3.11 environment
	$(VENV)/bin/python -m pytest -q -n $(JOBS) --dist loadfile tests/pytorch --torch-python $(VENV_TORCH)/bin/python --min-cases $(MIN_CASES_PYTORCH) $(PYTEST_ARGS)

check: $(VENV)/.installed-dev ## lint and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyrefly check

wheel: $(VENV)/.installed-dev ## build dist/*.whl
	rm -rf dist
	$(VENV)/bin/python -m pip wheel --quiet --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean: ## remove the environments and build outputs
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_TORCH) build dist *.egg-info

# Makes the environment $(1) unless it is there and works; $(2) is a Python given by hand, $(3) the versions to look for.
define make_env
	$(1)/bin/python -m pip --version >/dev/null 2>&1 || { \
	  python="$(2)"; [ -n "$$python" ] || python=$$(scripts/find_python.sh $(3)); "$$python" -m venv --clear $(1); }
endef

$(VENV)/.installed: pyproject.toml
	@echo "Setting up $(VENV) (one to three minutes the first time)"
	$(call make_env,$(VENV),$(PYTHON),3.14 3.13 3.12)
	$(VENV)/bin/python $(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Adding the test tools to $(VENV)"
	$(VENV)/bin/python $(PIP) --editable '.[dev]'
	touch $@

# The oldest jax and flax that pyproject.toml admits, on the oldest Python.
$(VENV_OLDEST)/.installed: pyproject.toml
	@echo "Setting up $(VENV_OLDEST)"
	$(call make_env,$(VENV_OLDEST),$(PYTHON_OLDEST),3.12 3.13 3.14)
	$(VENV_OLDEST)/bin/python $(PIP) --editable '.[dev]' jax==0.11.2 jaxlib==0.11.2 flax==0.12.10 orbax-checkpoint==0.12.4
	touch $@

$(VENV_TORCH)/.installed: pyproject.toml
	@echo "Setting up $(VENV_TORCH)"
	$(call make_env,$(VENV_TORCH),$(PYTHON_TORCH),3.11 3.12 3.13)
	$(VENV_TORCH)/bin/python $(PIP) '$(TORCH)' '$(TRANSFORMERS)' safetensors numpy
	touch $@
