"""The floors in pyproject.toml are those of the committed generated code, and no file is orphaned.

That the code is what the .proto files say is tested beside `protos/generate.py`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_no_generated_file_lacks_its_schema():
    generated = [p for p in (ROOT / "protos").glob("*_pb2*.py*") if p.is_file()]
    schemas = {path.stem for path in (ROOT / "protos").glob("*.proto")}
    assert {re.sub(r"_pb2.*", "", path.name) for path in generated} == schemas


def test_the_floor_in_pyproject_is_the_floor_of_the_generated_code():
    grpc_code = (ROOT / "protos" / "drafting_pb2_grpc.py").read_text()
    message_code = (ROOT / "protos" / "drafting_pb2.py").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    major, minor, _ = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", grpc_code)[1].split(".")
    assert f'"grpcio>={major}.{minor}"' in project
    assert f'"grpcio-tools=={major}.{minor}.0"' in project
    protobuf = re.search(r"Protobuf Python Version: ([\d.]+)", message_code)[1]
    assert f'"protobuf>={protobuf},' in project
