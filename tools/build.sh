#!/usr/bin/env bash
# What `make build` does: an incremental CMake build of the libraries and the GoogleTest suite, placed into
# python/nwor_specpv, and an editable install the first time. build/current points to the CMake folder.
# NWOR_BUILD_TESTS=OFF leaves the GoogleTest suite out.
#
#   tools/build.sh                   with the CUDA kernels where there is an nvcc
#   tools/build.sh --cpu-if-no-gpu   without them where there is no GPU, in a CMake folder of its own (build/..-cpu).
#                                    A library with kernels that is here already is kept up to date instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
stamp=.venv/.nwor-editable
info=python/nwor_specpv/_build_info.json

say() { printf 'build: %s\n' "$*"; }

[[ -x "$python" ]] || { say "there is no .venv; run make setup first" >&2; exit 1; }

has_nvcc() {
  command -v nvcc >/dev/null || [[ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]]
}

without_cuda() {
  say "$*"
  export NWOR_CUDA=OFF
}

# One architecture builds much faster than the default four, and a checkout is for this machine.
choose_architectures() {
  local capabilities served
  if [[ "${NWOR_CUDA:-AUTO}" == OFF ]] || ! has_nvcc; then
    return
  fi
  if [[ -n "${TORCH_CUDA_ARCH_LIST:-}" ]]; then
    say "CUDA kernels for $TORCH_CUDA_ARCH_LIST (TORCH_CUDA_ARCH_LIST)"
    return
  fi
  capabilities="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u || true)"
  if [[ ! "$capabilities" =~ ^[0-9]+\.[0-9]+ ]]; then
    if [[ "${1:-}" == --cpu-if-no-gpu && -z "${NWOR_CUDA:-}" ]] && ! grep -q '"cuda": "[0-9]' "$info" 2>/dev/null; then
      without_cuda "no GPU here, building for the CPU only; make test also compiles the CUDA kernels"
      export CMAKE_ARGS="-DCMAKE_UNITY_BUILD=ON ${CMAKE_ARGS:-}"
      return
    fi
    TORCH_CUDA_ARCH_LIST=9.0a
    say "CUDA kernels for 9.0a (no GPU here; TORCH_CUDA_ARCH_LIST chooses others)"
  else
    served="$(sed '/^[0-7]\./d' <<<"$capabilities")"
    if [[ -z "$served" ]]; then
      say "the GPU here has compute capability $(paste -sd ' ' <<<"$capabilities"), expected 8.0 or later" \
        "(TORCH_CUDA_ARCH_LIST chooses others)"
      [[ "${NWOR_CUDA:-AUTO}" != ON ]] || { say "stopping: NWOR_CUDA=ON has nothing to build for" >&2; exit 1; }
      without_cuda "building without CUDA"
      return
    fi
    # Hopper's own instructions exist only under the name 9.0a.
    TORCH_CUDA_ARCH_LIST="$(sed 's/^9\.0$/9.0a/' <<<"$served" | paste -sd ';')"
    say "CUDA kernels for $TORCH_CUDA_ARCH_LIST (the GPU here)"
  fi
  export TORCH_CUDA_ARCH_LIST
}

choose_architectures "$@"
export NWOR_BUILD_TESTS="${NWOR_BUILD_TESTS:-ON}" NWOR_WERROR="${NWOR_WERROR:-ON}"
"$python" setup.py -q build_ext --inplace

# The editable install only names this folder; it is made anew when the package's description changes.
wanted="$(cat pyproject.toml setup.py | sha256sum | cut -d' ' -f1) $PWD"
if [[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]]; then
  say "installing nwor_specpv into .venv (editable)"
  .venv/bin/uv pip install -q --python "$python" --no-build-isolation --no-deps -e .
  printf '%s\n' "$wanted" >"$stamp"
fi
say "done: $(cat "$info" | tr -d '\n' | tr -s ' ')"
