"""`outrider bench engine` measures a real engine and writes the documented keys."""

import json

import pytest

from protos.errors import ConfigError
from verifier_service.bench import main

SCALARS = ("chain16_over_1", "chain32_over_1", "tree16_over_1", "tree32_over_1")
BATCHED = ("sampled_over_greedy", "unfiltered_over_greedy", "prefill_over_transformers")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What main would set for its own process stays in this test."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "3000")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def options(tiny_dirs, *more):
    return [
        *("--model", str(tiny_dirs["llama"]), "--threads", "1", "--repeats", "2"),
        *("--contexts", "20", "70", *more),
    ]


def test_json_holds_every_figure_with_its_spread(tiny_dirs, tmp_path, capsys):
    file = tmp_path / "out.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["' + "one two " * 20 + '"]}\n{"q": "three ' + "x" * 90 + '"}\n')
    assert main(options(tiny_dirs, "--json", str(file), "--prompts", str(prompts))) == 0
    result = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert set(result["plain_over_transformers"]) == {"20", "70"}
    for name in SCALARS:
        figure = result["steps"]["20"][name]
        assert result[name] == figure["ratio"] > 0
        assert figure["min"] <= figure["ratio"] <= figure["max"]
    for name in BATCHED:
        assert result[name] == result["batch"][name]["ratio"] > 0
    assert result["run"]["invariant"] is True


def test_too_little_text_is_refused(tiny_dirs, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"q": "short"}\n')
    with pytest.raises(ConfigError, match="tokens of text"):
        main(options(tiny_dirs, "--prompts", str(prompts)))
