#!/usr/bin/env python3
"""Block summaries and refresh against their torch formulation: `nwor-specpv bench retrieval`."""

import sys

from nwor_specpv.bench.retrieval import main

if __name__ == "__main__":
    sys.exit(main())
