"""Prints the folder of SmolLM2: python -m nwor_specpv.models.smollm2 [float32|bfloat16]"""

from __future__ import annotations

import sys

from nwor_specpv.cli.parser import EXIT_USAGE, PROGRAM, Parser
from nwor_specpv.errors import NworError

from . import smollm2


def main(arguments: list[str]) -> int:
    parser = Parser(prog="nwor_specpv.models.smollm2", description="Prints the model's folder.")
    parser.add_argument("dtype", nargs="?", default="float32", help="default: float32")
    dtype = parser.parse_args(arguments).dtype
    try:
        print(smollm2(dtype))
    except (NworError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, NworError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
