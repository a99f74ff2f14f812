"""`python -m nwor_specpv`: the command line, as `nwor-specpv`."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
