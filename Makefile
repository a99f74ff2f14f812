# `make` alone lists the targets. What they do is in tools/.
#
#   PYTHON=python3.12          interpreter of a new .venv (3.10 to 3.13)
#   MAX_JOBS=4                 compiler processes at once
#   TORCH_CUDA_ARCH_LIST=9.0a  CUDA architectures (default: the GPU here, else 9.0a)
#   NWOR_CUDA=AUTO|ON|OFF      CUDA kernels

VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup build test test-all demo bench lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## system packages, .venv and the pinned requirements
	@tools/setup_environment.sh

build: setup  ## the libraries and the C++ tests, only what changed
	@tools/build.sh

test: build  ## everything but the slow tests: lint, GoogleTest, pytest
	@$(VENV_PYTHON) tools/run_tests.py

test-all: build  ## everything, with the slow tests and a million fuzz rounds
	@$(VENV_PYTHON) tools/run_tests.py --all

demo: build  ## one real round trip, explained
	@$(VENV_PYTHON) -m nwor_specpv demo

bench: build  ## the benchmarks, with their peers
	@$(VENV_PYTHON) -m nwor_specpv bench commit
	@$(VENV_PYTHON) -m nwor_specpv bench attention

lint: build  ## structure, clang-format, clang-tidy, ruff
	@tools/lint.sh

format: setup  ## clang-format and ruff, in place
	@git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' | \
	  xargs -r ls -d 2>/dev/null | xargs -r .venv/bin/clang-format -i
	@.venv/bin/ruff check -q --fix . ; .venv/bin/ruff format -q .

clean:  ## what was built; .venv stays
	@rm -rf build dist python/nwor_specpv.egg-info .pytest_cache .ruff_cache
	@rm -rf python/nwor_specpv/*.so python/nwor_specpv/_build_info.json python/nwor_specpv/cmake
	@rm -f .venv/.nwor-editable
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
