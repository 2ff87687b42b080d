"""The wheel is the product: built, installed beside nothing of the checkout, and used from there.

The clean environment borrows third-party packages from the interpreter that runs the tests (no
second torch); ours come from the wheel alone, and nothing looks into the checkout.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEADS = sorted(path.parent.name for path in ROOT.glob("drafter_service/heads/*/config.json"))
SHIPPED = ("protos", "verifier_service", "drafter_service", "cluster", "configs")


def run(arguments: list[str], cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(arguments, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no stale build folder of the checkout leaks in."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SHIPPED:
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run([*pip, "-w", str(out), "."], source)
    (built,) = out.glob("outrider-*.whl")
    return built


@pytest.fixture(scope="module")
def clean_python(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel in it; third-party packages come from this interpreter."""
    home = tmp_path_factory.mktemp("clean") / "env"
    run([sys.executable, "-m", "venv", "--without-pip", str(home)], home.parent)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    run([*pip, "--no-deps", "--no-index", str(wheel)], home.parent)
    site = run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], home.parent
    )
    borrowed = Path(site.strip()) / "third_party.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")
    return python


def tracked(folder: str) -> list[str]:
    listing = run(["git", "ls-files", "-z", folder], ROOT)
    return [name for name in listing.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("folder", SHIPPED)
def test_every_tracked_file_of_a_package_is_in_the_wheel(wheel, folder):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in tracked(folder) if name not in names] == []


def test_a_head_is_shipped_for_the_embedded_default():
    assert "smollm2-135m-eagle3" in HEADS


def test_the_wheel_holds_nothing_but_the_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/", 1)[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(SHIPPED)


def test_modules_come_from_the_wheel(clean_python, tmp_path):
    code = "import protos, cluster, configs; print(protos.__file__, cluster.__file__)"
    for path in run([str(clean_python), "-c", code], tmp_path).split():
        assert Path(path).is_relative_to(clean_python.parent.parent)


def test_contract_and_schemas_are_package_data(clean_python, tmp_path):
    code = """
from importlib.resources import files
for name in ("drafting.proto", "generation.proto", "PROTOCOL.md"):
    assert files("protos").joinpath(name).read_text(), name
print("read")
"""
    assert run([str(clean_python), "-c", code], tmp_path) == "read\n"


def test_the_default_config_loads_from_the_wheel(clean_python, tmp_path):
    code = """
from cluster.config import read_config
from cluster.tools.serving import default_config
path = default_config()
assert "site-packages" in path.parts, path
config = read_config(path)
print(config.verifier.target, *(entry.kind for entry in config.drafters))
"""
    assert run([str(clean_python), "-c", code], tmp_path).split()[0] == "embedded"


@pytest.mark.parametrize("head", HEADS)
def test_shipped_heads_are_read_from_the_wheel(clean_python, tmp_path, head):
    code = f"""
from cluster.fleet.assembly import checkpoint_dir
from drafter_service.checkpoint.describe import describe
directory = checkpoint_dir({head!r})
assert "site-packages" in directory.parts, directory
assert (directory / "provenance.json").is_file()
print(describe(directory).digest)
"""
    assert len(run([str(clean_python), "-c", code], tmp_path).strip()) >= 16


def test_the_command_is_installed(clean_python, tmp_path):
    assert "serve" in run([str(clean_python.parent / "outrider"), "--help"], tmp_path)
