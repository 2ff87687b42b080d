"""`outrider train eagle3` on a tiny target: from recorded answers to a checkpoint that drafts."""

import json

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.training.choices import is_greedy
from drafter_service.training.cli import main
from drafter_service.training.eagle3_settings import Eagle3Settings
from drafter_service.training.features import FeatureStore
from drafter_service.training.records import Record, read_records
from drafter_service.training.settings import load_settings
from protos.errors import ConfigError
from tests.tiny_training import HIDDEN, VOCAB, tiny_training

RECORDS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    config = tiny_training(root, RECORDS, threads=torch.get_num_threads())
    command = ["eagle3", "--config", str(config), "--output", str(root / "head")]
    assert main([*command, "--name", "tiny"]) == 0
    return root, command


def test_the_written_head_drafts_for_the_target(trained):
    root, _ = trained
    embedding = read_target_weights(root / "target").embed_tokens
    head = read_eagle3_head(root / "head", embedding, torch.float32)
    assert head.config.aux_layers == (0, 1, 2)
    logits = head.logits(head.fuse(torch.randn(3, head.config.feature_size)))
    assert logits.shape == (3, 32)


def test_provenance_tells_how_to_make_the_head_again(trained):
    root, _ = trained
    told = json.loads((root / "head" / "provenance.json").read_text())
    assert told["settings"]["seed"] == 0
    assert told["trained"]["rows"] > RECORDS * 10
    assert len(told["held_out"]["accuracy"]) == 5
    assert {"torch", "transformers", "python"} <= set(told["versions"])
    assert told["settings"]["answers"] == ["answers.msgpack"]
    assert told["command"].startswith("outrider train eagle3 --config eagle3.yaml --output head")
    assert "/" not in told["command"]
    assert str(root.parent) not in json.dumps(told)


def test_the_same_command_again_continues_and_finds_nothing_left(trained):
    root, command = trained
    before = (root / "head" / "model.safetensors").read_bytes()
    lines = (root / "run" / "log.jsonl").read_text().count('"rates"')
    assert main(command) == 0
    assert (root / "head" / "model.safetensors").read_bytes() == before
    assert (root / "run" / "log.jsonl").read_text().count('"rates"') == lines


def test_changed_settings_reach_the_run_and_are_told(trained, tmp_path):
    _, command = trained
    changes = ["--set", f"run={tmp_path / 'run'}", "--set", "num_steps=1", "--set", "epochs=1"]
    command = [*command[:3], "--output", str(tmp_path / "head")]
    assert main([*command, *changes]) == 0
    told = json.loads((tmp_path / "head" / "provenance.json").read_text())
    assert told["settings"]["num_steps"] == 1
    assert "--set num_steps=1 --set epochs=1" in told["command"]


def test_a_run_does_not_go_on_under_other_settings(trained, capsys):
    root, command = trained
    before = (root / "run" / "state.safetensors").read_bytes()
    assert main([*command, "--set", "num_steps=1"]) == 1
    assert "num_steps: 3, now 1" in capsys.readouterr().err
    assert (root / "run" / "state.safetensors").read_bytes() == before


def test_recorded_states_are_those_of_the_design(trained):
    root, _ = trained
    record = read_records(root / "answers.msgpack")[3]
    recorded = FeatureStore(root / "features" / "answers").read(3)
    aux, final = recorded.aux, recorded.final
    model = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.bfloat16)
    with torch.inference_mode():
        states = model(torch.from_numpy(record.ids)[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[1][0], states[2][0]], dim=-1)
    torch.testing.assert_close(aux[:, : 2 * HIDDEN], expected, atol=5e-2, rtol=5e-2)
    torch.testing.assert_close(final, states[-1][0], atol=5e-2, rtol=5e-2)


def test_a_layer_subset_is_read_in_the_order_asked_for(trained):
    root, _ = trained
    store = FeatureStore(root / "features" / "answers")
    every, some = store.read(0).aux, store.read(0, (2, 0)).aux
    assert torch.equal(some, torch.cat([every[:, 2 * HIDDEN :], every[:, :HIDDEN]], dim=1))
    with pytest.raises(ValueError, match="were not recorded"):
        store.read(0, (5,))


def test_the_best_ids_are_the_targets_from_the_prompts_last_row_on(trained):
    root, _ = trained
    record = read_records(root / "answers.msgpack")[2]
    recorded = FeatureStore(root / "features" / "answers").read(2)
    target = read_target_weights(root / "target")
    logits = (recorded.final @ target.lm_head.to(torch.bfloat16).T).float()[record.prompt_len - 1 :]
    logps = logits.log_softmax(-1)
    kept = min(64, VOCAB)
    assert recorded.top_ids.shape == (record.answer_len + 1, kept)
    assert torch.equal(recorded.top_ids[:, 0].long(), logits.argmax(-1))
    taken = logps.gather(1, recorded.top_ids.long())
    torch.testing.assert_close(recorded.top_logps.float(), taken, atol=2e-2, rtol=1e-3)
    assert len(set(recorded.top_ids[0].tolist())) == kept


def test_an_answer_is_greedy_when_it_follows_the_best_ids(trained):
    root, _ = trained
    record = read_records(root / "answers.msgpack")[2]
    top_ids = FeatureStore(root / "features" / "answers").read(2).top_ids
    assert not is_greedy(record, top_ids)
    written = np.concatenate([record.ids[: record.prompt_len], top_ids[:-1, 0].numpy()])
    assert is_greedy(Record(0, written, record.prompt_len), top_ids)


def test_wrong_settings_are_refused_with_a_reason(trained, tmp_path, capsys):
    root, _ = trained
    settings = yaml.safe_load((root / "eagle3.yaml").read_text())
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({**settings, "no_such_key": 1}))
    with pytest.raises(ConfigError, match="no_such_key"):
        load_settings(path, Eagle3Settings)
    assert main(["eagle3", "--config", str(path)]) == 1
    assert "no_such_key" in capsys.readouterr().err
    settings["head"]["aux_layers"] = [0, 1, 7]
    path.write_text(yaml.safe_dump(settings))
    assert main(["eagle3", "--config", str(path), "--stage", "train"]) == 1
    assert "aux layers" in capsys.readouterr().err
