#!/usr/bin/env python3
"""Block summaries and refresh against their torch formulation: `nwor-specpv bench coverage`."""

import sys

from nwor_specpv.bench.coverage import main

if __name__ == "__main__":
    sys.exit(main())
