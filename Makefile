# `make` alone lists the targets. What they do is in tools/.
#
#   PYTHON=python3.12          interpreter of a new .venv (3.11 to 3.13)
#   MAX_JOBS=4                 compiler processes at once
#   TORCH_CUDA_ARCH_LIST=9.0a  CUDA architectures (default: the GPU here, else 9.0a)
#   TORCH=2.13.0               release of torch, for `make wheel` (default: that of .venv) and `make test-torch`
#   VLLM=0.26.0                version of vLLM that setup-vllm and test-vllm take (default: the newest in requirements/)
#   GPU_PYTHON=python3         for test-gpu and bench-gpu: an interpreter with vLLM for GPUs, in which this package is built (default: .venv's)
#   GPU_TESTS="--minutes 9"    options of tools/gpu_tests.py; GPU_BENCHMARKS those of tools/gpu_benchmarks.py
#   NWOR_CUDA=AUTO|ON|OFF      CUDA kernels (default: AUTO, wherever nvcc is found; `make demo` compiles none without a GPU)

VENV_PYTHON := .venv/bin/python
# Tests start hundreds of processes that import torch, transformers or vLLM: they are compiled once.
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Targets share build folders and two environments: make -j must not work on them twice at once.
.NOTPARALLEL:
.PHONY: help setup setup-vllm setup-vllms build test test-vllm test-all test-gpu bench-gpu test-torch wheel demo bench lint format clean
GPU_PYTHON := $(VENV_PYTHON)
GPU_BUILD := $(if $(filter $(VENV_PYTHON),$(GPU_PYTHON)),build)
OLDEST_VLLM := $(shell ls requirements | sed -n 's/^vllm-\(.*\)\.txt$$/\1/p' | sort -V | head -n 1)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## install system packages and the pinned requirements in .venv
	@tools/setup_environment.sh

build: setup  ## build the libraries and the C++ tests, only what changed
	@tools/build.sh

setup-vllm: setup  ## install the real vLLM for the CPU in .venv-vllm; VLLM=0.26.0 another version
	@NWOR_BUILD_TESTS=OFF tools/build.sh
	@tools/setup_vllm.sh $(VLLM)

setup-vllms:
	@tools/setup_vllm.sh
	@tools/setup_vllm.sh $(OLDEST_VLLM)

test: build setup-vllms  ## lint, GoogleTest, pytest, vLLM; without the slow tests and clang-tidy
	@$(VENV_PYTHON) tools/run_tests.py

test-vllm: build setup-vllm  ## the tests of the real vLLM on the CPU, without the slow ones; VLLM=0.26.0
	@$(VENV_PYTHON) tools/run_tests.py --vllm $(VLLM)

test-all: build setup-vllms  ## everything: also clang-tidy, slow tests, a million fuzz rounds
	@$(VENV_PYTHON) tools/run_tests.py --all

test-gpu: $(GPU_BUILD)  ## all tests that need a GPU, vLLM's too, also under compute-sanitizer; again goes on
	@$(GPU_PYTHON) tools/gpu_tests.py $(GPU_TESTS)

test-torch: setup  ## GoogleTest and pytest with other releases of torch, each in .venv-torch-TORCH
	@$(VENV_PYTHON) tools/test_torch.py $(TORCH)

wheel: setup  ## a wheel in dist/ that needs no compiler, tried in a bare root folder; TORCH=2.13.0
	@$(VENV_PYTHON) tools/wheel.py $(TORCH)

bench-gpu: $(GPU_BUILD)  ## measure benchmarks/results/h200 again; again goes on; GPU_BENCHMARKS="NAMES --minutes 9"
	@$(GPU_PYTHON) tools/gpu_benchmarks.py $(GPU_BENCHMARKS)

demo: setup  ## decode with a real model in several ways: one table and a page
	@NWOR_BUILD_TESTS=OFF tools/build.sh --cpu-if-no-gpu
	@$(VENV_PYTHON) -m nwor_specpv demo

bench: build  ## the benchmarks, beside other libraries
	@$(VENV_PYTHON) -m nwor_specpv bench commit
	@$(VENV_PYTHON) -m nwor_specpv bench attention
	@$(VENV_PYTHON) -m nwor_specpv bench retrieval
	@$(VENV_PYTHON) -m nwor_specpv bench tree
	@$(VENV_PYTHON) -m nwor_specpv bench generate

lint: build  ## structure, clang-format, clang-tidy, README results, ruff
	@tools/lint.sh

format: setup  ## run clang-format and ruff on all files
	@git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' | \
	  xargs -r ls -d 2>/dev/null | xargs -r .venv/bin/clang-format -i
	@.venv/bin/ruff check -q --fix . ; .venv/bin/ruff format -q .

clean:  ## remove what was built; environments stay
	@rm -rf build dist python/nwor_specpv.egg-info .pytest_cache .ruff_cache
	@rm -rf python/nwor_specpv/*.so python/nwor_specpv/_build_info.json python/nwor_specpv/cmake
	@rm -f .venv/.nwor-editable .venv-vllm-*/.nwor-linked
	@rm -rf .venv-vllm-*/lib/python*/site-packages/nwor_specpv
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
