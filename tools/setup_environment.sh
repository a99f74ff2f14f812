#!/usr/bin/env bash
# What `make setup` does: system packages, a virtual environment in .venv, uv, the pinned requirements.
# A second run only checks. PYTHON=<interpreter> chooses the interpreter of a new .venv.
#
#   tools/setup_environment.sh           .venv, with the torch that the requirements name
#   tools/setup_environment.sh 2.13.0    .venv-torch-2.13.0, with that torch and otherwise the same packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
requirements=requirements/dev.txt
torch="${1:-}"
uv_version=0.13.7
stamp="$venv/.nwor-requirements"
place="$venv/.nwor-place"

say() { printf 'setup: %s\n' "$*"; }
stop() {
  say "$*" >&2
  exit 1
}

# Runs the interpreter: a shim on the PATH may point to none. The requirements have wheels for these versions only.
usable() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    usable "$PYTHON" || stop "PYTHON=$PYTHON does not run or is not Python 3.11 to 3.13"
    printf '%s' "$PYTHON"
    return
  fi
  for candidate in python3 python3.12 python3.11 python3.13; do
    if usable "$candidate"; then
      printf '%s' "$candidate"
      return
    fi
  done
  stop "no Python 3.11 to 3.13 found; install one (Debian: apt-get install python3 python3-venv) or pass PYTHON="
}

make_venv() {
  local python why
  python="$(find_python)"
  say "making $venv with $("$python" --version) ($python)"
  if why="$("$python" -m venv "$venv" 2>&1)"; then
    return
  fi
  # Debian keeps ensurepip in python3-venv; an environment without pip still works if some pip can fill it.
  rm -rf "$venv"
  if "$python" -m venv --without-pip "$venv" >/dev/null 2>&1 &&
    "$python" -m pip --python "$venv/bin/python" install -q "uv==$uv_version" 2>/dev/null; then
    return
  fi
  rm -rf "$venv"
  printf '%s\n' "$why" | tail -n 5 >&2
  stop "$python cannot make a virtual environment; most often python3-venv is missing (Debian: apt-get install python3-venv)"
}

# uv trusts the system's certificates, as pip does: networks that intercept TLS have their own.
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
# A slow download must not fail: pip would then fetch everything a second time.
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}"

install_requirements() {
  if [[ ! -x "$venv/bin/uv" ]]; then
    say "installing uv $uv_version"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check "uv==$uv_version"
  fi
  say "installing $requirements (torch is large: minutes the first time)"
  if ! "$venv/bin/uv" pip install -q --python "$venv/bin/python" -r "$requirements"; then
    say "uv failed; trying pip, which reads pip's own configuration"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$requirements"
  fi
}

if [[ -n "$torch" && "$torch" != "$(sed -n 's/^torch==//p' "$requirements")" ]]; then
  [[ "$torch" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || stop "torch: got '$torch', expected a version like 2.13.0"
  venv=".venv-torch-$torch"
  stamp="$venv/.nwor-requirements"
  place="$venv/.nwor-place"
fi

tools/install_system_packages.sh

# Programs of a virtual environment name their interpreter by its full path.
here="$(pwd -P)"
if [[ -f "$place" && "$(cat "$place")" != "$here" ]]; then
  say "$venv was made in $(cat "$place"); making it again"
  rm -rf "$venv"
fi
if [[ ! -x "$venv/bin/python" ]] || ! usable "$venv/bin/python"; then
  rm -rf "$venv"
  make_venv
fi
printf '%s\n' "$here" >"$place"

if [[ "$venv" != .venv ]]; then
  sed "s/^torch==.*/torch==$torch/" "$requirements" >"$venv/requirements.txt"
  requirements="$venv/requirements.txt"
fi
wanted="$(sha256sum "$requirements" | cut -d' ' -f1)"
if [[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]]; then
  install_requirements
  printf '%s\n' "$wanted" >"$stamp"
fi
python="$("$venv/bin/python" --version)"
torch="$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')"
say "ready: $python, torch $torch in $venv"
