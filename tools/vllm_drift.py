#!/usr/bin/env python3
"""Compares a release of vLLM with what the plugin's adapters rely on: `file:line: what changed`.

    tools/vllm_drift.py vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl
    tools/vllm_drift.py SDIST.tar.gz | FOLDER          a folder holds the package vllm
    tools/vllm_drift.py --adapter 0.32.0 ...           instead of the version that is nearest

Nothing of the release is imported. The exit status is 0 if an adapter fits, so that the plugin runs
with a warning or without, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from nwor_specpv.vllm import versions


def version_of(release: versions.Release, path: Path) -> str:
    """As the package says, else as its file is named; empty: neither does."""
    text = release.read("vllm/_version.py") or ""
    match = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    match = match or re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    match = match or re.match(r"vllm(?:_cpu)?-([0-9.]+[0-9a-z]*)", path.name)
    return match[1] if match else ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release", type=Path, help="a wheel, an sdist, or a folder with vllm in it")
    known = {adapter.version: adapter for adapter in versions.ADAPTERS}
    parser.add_argument("--adapter", choices=known, help="compare with this version")
    options = parser.parse_args(arguments)
    try:
        release = versions.open_release(options.release)
    except ValueError as error:
        parser.error(str(error))
    version = version_of(release, options.release)
    nearest = versions.closest(version)
    chosen = known[options.adapter] if options.adapter else nearest[0]
    fitting = [adapter.version for adapter in nearest if not release.differences(adapter)]
    differences = release.differences(chosen)
    for difference in differences:
        print(difference)
    parts = sum(1 for _ in chosen.parts())
    print(
        f"vLLM {version or 'of unknown version'}: {len(differences)} of {parts} functions and "
        f"classes differ from those of {chosen.version}; adapters that fit: "
        f"{', '.join(fitting) or 'none'}"
    )
    return 0 if fitting else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
