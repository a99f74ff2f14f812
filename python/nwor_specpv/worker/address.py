"""Addresses that a worker listens on."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from nwor_specpv.errors import NworError


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(host: str, port: int) -> None:
    """Raises NworError if the address cannot be bound, before the model is loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise cannot_bind(host, port, error) from None
    problems = [problem for one in found if (problem := _probe(one)) is not None]
    # A name may have addresses that this machine lacks, but a port in use is always an error.
    taken = next((one for one in problems if one.errno == errno.EADDRINUSE), None)
    if taken is not None or len(problems) == len(found):
        raise cannot_bind(host, port, taken or problems[0])


def _probe(found: Any) -> OSError | None:
    family, kind, protocol, _, address = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def cannot_bind(host: str, port: int, error: object) -> NworError:
    reason = getattr(error, "strerror", None) or error
    return NworError(f"--host, --port: cannot listen at {join_address(host, port)}: {reason}")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(address: str) -> str:
    """The host of an address as gRPC takes it: `host:port`, `[::1]:port`, `dns:///host:port`."""
    if address.startswith(("unix:", "unix-abstract:")):
        return "localhost"
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    address = address.rpartition("/")[2]
    if address.startswith("["):
        return address[1:].partition("]")[0]
    # A bare IPv6 address has more than one colon.
    return address.partition(":")[0] if address.count(":") == 1 else address
