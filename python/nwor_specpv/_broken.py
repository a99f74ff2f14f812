"""What happens when the native library does not fit or cannot be loaded.

Importing the package then fails with one sentence. The command line goes on without the library:
`nwor-specpv status` and `doctor` are there to explain exactly this.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from . import _stamp


def explain(error: ImportError | OSError) -> _stamp.StampMismatch:
    """The sentence for an error of `_stamp.check()` or of loading `_C`."""
    if isinstance(error, _stamp.StampMismatch):
        return error
    return _stamp.explain_load_error(error)


def stop(error: ImportError | OSError) -> NoReturn:
    """Runs the command line, if this process is one, and else raises the sentence."""
    if is_command_line():
        from .cli.main import main

        raise SystemExit(main())
    raise explain(error) from None


def is_command_line() -> bool:
    """Whether this process is `nwor-specpv` or `python -m nwor_specpv`."""
    words = getattr(sys, "orig_argv", [])
    program = Path((getattr(sys, "argv", None) or [""])[0]).name
    return program == "nwor-specpv" or ("-m", __package__) in pairwise(words)
