#!/usr/bin/env bash
# What `make lint` does. Every check runs, whatever the one before it said; the status is 1 if any failed.
# clang-tidy needs the compile commands of a build (make build). `lint.sh --changed`, which `make test` runs, leaves
# to `make lint` what does not differ from the commit in clang_tidy.clean, at which it found nothing. To move that on,
# after a clean `make lint` of what is committed: git rev-parse HEAD > tools/clang_tidy.clean
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=.venv/bin
tidy=(tools/clang_tidy.py)
[[ "${1:-}" != --changed ]] || tidy+=(--since tools/clang_tidy.clean)

failed=()
run() {
  local name="$1"
  shift
  printf 'lint: %s\n' "$name"
  "$@" || failed+=("$name")
}

format_check() {
  # ls leaves out files that are deleted but not yet committed; that is no finding.
  git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' |
    (xargs -0 -r ls -d 2>/dev/null || true) | xargs -r "$bin/clang-format" --dry-run -Werror
}

run structure "$bin/python" tools/check_structure.py
run clang-format format_check
run "README results" "$bin/python" tools/readme_results.py --check
run "ruff check" "$bin/ruff" check -q .
run "ruff format" "$bin/ruff" format -q --check .
run clang-tidy "$bin/python" "${tidy[@]}"

if ((${#failed[@]} > 0)); then
  printf 'lint: FAILED: %s\n' "$(IFS=,; printf '%s' "${failed[*]}")"
  exit 1
fi
printf 'lint: clean\n'
