"""Kinds by name: ours, another package's through an entry point, and what is refused."""

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from cluster.config import parse_config
from drafter_service import kinds
from drafter_service.build import build_drafter
from drafter_service.config import DrafterSettings, parse_settings
from drafter_service.ngram.load import load_ngram
from protos.errors import ConfigError


def register(monkeypatch, *points):
    """What another package's metadata would say: (group, name, place) each."""
    found = EntryPoints(EntryPoint(name, place, group) for group, name, place in points)
    monkeypatch.setattr(kinds, "entry_points", lambda **asked: found.select(**asked))


def load_without_capabilities(settings, target_dir, incarnation):
    return object()


def load_of_another_incarnation(settings, target_dir, incarnation):
    return load_ngram(settings, target_dir, incarnation + 1)


@pytest.mark.parametrize("parse", [parse_settings, lambda v: parse_config({"drafters": [v]})])
def test_an_unknown_kind_is_refused_and_the_known_ones_named(monkeypatch, parse):
    register(monkeypatch, (kinds.DRAFTERS_GROUP, "echo", "no_such_module:load"))
    with pytest.raises(ConfigError, match=r"no drafter of kind 'magic'.*eagle3.*echo"):
        parse({"kind": "magic", "name": "m"})


@pytest.mark.parametrize("parse", [parse_settings, lambda v: parse_config({"drafters": [v]})])
def test_a_registered_kind_is_accepted_without_importing_it(monkeypatch, parse):
    register(monkeypatch, (kinds.DRAFTERS_GROUP, "echo", "no_such_module:load"))
    parse({"kind": "echo", "name": "e"})


def test_a_registered_kind_is_built(monkeypatch):
    register(monkeypatch, (kinds.DRAFTERS_GROUP, "echo", "drafter_service.ngram.load:load_ngram"))
    assert build_drafter(DrafterSettings(kind="echo")).capabilities.kind == "echo"


def test_a_name_of_ours_stays_ours(monkeypatch, caplog):
    register(monkeypatch, (kinds.DRAFTERS_GROUP, "ngram", "no_such_module:load"))
    assert build_drafter(DrafterSettings(kind="ngram")).capabilities.kind == "ngram"
    assert "built-in" in caplog.text


def test_one_name_of_two_packages_is_refused(monkeypatch):
    places = ("a_package:load", "b_package:load")
    register(monkeypatch, *((kinds.DRAFTERS_GROUP, "echo", place) for place in places))
    with pytest.raises(ConfigError, match=r"a_package:load, b_package:load"):
        build_drafter(DrafterSettings(kind="echo"))


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("no_such_module:load", "cannot be imported"),
        ("drafter_service.ngram.load:no_such_name", "cannot be imported"),
        ("drafter_service.kinds:DRAFTERS_GROUP", "not a function"),
        (f"{__name__}:load_without_capabilities", "made no drafter"),
        (f"{__name__}:load_of_another_incarnation", "made no drafter"),
    ],
)
def test_a_loader_that_does_not_work_is_named(monkeypatch, place, match):
    register(monkeypatch, (kinds.DRAFTERS_GROUP, "echo", place))
    with pytest.raises(ConfigError, match=match) as caught:
        build_drafter(DrafterSettings(kind="echo"))
    assert place.rpartition(":")[0] in str(caught.value)


def test_every_built_in_place_exists():
    for kind in kinds.BUILT_IN.values():
        assert callable(kinds.import_place(kind.load))
        assert not kind.describe or callable(kinds.import_place(kind.describe))


def test_a_kind_that_eats_tokens_only_is_not_described(tmp_path):
    assert kinds.describe_checkpoint("ngram", tmp_path, None) is None


def test_names_are_known_without_torch_and_without_any_drafter():
    code = (
        "import sys, drafter_service.kinds as k; k.check_kind('eagle3'); k.known_kinds(); "
        "assert not {'torch', 'drafter_service.eagle3', 'drafter_service.ngram'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
