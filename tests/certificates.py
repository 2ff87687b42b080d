"""Certificates for tests: an authority, and peers that it signed, as PEM files.

Made by the package `cryptography` where it is installed, else by the command `openssl`; skips where
there is neither. Peers are called localhost and 127.0.0.1.
"""

import datetime
import importlib.util
import ipaddress
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protos.channel import TlsFiles

_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


class Authority:
    """Signs peers; its own certificate is `ca.pem` in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.certificate = folder / "ca.pem"
        self._key: Any = None
        if importlib.util.find_spec("cryptography") is not None:
            self._key = _new_key()
            signed = _certify("root", self._key, "root", self._key, is_authority=True)
            self.certificate.write_bytes(signed)
        elif shutil.which("openssl") is not None:
            _openssl(
                *("req", "-x509", *_NEW_KEY, "-subj", "/CN=root", "-days", "1"),
                *("-keyout", folder / "ca.key", "-out", self.certificate),
            )
        else:
            pytest.skip("neither cryptography nor openssl is installed")

    def peer(self, name: str) -> TlsFiles:
        """A peer's files."""
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        if self._key is not None:
            own = _new_key()
            certificate.write_bytes(_certify(name, own, "root", self._key, is_authority=False))
            key.write_bytes(_pem_of(own))
        else:
            request, names = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
            names.write_text(_NAMES)
            _openssl(
                *("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request),
            )
            _openssl(
                *("x509", "-req", "-in", request, "-CA", self.certificate, "-days", "1"),
                *("-CAkey", self._folder / "ca.key", "-CAcreateserial", "-extfile", names),
                *("-out", certificate),
            )
        return TlsFiles(self.certificate, certificate, key)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    command = ["openssl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pem_of(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    pem: bytes = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return pem


def _certify(name: str, key: Any, issuer: str, issuer_key: Any, *, is_authority: bool) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    called, by = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (name, issuer)
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(called)
        .issuer_name(by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    pem: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return pem
