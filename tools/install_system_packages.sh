#!/usr/bin/env bash
# Debian and Ubuntu packages that the build and the tests need. As root this script installs what is missing.
# Otherwise it prints the command to run, and fails if a required package is missing.
#
#   tools/install_system_packages.sh            install, or say how
#   tools/install_system_packages.sh --check    install nothing, only say what is missing
set -euo pipefail

required=(
  g++ make git
  python3-dev python3-venv
  libgtest-dev
  prometheus-cpp-dev libcivetweb-dev libcurl4-openssl-dev zlib1g-dev
  libyaml-cpp-dev nlohmann-json3-dev # examples/engine
)
# Faster rebuilds; a real Prometheus for the scrape test; a real browser for the report.
optional=(ccache prometheus chromium)

patience=(-o Acquire::Retries=3 -o Acquire::http::Timeout=60)

say() { printf 'system packages: %s\n' "$*"; }

installed() {
  [[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

list_missing() {
  local package
  for package in "$@"; do
    installed "$package" || printf '%s ' "$package"
  done
}

# Not every release has all optional packages: updating apt's lists again for such a package would be in vain.
# Empty lists do not tell which packages a release has.
drop_unknown() {
  local package known=() unknown=()
  [[ "$(LC_ALL=C apt-cache policy)" == *" Packages"* ]] || return 0
  for package in "${missing_optional[@]}"; do
    if LC_ALL=C apt-cache policy "$package" 2>/dev/null | grep "Candidate: [^(]" >/dev/null; then
      known+=("$package")
    else
      unknown+=("$package")
    fi
  done
  missing_optional=("${known[@]}")
  ((${#unknown[@]} == 0)) || say "this release does not have ${unknown[*]} (optional); going on without"
}

# Installs quietly; shows apt's output only when it fails.
apt_install() {
  local log
  log="$(mktemp)"
  if ! DEBIAN_FRONTEND=noninteractive apt-get "${patience[@]}" install -y --no-install-recommends "$@" \
    >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

if ! command -v dpkg-query >/dev/null; then
  say "this is not Debian or Ubuntu; install the equivalents of ${required[*]} (optional: ${optional[*]})"
  exit 0
fi

read -r -a missing <<<"$(list_missing "${required[@]}")"
read -r -a missing_optional <<<"$(list_missing "${optional[@]}")"
if ((${#missing[@]} == 0 && ${#missing_optional[@]} == 0)); then
  say "all present"
  exit 0
fi

if [[ "${1:-}" == --check || "$(id -u)" != 0 ]]; then
  # One command each: apt installs nothing if one is unknown, and not every release has all optional packages.
  if ((${#missing[@]} > 0)); then
    say "run this once: sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
  fi
  for package in "${missing_optional[@]}"; do
    say "optional: sudo apt-get install -y --no-install-recommends $package"
  done
  if ((${#missing[@]} > 0)); then
    say "stopping: ${missing[*]} not installed"
    exit 1
  fi
  say "going on without ${missing_optional[*]} (optional)"
  exit 0
fi

if ((${#missing[@]} == 0)); then
  drop_unknown
  ((${#missing_optional[@]} > 0)) || exit 0
fi
say "installing ${missing[*]} ${missing_optional[*]}"
apt-get "${patience[@]}" update -qq >/dev/null || say "apt-get update failed; trying with the lists that are here"
drop_unknown
if ((${#missing[@]} > 0)) && ! apt_install "${missing[@]}"; then
  say "stopping: could not install ${missing[*]}"
  exit 1
fi
# The package prometheus starts a service. The tests need none: they start their own server.
if [[ " ${missing_optional[*]} " == *" prometheus "* && ! -e /usr/sbin/policy-rc.d ]]; then
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
  chmod +x /usr/sbin/policy-rc.d
fi
for package in "${missing_optional[@]}"; do
  if ! apt_install "$package"; then
    say "going on without $package (optional)"
  elif [[ "$package" == prometheus ]]; then
    systemctl disable prometheus.service >/dev/null 2>&1 || true
  fi
done
say "done"
