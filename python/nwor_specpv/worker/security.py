"""TLS and the bearer token of a worker and its clients, from files and from the environment.

Both are needed where other machines can reach the worker. `insecure` leaves them out on purpose.
"""

from __future__ import annotations

import hmac
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nwor_specpv.errors import NworError

from .address import host_of, is_loopback

CERTIFICATE_VARIABLE = "NWOR_WORKER_TLS_CERTIFICATE"
KEY_VARIABLE = "NWOR_WORKER_TLS_KEY"
ROOT_VARIABLE = "NWOR_WORKER_ROOT_CERTIFICATE"
TOKEN_VARIABLE = "NWOR_WORKER_TOKEN"
TOKEN_FILE_VARIABLE = "NWOR_WORKER_TOKEN_FILE"

_SCHEME = "Bearer "


@dataclass(frozen=True)
class ServerSecurity:
    """PEM texts of a certificate chain and its key, and the token that clients must send."""

    certificate: bytes | None = None
    key: bytes | None = None
    token: str | None = None

    @classmethod
    def load(
        cls,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        token_file: str | Path | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> ServerSecurity:
        """Reads the files, or those that the environment names. Raises NworError if one is wrong.

        The token is that of `token_file`, of $NWOR_WORKER_TOKEN or of $NWOR_WORKER_TOKEN_FILE.
        """
        certificate = certificate or env.get(CERTIFICATE_VARIABLE)
        key = key or env.get(KEY_VARIABLE)
        token = read_token(token_file, env)
        if certificate is None and key is None:
            return cls(token=token)
        if certificate is None or key is None:
            missing = "--tls-certificate" if certificate is None else "--tls-key"
            raise NworError(f"{missing}: got none, expected a file; TLS needs certificate and key")
        texts = _read("--tls-certificate", certificate), _read("--tls-key", key)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise NworError(
                f"--tls-certificate, --tls-key: got {str(certificate)!r} and {str(key)!r}, "
                f"expected a PEM certificate and its unencrypted key: {_reason(error)}"
            ) from None
        return cls(*texts, token)

    def check_host(self, host: str, *, insecure: bool) -> None:
        """Raises NworError if other machines could use or overhear a worker at this host."""
        if insecure or is_loopback(host):
            return
        missing = self._missing()
        if missing:
            raise NworError(
                f"--host: got {host!r}, which other machines can reach, without {missing}; "
                "expected --tls-certificate, --tls-key and a token, or --insecure"
            )

    def _missing(self) -> str:
        parts = [("TLS", self.certificate), ("a token", self.token)]
        return " and ".join(name for name, value in parts if value is None)

    def admits(self, metadata: Mapping[str, str | bytes]) -> bool:
        """Whether a call with these headers has the token."""
        if self.token is None:
            return True
        given = metadata.get("authorization", "")
        given = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(given, (_SCHEME + self.token).encode())


@dataclass(frozen=True)
class ClientSecurity:
    """Whether a client uses TLS, with which root certificates, and the token that it sends."""

    tls: bool = False
    root_certificate: bytes | None = None  # PEM; None: those that gRPC comes with
    token: str | None = None

    @classmethod
    def load(
        cls,
        tls: bool = False,
        root_certificate: str | Path | None = None,
        token: str | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> ClientSecurity:
        """What is given, or what the environment has. Raises NworError if it is wrong."""
        token = read_token(None, env) if token is None else _checked_token("token", token)
        root = root_certificate or env.get(ROOT_VARIABLE)
        if root is None:
            return cls(tls, None, token)
        text = _read("root_certificate", root)
        try:
            ssl.create_default_context(cadata=text.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise NworError(
                f"root_certificate: got {str(root)!r}, expected a PEM file of certificates: "
                f"{_reason(error)}"
            ) from None
        return cls(True, text, token)

    def check_address(self, address: str, *, insecure: bool) -> None:
        """Raises NworError if others could overhear the calls to this address."""
        if insecure or is_loopback(host_of(address)):
            return
        if not self.tls or self.token is None:
            parts = [("TLS", self.tls), ("a token", self.token)]
            missing = " and ".join(name for name, value in parts if not value)
            raise NworError(
                f"address: got {address!r}, which is on another machine, without {missing}; "
                "expected root_certificate (or tls=True) and token, or insecure=True"
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers of every call."""
        return () if self.token is None else (("authorization", _SCHEME + self.token),)


def read_token(file: str | Path | None, env: Mapping[str, str] = os.environ) -> str | None:
    """The token of a file, or of the environment; None if there is none."""
    if file is None and TOKEN_VARIABLE in env:
        return _checked_token(TOKEN_VARIABLE, env[TOKEN_VARIABLE])
    path = file or env.get(TOKEN_FILE_VARIABLE)
    if path is None:
        return None
    text = _read("--token-file", path)
    return _checked_token(f"--token-file {path}", text.decode("ascii", "replace").strip())


def _checked_token(name: str, token: str) -> str:
    """Raises without the token in the message."""
    if not token or not all("!" <= character <= "~" for character in token):
        raise NworError(
            f"{name}: got {len(token)} characters, expected a token of ASCII letters, digits and "
            "signs, without spaces"
        )
    return token


def _read(name: str, path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise NworError(f"{name}: got {str(path)!r}, which cannot be read: {error}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or " ".join(str(error).split())
