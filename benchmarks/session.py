#!/usr/bin/env python3
"""Rollback of short and long sessions: `nwor-specpv bench session`."""

import sys

from nwor_specpv.bench.session import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
