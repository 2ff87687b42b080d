"""Writes the generated code of the contract: `python protos/generate.py [FOLDER]`.

Needs grpcio-tools (the `test` extra), which nothing at run time does. Without FOLDER it writes
into this package; a test writes elsewhere and compares with what is committed.
"""

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SOURCES = ("drafting.proto", "generation.proto")


def generate(folder: Path) -> list[Path]:
    """Write `folder`/protos/*_pb2*; returns the files. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={PACKAGE.parent}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            f"--grpc_python_out={folder}",
            *(f"protos/{name}" for name in SOURCES),
        ],
        check=True,
        cwd=PACKAGE.parent,
    )
    return sorted((folder / "protos").glob("*_pb2*"))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE.parent)
