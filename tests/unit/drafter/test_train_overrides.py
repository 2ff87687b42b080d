"""`--set` changes a setting as if the file had said so, and a run keeps what it was begun with."""

import json

import pytest
import yaml

from drafter_service.training.continuing import check_continues, check_same_data
from drafter_service.training.eagle3_settings import Eagle3Settings
from drafter_service.training.overrides import overridden, parse_override
from drafter_service.training.settings import load_settings
from drafter_service.training.telling import told_command, told_settings
from protos.errors import ConfigError

DOCUMENT = {
    "answers": "data/a.msgpack",
    "target": "/models/target",
    "features": "/big/features",
    "run": "/big/run",
    "head": {"aux_layers": [1, 14, 26], "num_heads": 9},
    "minutes": 10,
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "eagle3.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT))
    return path


def test_an_override_equals_the_same_words_in_the_file(path, tmp_path):
    changes = [
        "num_steps=5",
        "head.aux_layers=[14]",
        "peak_rate=1e-3",
        "run=other",
        "head.fc_norm=no",
    ]
    written = {**DOCUMENT, "num_steps": 5, "peak_rate": 1e-3, "run": "other"}
    written["head"] = {"aux_layers": [14], "num_heads": 9, "fc_norm": False}
    (tmp_path / "written.yaml").write_text(yaml.safe_dump(written))
    expected = load_settings(tmp_path / "written.yaml", Eagle3Settings)
    assert load_settings(path, Eagle3Settings, changes) == expected
    assert expected.head.num_heads == 9


def test_a_section_that_the_file_lacks_can_be_set_and_the_last_word_wins():
    changes = [parse_override(text) for text in ("head.num_heads=3", "seed=1", "seed=2")]
    assert overridden({}, changes) == {"head": {"num_heads": 3}, "seed": 2}


def test_the_file_itself_is_left_as_it_was():
    document = {"head": {"num_heads": 9}}
    overridden(document, [parse_override("head.num_heads=3")])
    assert document == {"head": {"num_heads": 9}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("num_stepz=5", "num_stepz"),
        ("head.num_headz=5", "num_headz"),
        ("num_steps=0", "greater than or equal to 1"),
        ("num_steps=many", "valid integer"),
        ("num_steps", "FIELD=VALUE"),
        ("=5", "FIELD=VALUE"),
        ("head.=5", "FIELD=VALUE"),
        ("num_steps=", "num_steps=null"),
        ("num_steps=[1", "not YAML"),
        ("answers.first=a", "answers has no parts"),
        ("epochs=2", "length is given twice"),
        ("minutes=[]", "valid number"),
    ],
)
def test_a_wrong_override_is_refused_with_a_reason(path, change, reason):
    with pytest.raises(ConfigError, match=reason):
        load_settings(path, Eagle3Settings, [change])


def test_a_length_is_needed(path):
    assert load_settings(path, Eagle3Settings, ["minutes=null"]).epochs == 3
    with pytest.raises(ConfigError, match="no length"):
        load_settings(path, Eagle3Settings, ["minutes=null", "epochs=null"])


def test_settings_are_told_with_names_and_without_directories(path):
    told = told_settings(load_settings(path, Eagle3Settings, ["head.aux_layers=[14]"]))
    assert told["head"]["aux_layers"] == [14]
    assert told["answers"] == ["a.msgpack"]
    assert told["target"] == "target"
    assert "/" not in json.dumps(told)


def test_a_command_is_told_without_directories():
    words = ["outrider", "train", "--config=/a b/c.yaml", "--set", "answers=[/x/y.msgpack,z/w]"]
    words += ["--output", "heads/mine/", "~/.cache/t"]
    told = told_command(words)
    assert told == "outrider train --config=c.yaml --set 'answers=[y.msgpack,w]' --output mine t"


def test_a_run_goes_on_with_another_length_but_not_with_another_head(path):
    begun = json.loads(json.dumps(told_settings(load_settings(path, Eagle3Settings))))
    longer = ["minutes=null", "epochs=9", "run=elsewhere", "threads=7"]
    check_continues(begun, told_settings(load_settings(path, Eagle3Settings, longer)))
    other = told_settings(load_settings(path, Eagle3Settings, ["head.aux_layers=[14]", "seed=4"]))
    with pytest.raises(ConfigError, match=r"head.aux_layers: \[1, 14, 26\], now \[14\]; seed: 0"):
        check_continues(begun, other)


def test_a_setting_that_is_newer_than_the_run_does_not_stop_it(path):
    begun = told_settings(load_settings(path, Eagle3Settings))
    check_continues(begun, {**begun, "newer": 1, "head": {**begun["head"], "newer": 2}})


def test_a_run_does_not_go_on_with_other_data():
    begun = {
        "answers_sha256": {"a.msgpack": "1", "b.msgpack": "2"},
        "target_weights_sha256": {"model.safetensors": "3"},
        "train_answers": 7,
    }
    check_same_data(begun, begun)
    check_same_data(begun, {**begun, "train_answers": 8})
    check_same_data(begun, {**begun, "answers_sha256": {"a.msgpack": "1", "moved.msgpack": "2"}})
    check_same_data(None, begun)
    with pytest.raises(ConfigError, match=r"b\.msgpack changed"):
        check_same_data(begun, {**begun, "answers_sha256": {"a.msgpack": "1", "b.msgpack": "9"}})
    with pytest.raises(ConfigError, match=r"model\.safetensors changed"):
        check_same_data(begun, {**begun, "target_weights_sha256": {"model.safetensors": "4"}})
    with pytest.raises(ConfigError, match="more files"):
        check_same_data(begun, {**begun, "answers_sha256": {"a.msgpack": "1"}})
