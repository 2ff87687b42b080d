"""protos/generate.py writes what is committed, and notices a changed contract."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).resolve().parents[3] / "protos"


def test_generated_code_is_up_to_date(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    subprocess.run([sys.executable, PROTOS / "generate.py", tmp_path], check=True)
    made = sorted((tmp_path / "protos").iterdir())
    assert len(made) == 6
    for path in made:
        assert path.read_text() == (PROTOS / path.name).read_text(), path.name


def test_a_changed_contract_is_noticed(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    package = tmp_path / "protos"
    package.mkdir()
    for name in ("generate.py", "drafting.proto", "generation.proto"):
        shutil.copy(PROTOS / name, package / name)
    changed = (package / "drafting.proto").read_text().replace("draft_us = 4", "draft_us = 5")
    (package / "drafting.proto").write_text(changed)
    subprocess.run([sys.executable, package / "generate.py"], check=True)
    fresh = (package / "drafting_pb2.py").read_text()
    assert fresh != (PROTOS / "drafting_pb2.py").read_text()
