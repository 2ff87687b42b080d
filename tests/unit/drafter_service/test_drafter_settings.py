"""Settings of a drafter: what is refused, and that checking them needs no torch."""

import subprocess
import sys

import pytest

from drafter_service.build import build_drafter
from drafter_service.config import DrafterSettings, load_settings, parse_settings
from protos.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"kind": "magic"},
        {"kind": "ngram", "colour": "red"},
        {"kind": "ngram", "limits": {"max_depth": 0}},
        {"kind": "ngram", "limits": {"max_dept": 4}},
        {"kind": "ngram", "idle_session_s": 0},
        {"kind": "ngram", "idle_session_s": -1},
        {"kind": "ngram", "dtype": "int3"},
        {"kind": "ngram", "device": "abacus"},
    ],
)
def test_wrong_settings_are_refused(values):
    with pytest.raises(ConfigError):
        parse_settings(values)


def test_all_wrong_keys_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_settings({"kind": "ngram", "colour": "red", "limits": {"max_depth": 0}})
    assert "colour" in str(caught.value)
    assert "limits.max_depth" in str(caught.value)


@pytest.mark.parametrize("text", ["- a list", "a: [", "", "\x00"])
def test_files_that_hold_no_mapping_are_refused(tmp_path, text):
    path = tmp_path / "drafter.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_settings(path)


def test_options_win_over_the_file(tmp_path):
    path = tmp_path / "drafter.yaml"
    path.write_text("kind: ngram\nname: a\nlisten: 127.0.0.1:1\n")
    settings = load_settings(path, {"name": "b"})
    assert (settings.label, settings.listen) == ("b", "127.0.0.1:1")


def test_settings_are_checked_without_torch():
    code = "import sys, drafter_service.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_eagle3_needs_a_checkpoint_that_exists(tmp_path):
    with pytest.raises(ConfigError, match="checkpoint"):
        build_drafter(DrafterSettings(kind="eagle3"))
    with pytest.raises(ConfigError, match="no directory"):
        build_drafter(DrafterSettings(kind="eagle3", checkpoint=str(tmp_path / "nothing")))
    with pytest.raises(CheckpointError):
        build_drafter(DrafterSettings(kind="eagle3", checkpoint=str(tmp_path)))


def test_every_drafter_has_an_incarnation_of_its_own():
    settings = DrafterSettings(kind="ngram")
    assert len({build_drafter(settings).capabilities.incarnation for _ in range(20)}) == 20
