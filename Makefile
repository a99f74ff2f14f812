# `make` alone lists the targets. What they do is in tools/.
#
#   PYTHON=python3.12          interpreter of a new .venv (3.11 to 3.13)
#   MAX_JOBS=4                 compiler processes at once
#   TORCH_CUDA_ARCH_LIST=9.0a  CUDA architectures (default: the GPU here, else 9.0a)
#   NWOR_CUDA=AUTO|ON|OFF      CUDA kernels

VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
# Targets share one build folder and two environments: make -j must not work on them twice at once.
.NOTPARALLEL:
.PHONY: help setup setup-vllm build test test-vllm test-all test-gpu demo bench lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## system packages, .venv and the pinned requirements
	@tools/setup_environment.sh

build: setup  ## the libraries and the C++ tests, only what changed
	@tools/build.sh

setup-vllm: setup  ## .venv-vllm: the real vLLM for the CPU, beside .venv
	@NWOR_BUILD_TESTS=OFF tools/build.sh
	@tools/setup_vllm.sh

test: build setup-vllm  ## everything but the slow tests: lint, GoogleTest, pytest, vLLM
	@$(VENV_PYTHON) tools/run_tests.py

test-vllm: build setup-vllm  ## the real vLLM on the CPU, without the slow tests
	@$(VENV_PYTHON) tools/run_tests.py --vllm

test-all: build setup-vllm  ## everything, with the slow tests and a million fuzz rounds
	@$(VENV_PYTHON) tools/run_tests.py --all

test-gpu: build  ## on a GPU: its tests, plain and under compute-sanitizer
	@$(VENV_PYTHON) tools/gpu_tests.py

demo: setup  ## a real model, four ways of decoding, one table and a report
	@NWOR_BUILD_TESTS=OFF tools/build.sh
	@$(VENV_PYTHON) -m nwor_specpv demo

bench: build  ## the benchmarks, with their peers
	@$(VENV_PYTHON) -m nwor_specpv bench commit
	@$(VENV_PYTHON) -m nwor_specpv bench attention
	@$(VENV_PYTHON) -m nwor_specpv bench retrieval
	@$(VENV_PYTHON) -m nwor_specpv bench tree
	@$(VENV_PYTHON) -m nwor_specpv bench generate

lint: build  ## structure, clang-format, clang-tidy over everything, ruff
	@tools/lint.sh

format: setup  ## clang-format and ruff, in place
	@git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' | \
	  xargs -r ls -d 2>/dev/null | xargs -r .venv/bin/clang-format -i
	@.venv/bin/ruff check -q --fix . ; .venv/bin/ruff format -q .

clean:  ## what was built; .venv and .venv-vllm stay
	@rm -rf build dist python/nwor_specpv.egg-info .pytest_cache .ruff_cache
	@rm -rf python/nwor_specpv/*.so python/nwor_specpv/_build_info.json python/nwor_specpv/cmake
	@rm -f .venv/.nwor-editable .venv-vllm/.nwor-linked
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
