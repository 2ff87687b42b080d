"""Training from several answers files, of either width of ids, and from an earlier checkpoint."""

import json
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
import yaml

from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.training.cli import main
from drafter_service.training.data import Data
from drafter_service.training.eagle3_settings import Eagle3Settings
from drafter_service.training.records import read_records
from drafter_service.training.settings import load_settings
from protos.errors import ConfigError
from tests.tiny import tiny_llama_dir

VOCAB, HIDDEN = 64, 32


def write_answers(path: Path, num_records: int, seed: int, ids: str = "uint16") -> None:
    rng = np.random.default_rng(seed)
    dtype = {"uint16": "<u2", "uint32": "<u4"}[ids]
    header = {"format": "outrider-answers", "vocab_size": VOCAB, "ids": f"{ids} little-endian"}
    with path.open("wb") as stream:
        stream.write(msgpack.packb(header))
        for number in range(num_records):
            # Half of the vocabulary each, so that the draft vocabularies of two files differ.
            low, high = (3, 34) if seed == 1 else (30, VOCAB)
            prompt, answer = rng.integers(3, VOCAB, 5 + number), rng.integers(low, high, 16)
            parts = {"p": prompt.astype(dtype).tobytes(), "r": answer.astype(dtype).tobytes()}
            stream.write(msgpack.packb(parts))


def write_settings(root: Path, name: str, answers: list[str], vocab: int, **more: object) -> Path:
    settings = {
        "answers": [str(root / f"{answer}.msgpack") for answer in answers],
        "target": str(root / "target"),
        "features": str(root / "features"),
        "run": str(root / f"run-{name}"),
        "record_layers": [0, 1, 2],
        "head": {
            "aux_layers": [0, 1, 2],
            "draft_vocab_size": vocab,
            "num_heads": 4,
            "num_kv_heads": 2,
            "intermediate_size": 48,
        },
        "rows_per_update": 64,
        "held_out_share": 0.2,
        "warmup_updates": 1,
        "epochs": 1,
        "threads": torch.get_num_threads(),
    } | more
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("more")
    tiny_llama_dir(root / "target", vocab=VOCAB, hidden=HIDDEN)
    write_answers(root / "first.msgpack", 7, 1)
    write_answers(root / "second.msgpack", 5, 2, "uint32")
    path = write_settings(root, "one", ["first"], 16)
    assert main(["eagle3", "--config", str(path), "--output", str(root / "one")]) == 0
    path = write_settings(root, "both", ["first", "second"], 32)
    assert main(["eagle3", "--config", str(path), "--stage", "features"]) == 0
    return root


def test_records_of_all_files_carry_their_own_features(root):
    data = Data(load_settings(root / "both.yaml", Eagle3Settings))
    single = Data(load_settings(write_settings(root, "two", ["second"], 32), Eagle3Settings))
    assert [record.index for record in data.records] == list(range(12))
    assert np.array_equal(data.records[8].ids, single.records[1].ids)
    for joined, alone in zip(data.load([8]).features, single.load([1]).features, strict=True):
        assert torch.equal(joined, alone)
    assert torch.equal(data.load([8]).choices, single.load([1]).choices)
    assert read_records(root / "second.msgpack")[1].ids.max() < VOCAB


def test_features_of_a_file_are_kept_when_another_is_added(root):
    index = root / "features" / "first" / "index.json"
    before = index.stat().st_mtime_ns
    assert main(["eagle3", "--config", str(root / "both.yaml"), "--stage", "features"]) == 0
    assert index.stat().st_mtime_ns == before


def test_a_checkpoint_goes_on_with_a_larger_draft_vocabulary(root):
    path = write_settings(root, "more", ["first", "second"], 32, peak_rate=1e-9)
    command = ["eagle3", "--config", str(path), "--warm-from", str(root / "one")]
    assert main([*command, "--output", str(root / "more")]) == 0
    target = read_target_weights(root / "target")
    old, new = (
        read_eagle3_head(root / name, target.embed_tokens, torch.float32)
        for name in ("one", "more")
    )
    places = {token: row for row, token in enumerate(new.target_ids.tolist())}
    kept = [(row, places[t]) for row, t in enumerate(old.target_ids.tolist()) if t in places]
    assert len(kept) > 8
    olds, news = zip(*kept, strict=True)
    y = torch.randn(5, HIDDEN)
    expected = old.logits(y)[:, list(olds)]
    torch.testing.assert_close(new.logits(y)[:, list(news)], expected, atol=2e-2, rtol=2e-2)
    told = json.loads((root / "more" / "provenance.json").read_text())
    assert told["started_from"]["name"] == "one"
    assert told["started_from"]["trained"]["rows"] > 0
    assert set(told["data"]["answers_sha256"]) == {"first.msgpack", "second.msgpack"}


def test_a_checkpoint_of_another_shape_is_refused(root, capsys):
    path = write_settings(root, "wide", ["first"], 16)
    settings = yaml.safe_load(path.read_text())
    settings["head"]["norm_feedback"] = False
    path.write_text(yaml.safe_dump(settings))
    command = ["eagle3", "--config", str(path), "--warm-from", str(root / "one")]
    assert main([*command, "--stage", "train"]) == 1
    assert "another shape" in capsys.readouterr().err


def test_two_files_of_one_name_are_refused(root):
    path = write_settings(root, "same", ["first"], 16)
    settings = yaml.safe_load(path.read_text())
    settings["answers"] = ["a/x.msgpack", "b/x.msgpack"]
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match="names of their own"):
        load_settings(path, Eagle3Settings)
