"""`outrider check`: what it prints, and one reason for each way a pair can fail."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.tools.cli import main
from tests.integration.drafter_process import write_tiny_head
from tests.tiny import tiny_llama_dir, tiny_qwen3_dir


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("check") / "target")


@pytest.fixture(scope="module")
def good_head(tmp_path_factory) -> Path:
    return write_tiny_head(tmp_path_factory.mktemp("check") / "head")


@pytest.fixture
def head(good_head, tmp_path) -> Path:
    return Path(shutil.copytree(good_head, tmp_path / "head"))


def check(target: Path, drafter: Path, *options: str) -> int:
    return main(["check", str(target), str(drafter), "--dtype", "fp32", "--threads", "1", *options])


def test_a_copy_of_the_target_agrees_everywhere(target, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert check(target, target, "--json", str(report)) == 0
    out = capsys.readouterr().out
    assert "64 of 64 first guesses" in out
    found = json.loads(report.read_text())
    assert found["works"]
    assert found["kind"] == "draft_model"


def test_the_facts_of_a_head_are_printed(target, head, capsys):
    assert check(target, head, "--min-agreement", "0") == 0
    out = capsys.readouterr().out
    for fact in ("speculators", "eagle3", "0, 1, 2", "384", "192", "raw 384, fused 128"):
        assert fact in out
    assert "the target's" in out


def test_agreement_under_the_floor_is_refused_with_the_number(target, head, capsys, tmp_path):
    report = tmp_path / "report.json"
    assert check(target, head, "--json", str(report)) == 1
    error = capsys.readouterr().err
    assert "of 64 positions of the test text" in error
    assert "likely causes" in error
    assert json.loads(report.read_text())["works"] is False


def change(head: Path, edit) -> None:
    path = head / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def drop(name):
    return lambda tensors: tensors.pop(name)


def shift_map(tensors):
    tensors["d2t"] = tensors["d2t"].clone()
    tensors["d2t"][3] += 1


def spoil(tensors):
    tensors["fc.weight"][0, 0] = float("nan")


def add_unknown(tensors):
    tensors["another_norm.weight"] = torch.ones(64)


def map_outside(tensors):
    tensors["d2t"] = tensors["d2t"].clone()
    tensors["d2t"][-1] = 384


TRAPS = {
    "mapping missing": (drop("d2t"), "d2t"),
    "mapping inconsistent": (shift_map, "t2d and d2t"),
    "mapping outside": (map_outside, "outside the vocabulary"),
    "head missing": (drop("lm_head.weight"), "lm_head.weight"),
    "norm missing": (drop("norm.weight"), "norm.weight"),
    "unknown tensor": (add_unknown, "another_norm.weight"),
    "not finite": (spoil, "fc.weight holds values that are not finite"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_head_that_cannot_work_is_refused_with_the_reason(target, head, capsys, trap):
    edit, reason = TRAPS[trap]
    change(head, edit)
    assert check(target, head, "--min-agreement", "0") == 1
    assert reason in capsys.readouterr().err


def test_another_kind_than_the_files_is_refused(target, head, capsys):
    assert check(target, head, "--kind", "draft_model") == 1
    assert "one of kind eagle3" in capsys.readouterr().err


def test_a_head_of_another_target_is_refused(head, tmp_path, capsys):
    other = tiny_qwen3_dir(tmp_path / "other", vocab=320)
    assert check(other, head) == 1
    assert "320" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_directory_that_is_not_there_is_refused(target, head, tmp_path, capsys, which):
    nothing = tmp_path / "nothing"
    pair = (nothing, head) if which == "target" else (target, nothing)
    assert check(*pair) == 1
    assert "nothing" in capsys.readouterr().err
