# jaxpar: `make train` and `make test` set up everything they need; the others build on the same environment.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# The newest Python that this machine can start, 3.14 last: there not all tests have run. PYTHON=/path/to/python chooses.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' >/dev/null 2>&1 \
	&& { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRAIN_ARGS ?=
# Each worker begins with half of the tests in their order, so that tests of one file share fixtures and programs.
PYTEST_ARGS ?= -n 2 --dist worksteal
LAB_ARGS ?=
MUTANTS_ARGS ?=
# For CI, which leaves to another call what that runs anyway: --without core, --without once, --share, or -m.
PART ?=
# Where the tests keep compiled programs from one run to the next. CI starts without any. PROGRAMS= turns it off.
PROGRAMS ?= $(if $(CI),,$(abspath $(VENV))/.programs)
test coverage test-slow test-core: export JAXPAR_TEST_PROGRAMS = $(PROGRAMS)
# Tests start many processes, and each would compile all sources anew.
test coverage test-slow test-core: export PYTHONDONTWRITEBYTECODE =

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# jaxpar with the extras named. uv takes a fifth of pip's time. It does not read pip's configuration: where it fails, pip tries.
extras = $(foreach extra,$(1),-e '.[$(extra)]')
install = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt $(extras) \
	|| $(BIN)/python -m pip install --quiet -c constraints.txt $(extras)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "jaxpar needs Python 3.11 to 3.14 with venv; give one as PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip uv -c constraints.txt
	$(call install,test lint)
	@touch $@

# The C++ kernels of cpu/, which are optional.
KERNELS := $(VENV)/.kernels
$(KERNELS): $(READY) $(wildcard cpu/src/* cpu/jaxpar_cpu/*.py cpu/*.py cpu/*.toml) | debian
	@if [ -n "$$CXX" ] || command -v g++ >/dev/null || command -v clang++ >/dev/null; then \
		$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation ./cpu; else false; fi \
		|| echo "no C++ compiler built the kernels in cpu/: XLA's own kernels are used on CPUs" >&2
	@touch $@

setup: $(READY)  ## make the virtual environment in .venv (done by the other targets too)

debian:  # the Debian packages the README names, where they are missing
	@tools/debian_packages.sh

train: $(READY) $(KERNELS)  ## train LeNet on the real Fashion-MNIST over 4 devices by pmap; TRAIN_ARGS='--epochs 10' to change it
	$(BIN)/python -m jaxpar train --devices 4 --epochs 5 --output-dir runs/$$(date +%Y%m%d-%H%M%S) $(TRAIN_ARGS)

test: $(READY) $(KERNELS)  ## run the tests, notebook 01 too; PYTEST_ARGS='-k kv' to choose
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(PART)

coverage: $(READY) $(KERNELS)  ## the same tests, and which lines of jaxpar they run, in htmlcov/
	$(call install,coverage)
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(PART) --cov --cov-report=html --cov-report=term:skip-covered

# XLA_FLAGS set and empty: the code that users get, where tests/conftest.py would choose what compiles faster.
test-core: $(READY) $(KERNELS)  ## the store, the step and what they stand on, with XLA as users have it
	XLA_FLAGS= $(BIN)/python -m pytest -m 'core and not slow' $(PYTEST_ARGS) $(PART)

test-slow: $(READY) $(KERNELS)  ## the second row: long tests, and those with libraries that users bring
	$(call install,others)
	$(BIN)/python -m pytest -m '(slow or others) and not lab and not release' $(PYTEST_ARGS) $(PART)

plan-env: $(READY)  ## the compilers of TPUs and GPUs in .venv-plan (1 GB), for `jaxpar plan` on a machine without them
	$(BIN)/python -m venv .venv-plan
	.venv-plan/bin/python -m pip install --quiet --no-deps -c constraints.txt \
		libtpu jax-cuda12-plugin jax-cuda12-pjrt cloudpickle
	@echo "export JAXPAR_PLAN_PYTHON=$(CURDIR)/.venv-plan/bin/python"

notebooks: $(READY) debian  ## run the notebooks in place, outputs included
	$(BIN)/python tools/run_notebooks.py notebooks/*.ipynb

lab: $(READY) debian  ## JupyterLab with the notebooks, in the project's environment; LAB_ARGS='--no-browser' to change it
	$(call install,notebooks)
	$(BIN)/python -m jupyterlab --notebook-dir=. --LabApp.default_url=/lab/tree/notebooks/01_kvstore.ipynb $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

lab-test: $(READY) debian  ## every notebook in a JupyterLab in headless Chromium (Debian package chromium)
	$(call install,notebooks lab)
	$(BIN)/python -m pytest -m lab tests/house/test_lab.py

docs-test: $(READY)  ## the built documentation in headless Chromium (Debian package chromium)
	$(call install,docs lab)
	$(BIN)/python -m pytest -m slow tests/house/test_site.py

lint: $(READY)  ## ruff and pyright, which is strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(READY)  ## the documentation as pages, in site/
	$(call install,docs)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

matrix: $(READY) debian  ## the tests of the wheel on every Python there is, with the oldest and the newest jax
	$(BIN)/python tools/matrix.py

dist: $(READY)  ## the wheel and the sdist in dist/; each trains in an empty environment on every Python there is
	rm -rf dist && $(BIN)/uv build --quiet --out-dir dist .
	$(BIN)/python tools/matrix.py --dist dist --no-tests

bench: $(READY) debian  ## the benchmarks, each against its peers in one interleaved run
	for b in benchmarks/[a-z]*.py; do $(BIN)/python $$b || exit 1; done
	$(BIN)/python benchmarks/_draw.py

# Cosmic Ray makes the mutations and is not in the environment of the tests, whose Python must be 3.12 or later here.
mutants: $(READY) $(KERNELS)  ## 300 random mutations of the source: which does no test see? MUTANTS_ARGS='--seed 1' to change it
	@test -x .venv-mutants/bin/cosmic-ray || { $(PYTHON) -m venv .venv-mutants \
		&& .venv-mutants/bin/python -m pip install --quiet cosmic-ray==8.7.0; }
	.venv-mutants/bin/python tools/mutants.py --python $(BIN)/python $(MUTANTS_ARGS)

mxnet:  ## MXNet 1.9.1 in .venv-mxnet, a peer of the benchmarks; needs Python 3.8
	@p=$$(for c in python3.8 "$$(uv python find 3.8 2>/dev/null)" ~/.pyenv/versions/3.8*/bin/python; do \
		"$$c" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 8))' >/dev/null 2>&1 && { echo "$$c"; break; }; done); \
	test -n "$$p" || { echo "mxnet needs Python 3.8" >&2; exit 1; }; \
	"$$p" -m venv .venv-mxnet && .venv-mxnet/bin/pip install --quiet -r benchmarks/requirements-mxnet.txt

constraints: $(READY)  # write constraints.txt again: versions only, for every supported Python
	$(BIN)/uv pip compile --universal --python-version 3.11 --all-extras --no-header --no-annotate \
		--quiet -o constraints.txt --upgrade pyproject.toml

clean:  ## remove what make made
	rm -rf $(VENV) runs build dist site htmlcov .coverage .pytest_cache .ruff_cache docs/.ruff_cache .hypothesis

.PHONY: help setup debian train test coverage test-core test-slow plan-env notebooks lab lab-test docs-test lint docs matrix dist bench mutants mxnet constraints clean
