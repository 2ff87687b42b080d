"""The committed code is what the .proto files say, made with the pinned generator.

python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = sorted(path.name for path in (ROOT / "protos").glob("*.proto"))
FORMS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    outputs = [f"--{form}_out={out}" for form in ("python", "pyi", "grpc_python")]
    names = [f"protos/{name}" for name in SCHEMAS]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / "protos"


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("form", FORMS)
def test_committed_code_equals_regenerated_code(regenerated, schema, form):
    name = schema.removesuffix(".proto") + form
    assert (ROOT / "protos" / name).read_text() == (regenerated / name).read_text()


def test_no_generated_file_lacks_its_schema():
    stems = {name.removesuffix(".proto") for name in SCHEMAS}
    generated = (ROOT / "protos").glob("*_pb2*.py*")
    assert {re.sub(r"_pb2.*", "", path.name) for path in generated if path.is_file()} == stems


def test_the_floor_in_pyproject_is_the_floor_of_the_generated_code():
    grpc_code = (ROOT / "protos" / "drafting_pb2_grpc.py").read_text()
    message_code = (ROOT / "protos" / "drafting_pb2.py").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    major, minor, _ = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", grpc_code)[1].split(".")
    assert f'"grpcio>={major}.{minor}"' in project
    assert f'"grpcio-tools=={major}.{minor}.0"' in project
    protobuf = re.search(r"Protobuf Python Version: ([\d.]+)", message_code)[1]
    assert f'"protobuf>={protobuf},' in project
