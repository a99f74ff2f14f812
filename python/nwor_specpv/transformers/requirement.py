"""Which releases of transformers this host runs on; it needs no transformers itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from nwor_specpv.errors import NworError, logger

# The host's tests were run on both ends. pyproject.toml has the same range.
OLDEST, NEWEST = (5, 16), (5, 23)
REQUIREMENT = f"transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def check_transformers() -> None:
    """Raises NworError with the command to run if transformers is missing or too old.

    A release newer than those that were tried is used, with a warning.
    """
    fix = f"run `pip install '{REQUIREMENT}'`"
    if importlib.util.find_spec("transformers") is None:
        raise NworError(f"the transformers host needs the package transformers: {fix}")
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return
    release = re.match(r"(\d+)\.(\d+)", version)
    found = (int(release[1]), int(release[2])) if release else NEWEST
    if found < OLDEST:
        raise NworError(
            f"the transformers host needs transformers {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]}, but {version} is installed: {fix}"
        )
    if found > NEWEST:
        logger.warning(
            "nwor_specpv: transformers %s is newer than %d.%d, the last that was tried; if "
            "something fails, %s",
            *(version, *NEWEST, fix),
        )
