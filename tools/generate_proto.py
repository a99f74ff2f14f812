#!/usr/bin/env python3
"""Makes the Python of the package's .proto files, with the grpcio-tools of requirements/dev.txt.

    tools/generate_proto.py [folder]     into python/, or into another folder

Those tools are old on purpose: what they make runs with every protobuf from 4.25 on, while newer
ones make files that refuse other major versions than their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "python"
PROTO = SOURCES / "nwor_specpv" / "worker" / "target.proto"


def main(arguments: list[str]) -> int:
    from grpc_tools import protoc

    destination = Path(arguments[0]) if arguments else SOURCES
    return protoc.main(["", f"-I{SOURCES}", f"--python_out={destination}", str(PROTO)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
