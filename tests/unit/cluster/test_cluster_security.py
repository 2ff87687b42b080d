"""What the `security` section says reaches both ends of the wire."""

from pathlib import Path

import pytest

from cluster.config import parse_config
from cluster.fleet.assembly import security_of
from cluster.tools.validate import disk_faults
from drafter_service.__main__ import security_of as drafter_security_of
from drafter_service.config import parse_settings
from protos.channel import TlsFiles
from protos.errors import ConfigError
from verifier_service.build import security_of as verifier_security_of
from verifier_service.config import VerifierSettings

FILES = {"authority": "ca.pem", "certificate": "own.pem", "key": "own.key"}


def test_tls_files_reach_the_wire_beside_the_token():
    config = parse_config({"security": {"tls": {**FILES, "server_name": "house"}}})
    security = security_of(config.security, "hush")
    tls = config.security.tls
    assert tls is not None
    assert security.token == "hush"
    assert security.tls == TlsFiles(tls.authority, tls.certificate, tls.key, "house")
    assert security_of(parse_config({}).security, "hush").tls is None


def test_files_that_are_not_there_are_named_by_validate(tmp_path):
    key = tmp_path / "own.key"
    key.touch()
    faults = disk_faults(parse_config({"security": {"tls": {**FILES, "key": str(key)}}}))
    assert faults == [
        "security.tls.authority: no such file",
        "security.tls.certificate: no such file",
    ]


def test_tls_needs_all_three_files():
    with pytest.raises(ConfigError, match=r"security\.tls\.key"):
        parse_config({"security": {"tls": {"authority": "a", "certificate": "b"}}})


def test_a_drafter_on_its_own_takes_tls_from_its_file():
    security = drafter_security_of(parse_settings({"kind": "ngram", "token": "t", "tls": FILES}))
    assert security.tls is not None
    assert str(security.tls.key) == "own.key"
    assert drafter_security_of(parse_settings({"kind": "ngram"})).tls is None


def test_rays_certificates_are_taken_where_the_file_names_none(monkeypatch):
    for name, value in (
        ("RAY_USE_TLS", "1"),
        ("RAY_TLS_CA_CERT", "ray-ca.pem"),
        ("RAY_TLS_SERVER_CERT", "ray.pem"),
        ("RAY_TLS_SERVER_KEY", "ray.key"),
    ):
        monkeypatch.setenv(name, value)
    rays = TlsFiles(Path("ray-ca.pem"), Path("ray.pem"), Path("ray.key"))
    assert security_of(parse_config({}).security, "hush").tls == rays
    assert drafter_security_of(parse_settings({"kind": "ngram"})).tls == rays
    named = security_of(parse_config({"security": {"tls": FILES}}).security, "hush").tls
    assert named is not None
    assert str(named.key) == "own.key"


def test_rays_broken_variables_stop_no_service_that_has_its_own_files(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.delenv("RAY_TLS_CA_CERT", raising=False)
    own = TlsFiles(Path("ca.pem"), Path("own.pem"), Path("own.key"))
    assert drafter_security_of(parse_settings({"kind": "ngram", "tls": FILES})).tls == own
    assert verifier_security_of(VerifierSettings.model_validate({"tls": FILES})).tls == own
    config = parse_config({"security": {"tls": FILES}})
    assert security_of(config.security, "hush").tls == own
    for refused in (
        lambda: security_of(parse_config({}).security, "hush"),
        lambda: drafter_security_of(parse_settings({"kind": "ngram"})),
        lambda: verifier_security_of(VerifierSettings()),
    ):
        with pytest.raises(ConfigError, match="RAY_TLS_CA_CERT"):
            refused()
