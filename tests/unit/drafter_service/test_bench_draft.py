"""`outrider bench draft`: what its JSON is keyed by, and that every kind has a drafter to time."""

import json

import pytest

from cluster.tools.cli import main
from drafter_service.bench import CASES, MAKERS, ratios
from drafter_service.kinds import BUILT_IN


def table(per_case):
    """Medians that grow as told: one session 1 ms, sixteen `per_case` ms, the loop 16 ms."""
    found = {}
    for case in CASES:
        for label, value in (("1", 1.0), ("16", per_case[case.kind]), ("16/loop", 16.0)):
            found[f"{case.name}/{label}"] = {"median_ms": value}
    return found


def test_every_kind_is_timed():
    assert set(BUILT_IN) <= set(MAKERS)
    assert {case.kind for case in CASES} == set(MAKERS)


def test_ratios_are_keyed_by_kind_and_by_sessions():
    found = ratios(table({kind: 2.0 + n for n, kind in enumerate(MAKERS)}), CASES)
    assert found["sixteen_over_one"] == {kind: 2.0 + n for n, kind in enumerate(MAKERS)}
    block = found["dflash_block_over_eagle3_chain4"]
    assert list(block) == ["1", "16"]
    expected = found["sixteen_over_one"]["dflash"] / found["sixteen_over_one"]["eagle3"]
    assert block["16"] == pytest.approx(expected)
    assert found["loop_over_batch"]["ngram/chain8"] == 8.0


def test_kinds_that_are_not_timed_are_left_out():
    cases = [case for case in CASES if case.kind == "ngram"]
    found = ratios(table(dict.fromkeys(MAKERS, 2.0)), cases)
    assert found["sixteen_over_one"] == {"ngram": 2.0}


def test_the_command_writes_one_object(tmp_path):
    path = tmp_path / "bench.json"
    options = ["--kinds", "ngram", "--context", "20", "--repeats", "1", "--json", str(path)]
    assert main(["bench", "draft", *options]) == 0
    report = json.loads(path.read_text())
    assert list(report["sixteen_over_one"]) == ["ngram"]
    assert report["rounds_ms"]["ngram/chain8/16"]["median_ms"] > 0
    assert report["dflash_block_over_eagle3_chain4"] == {}
