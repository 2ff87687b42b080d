"""Weights tell where they come from: every start, all warm starts before, and no paths."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from drafter_service.training.cli import main
from drafter_service.training.facts_file import read_facts
from drafter_service.training.provenance import code_facts, hardware_facts, origin_of
from protos.errors import ConfigError
from tests.tiny_training import tiny_training, write_tiny_answers

PLACES = {
    "answers": "answers.msgpack",
    "target": "target",
    "features": "features",
    "run": "runs/a",
}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Head `a`, trained in two goes; `b` from it, with its head; run `c` from b's state."""
    root = tmp_path_factory.mktemp("provenance")
    config = ["eagle3", "--config", str(tiny_training(root, epochs=1, num_records=8))]

    def train(name: str, *more: str) -> None:
        assert main([*config, "--set", f"run={root / 'runs' / name}", *more]) == 0

    train("a", "--set", "epochs=0.5", "--stage", "features")
    train("a", "--set", "epochs=0.5", "--stage", "train")
    train("a", "--output", str(root / "a"))
    warm = ["--warm-from", str(root / "a"), "--set", "peak_rate=0.01"]
    train("b", *warm, "--output", str(root / "b"))
    train("c", "--warm-from", str(root / "runs" / "b" / "state.safetensors"), "--stage", "train")
    return root


def test_a_runs_directory_tells_of_every_start(root):
    told = read_facts(root / "runs" / "a")
    first, second = told["starts"]
    assert first["from"] == {"update": 0, "epoch": 0, "batch": 0, "rows": 0}
    assert second["from"]["update"] > 0
    assert "--set epochs=0.5 --stage train" in first["command"]
    assert "--output a" in second["command"]
    for start in (first, second):
        assert {"commit", "commit_has_changes", "versions"} <= set(start)
        assert start["hardware"] == {**hardware_facts(), "workers": 1, "threads": 1}
    assert told["settings"]["epochs"] == 1
    assert told["seeds"] == {"seed": 0, "order_seed": 0}
    assert "started_from" not in told


def test_digests_and_sizes_are_those_of_the_data(root):
    data = read_facts(root / "runs" / "a")["data"]
    assert data["answers_sha256"] == {"answers.msgpack": sha256(root / "answers.msgpack")}
    weights = root / "target" / "model.safetensors"
    assert data["target_weights_sha256"] == {weights.name: sha256(weights)}
    lengths = [20 - number for number in range(8)]
    assert data["train_answers"] + data["held_out_answers"] == len(lengths)
    assert 0 < data["train_answer_tokens"] < sum(lengths)


def test_an_exported_head_tells_what_its_run_does(root):
    run, head = read_facts(root / "runs" / "a"), read_facts(root / "a")
    for name in ("starts", "seeds", "settings", "data", "kind", "draft_vocab_coverage"):
        assert head[name] == run[name], name
    assert head["trained"]["update"] > 0
    assert {"tau", "accuracy"} <= set(head["held_out"])


def test_a_chain_of_warm_starts_is_told_whole(root):
    third = read_facts(root / "runs" / "c")
    second = third["started_from"]
    first = second["started_from"]
    assert second["name"] == "state.safetensors"
    assert second["weights_sha256"] == sha256(root / "runs" / "b" / "state.safetensors")
    assert second["settings"]["peak_rate"] == 0.01
    assert second["trained"]["update"] > 0
    assert "--warm-from a" in second["starts"][0]["command"]
    assert first["name"] == "a"
    assert first["weights_sha256"] == sha256(root / "a" / "model.safetensors")
    assert len(first["starts"]) == 2
    assert "started_from" not in first
    assert read_facts(root / "b")["started_from"] == first


def test_a_run_is_not_continued_on_changed_answers(root, tmp_path, capsys):
    shutil.copytree(root, tmp_path / "copy")
    copy = tmp_path / "copy"
    write_tiny_answers(copy / "answers.msgpack", 8, seed=3)
    changes = [f"{name}={copy / path}" for name, path in PLACES.items()]
    words = [word for change in changes for word in ("--set", change)]
    before = (copy / "runs" / "a" / "state.safetensors").read_bytes()
    config = str(root / "eagle3.yaml")
    assert main(["eagle3", "--config", config, *words, "--stage", "train"]) == 1
    assert "other data (answers.msgpack changed)" in capsys.readouterr().err
    assert (copy / "runs" / "a" / "state.safetensors").read_bytes() == before


def test_no_path_of_the_machine_is_told(root):
    for path in (*root.glob("?/provenance.json"), *root.glob("runs/?/provenance.json")):
        told = path.read_text()
        assert "/" not in told, path
        assert root.name not in told, path


def test_weights_without_provenance_are_told_by_digest(root, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    origin = {"name": tmp_path.name, "weights_sha256": sha256(tmp_path / "model.safetensors")}
    assert origin_of(tmp_path) == origin
    (tmp_path / "provenance.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no JSON object"):
        origin_of(tmp_path)
    (tmp_path / "provenance.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        origin_of(tmp_path)


def test_commit_is_that_of_the_code_and_changes_are_told(tmp_path):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    code, other = tmp_path / "code.py", tmp_path / "installed.py"
    code.write_text("x = 1\n")
    git("init", "-q")
    git("add", "code.py")
    git("commit", "-q", "-m", "first")
    clean = code_facts(code)
    assert len(clean["commit"]) == 40
    assert clean["commit_has_changes"] is False
    other.write_text("y = 1\n")
    assert code_facts(code) == clean
    assert code_facts(other)["commit"] == "unknown"
    assert code_facts(other)["commit_has_changes"] is None
    code.write_text("x = 2\n")
    assert code_facts(code) == {**clean, "commit_has_changes": True}
    assert json.dumps(clean["versions"])
