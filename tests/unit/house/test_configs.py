"""Every file under configs/ is read by whoever reads it in earnest, and none is left over."""

import ast
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cluster.config import read_config
from cluster.tools.manifest import check_manifest

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"


def read_constraints(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        (pin,) = Requirement(line).specifier
        assert pin.operator == "==", line


def read_manifest(path: Path) -> None:
    assert check_manifest(path) == []


def read_recipe(path: Path) -> None:
    from drafter_service.training.recipe import family_of
    from drafter_service.training.settings import load_settings

    kind = path.stem.partition("-")[0]
    load_settings(path, family_of(kind).settings_type)


def read_templates(path: Path) -> None:
    from verifier_service.data.compose import load_templates

    load_templates(path)


def read_seed_words(path: Path) -> None:
    from verifier_service.data.openings import load_openings

    assert len(load_openings(path)) > 100


def read_dockerfile(path: Path) -> None:
    assert re.search(r"^FROM \S+:\S+$", path.read_text(), re.MULTILINE)


READERS: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("__init__.py", lambda path: ast.parse(path.read_text())),
    ("constraints*.txt", read_constraints),
    ("kubernetes/rayservice*.yaml", read_manifest),
    ("kubernetes/cluster*.yaml", read_config),
    ("kubernetes/Dockerfile", read_dockerfile),
    ("train/prompts*.yaml", read_templates),
    ("train/seed_words.txt", read_seed_words),
    ("train*/*.yaml", read_recipe),
    ("*.yaml", read_config),
)


def files() -> list[str]:
    found = (p for p in CONFIGS.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return sorted(path.relative_to(CONFIGS).as_posix() for path in found)


@pytest.mark.parametrize("name", files())
def test_every_config_file_loads(name):
    for pattern, read in READERS:
        if fnmatchcase(name, pattern):
            read(CONFIGS / name)
            return
    pytest.fail(f"nothing reads configs/{name}")
