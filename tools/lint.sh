#!/usr/bin/env bash
# What `make lint` does. Every check runs, whatever the one before it found; the status is 1 if any failed.
#
#   tools/lint.sh                 everything, as `make lint` and `make test-all` run it
#   tools/lint.sh --no-clang-tidy without clang-tidy, which takes minutes, as `make test` runs it
#
# clang-tidy needs the compile commands of a build (make build) and checks a file again only when it changed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=.venv/bin

failed=()
run() {
  local name="$1"
  shift
  printf 'lint: %s\n' "$name"
  "$@" || failed+=("$name")
}

format_check() {
  # ls leaves out files that are deleted but not yet committed.
  git ls-files -z --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' |
    (xargs -0 -r ls -d 2>/dev/null || true) | xargs -r "$bin/clang-format" --dry-run -Werror
}

run structure "$bin/python" tools/check_structure.py
run clang-format format_check
run "README results" "$bin/python" tools/readme_results.py --check
# A warning: results that are older than what they measure.
"$bin/python" tools/stale_results.py || failed+=("stale results")
run "ruff check" "$bin/ruff" check -q .
run "ruff format" "$bin/ruff" format -q --check .
if [[ "${1:-}" == --no-clang-tidy ]]; then
  printf 'lint: clang-tidy was left out; make lint runs it\n'
else
  run clang-tidy "$bin/python" tools/clang_tidy.py
fi

if ((${#failed[@]} > 0)); then
  printf 'lint: FAILED: %s\n' "$(IFS=,; printf '%s' "${failed[*]}")"
  exit 1
fi
printf 'lint: clean\n'
