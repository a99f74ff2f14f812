#!/usr/bin/env python3
"""Draft trees and acceptance against plain torch and plain Python: `nwor-specpv bench tree`."""

import sys

from nwor_specpv.bench.tree import main

if __name__ == "__main__":
    sys.exit(main())
