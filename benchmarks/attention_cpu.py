#!/usr/bin/env python3
"""Verify attention on the CPU against torch's SDPA: `nwor-specpv bench attention --device cpu`."""

import sys

from nwor_specpv.bench.attention import main

if __name__ == "__main__":
    sys.exit(main(["--device", "cpu", *sys.argv[1:]]))
