"""The one exception type, and where bypasses are logged. Importable without the native library."""

from __future__ import annotations

import logging

logger = logging.getLogger("nwor_specpv")


class NworError(ValueError):
    """Wrong use: the message names the argument, what was got and what was expected."""


class CapacityError(NworError):
    """Not enough pages, bytes or rows now; ending or evicting something may help."""


class UnknownSessionError(NworError):
    """No session of that name: start it again with the whole prompt."""


class DesyncError(NworError):
    """Client and server disagree about how much of a sequence is cached."""


def log_bypass(reason: str, message: str) -> None:
    """Called by the library, once per reason and interceptor."""
    logger.warning("nwor_specpv bypass (%s): %s", reason, message)
