# From a bare clone: `make demo`, `make test`. Needs Python >= 3.10 and g++ >= 11; nvcc adds the GPU kernels.
#
#   make TORCH=torch==2.15.0 test       another torch
#   make NO_CUDA=1 test                 CPU kernels only, though nvcc is there
#   make PYTHON=/usr/bin/python3 VENV_ARGS=--system-site-packages demo
#                                       use the torch that this Python already has

PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
TORCH ?= torch==2.11.0
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && echo 8 || echo $$n)
PYTEST_ARGS ?=
DEMO_ARGS ?=
EXTRAS ?= demo,test
RANKS ?= 2
# `make SANITIZE_FILES=. SANITIZE_CALLS=5000 sanitize` runs a file of the suite per op.
SANITIZE_FILES ?= raw_arguments|malformed_windows|dense_outputs|fuzz
SANITIZE_CALLS ?= 1000

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check -q install
# One stamp for each choice of torch and interpreter, so that changing the choice installs again.
choice := $(shell printf '%s' '$(PYTHON) $(VENV_ARGS) $(TORCH)' | cksum | cut -d' ' -f1)
base := $(VENV)/.base-$(choice)
# CPU-only and GPU builds share the folder: the stamp carries the switches that setup.py reads, and the extras.
build := $(VENV)/.build-$(choice)-$(shell printf '%s' '$(EXTRAS) $(NO_CUDA) $(FORCE_CUDA) $(LINEINFO) $(FAST_COMPILE) $(TORCH_CUDA_ARCH_LIST)' | cksum | cut -d' ' -f1)
sources := $(shell find csrc python -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' -o -name '*.py')

.PHONY: demo demo-distributed build-here test test-gpu test-long sanitize lint build docs clean

demo: build-here
	$(python) -m warpwright demo --out demo-out $(DEMO_ARGS)

# Compiles what this machine can run: without a GPU the CPU kernels alone, unless all are compiled already.
# Then the suite's packages are left out, too.
build-here:
	@if [ -n '$(NO_CUDA)$(FORCE_CUDA)' ] || [ -e '$(build)' ] || nvidia-smi -L >/dev/null 2>&1; then \
	  $(MAKE) --no-print-directory build; \
	else \
	  echo 'make: no GPU here, so only the CPU kernels are compiled (`make build` compiles all)'; \
	  $(MAKE) --no-print-directory NO_CUDA=1 EXTRAS=demo build; \
	fi

# The CNN on two CPU processes, ours and native's: `make RANKS=4 demo-distributed` for four.
demo-distributed: build-here
	OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(python) -m torch.distributed.run --standalone --nproc_per_node $(RANKS) \
	  examples/train_ddp.py --device cpu --compare $(DEMO_ARGS)

test: $(build)
	$(python) -m pytest -n $(WORKERS) --dist worksteal -m 'not slow' $(PYTEST_ARGS) tests

# The GPU's tests alone, in as many workers as the cores and the GPU's memory allow.
test-gpu: $(build)
	$(python) -m pytest -n auto --dist worksteal -m 'gpu and not slow' $(PYTEST_ARGS) tests

# Everything: the slow tests, and 2,000 random cases an op.
test-long: $(build)
	WARPWRIGHT_FUZZ_CASES=2000 $(python) -m pytest -n $(WORKERS) --dist worksteal --timeout 7200 $(PYTEST_ARGS) tests

# The CPU library under AddressSanitizer and UBSan, in build/sanitize: a bounded share of suite and random calls.
sanitize: $(build)
	$(python) tools/campaign.py sanitizers --cases $(SANITIZE_CALLS) --only '$(SANITIZE_FILES)' --no-record

build: $(build)

# The site from docs/ and the docstrings, in build/docs/index.html. A warning, such as a dead link, is an error.
docs: $(VENV)/.docs-$(choice)
	$(python) -m sphinx -q -W --keep-going -b html docs build/docs

lint: $(VENV)/.lint-$(choice)
	PATH=$(VENV)/bin:$$PATH; find csrc benchmarks docs examples tests -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' | xargs clang-format --dry-run -Werror
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

$(base):
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	$(pip) '$(TORCH)' 'setuptools>=77,<82' wheel ninja 'pybind11>=2.13' numpy
	rm -f $(VENV)/.base-* $(VENV)/.build-* $(VENV)/.lint-* $(VENV)/.docs-*
	touch $@

$(build): $(base) pyproject.toml setup.py $(sources)
	$(pip) --no-build-isolation -e '.[$(EXTRAS)]'
	rm -f $(VENV)/.build-*
	touch $@

$(VENV)/.docs-$(choice): $(build) pyproject.toml
	$(pip) $$($(python) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

$(VENV)/.lint-$(choice): $(base) pyproject.toml
	$(pip) $$($(python) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['lint'])")
	touch $@

clean:
	rm -rf build dist $(VENV) demo-out .pytest_cache .hypothesis .mypy_cache .ruff_cache python/warpwright.egg-info
	rm -f python/warpwright/*.so python/warpwright/_built_for.txt
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
