"""Certificates of a test's own: a root, and pairs that it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Files:
    certificate: Path
    key: Path


class Authority:
    """Signs certificates for loopback."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign(name, self._key.public_key(), root=True)
        self.root = folder / f"{name}.pem"
        self.root.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, host: str = "127.0.0.1") -> Files:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(host, key.public_key(), root=False)
        files = Files(
            self._folder / f"{self._name}-{host}.crt", self._folder / f"{self._name}-{host}.key"
        )
        files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, *, root: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        day = datetime.timedelta(days=1)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(ca=root, path_length=None), critical=True)
        )
        if not root:
            try:
                alternative = x509.IPAddress(ipaddress.ip_address(name))
            except ValueError:
                alternative = x509.DNSName(name)
            names = x509.SubjectAlternativeName([alternative])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())
