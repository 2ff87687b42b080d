"""`outrider evaluate` end to end with a tiny target, and its arithmetic, names and refusals."""

import json
import shutil

import pytest

from cluster.tools import evaluate_plot
from cluster.tools.bench_prompts import Question
from cluster.tools.cli import main as outrider
from cluster.tools.evaluate import main
from cluster.tools.evaluate_heads import build_head, find_heads, shipped_heads
from cluster.tools.evaluate_report import Evaluation
from drafter_service.replay_counts import ReplayCounts
from protos.digest import directory_digest
from protos.errors import ConfigError, IncompatiblePair
from tests.perfect_heads.overfit import HERE, target_dir
from tests.tiny import tiny_llama_dir
from verifier_service.data import recording_engine

CATEGORIES = ("writing", "coding", "qa")
FAST = ["--dtype", "fp32", "--max-new", "12", "--batch", "4"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = target_dir(tmp_path_factory.mktemp("target"))
    if directory_digest(directory) != (HERE / "target_digest.txt").read_text().strip():
        pytest.skip("another torch draws another target: run tests.perfect_heads.overfit")
    return directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    lines = [{"category": c, "turns": [f"ask {c} {n}"]} for c in CATEGORIES for n in range(2)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def run(target, prompts, tmp_path_factory):
    """(report, text) of two heads, all default shapes and both temperatures, and the cache."""
    folder = tmp_path_factory.mktemp("run")
    words = ["--prompts", str(prompts), "--target", str(target), "--cache", str(folder / "cache")]
    heads = ["--heads", str(HERE / "eagle3"), f"first={HERE / 'eagle'}"]
    out = ["--json", str(folder / "out.json"), "--plot", str(folder / "out.png")]
    assert main([*words, *heads, *FAST, *out]) == 0
    return json.loads((folder / "out.json").read_text()), folder


def test_tau_is_keyed_by_head_and_shape(run):
    report, _ = run
    shapes = {"chain4", "tree", "merged"}
    assert {head: set(taus) for head, taus in report["tau"].items()} == {
        "eagle3": shapes,
        "first": shapes,
        "ngram": {"ngram8"},
    }
    assert report["tau"] == report["temperatures"]["0"]["tau"]
    assert set(report["temperatures"]) == {"0", "1"}
    assert report["questions"] == 6
    assert report["heads"]["first"]["kind"] == "eagle"


def test_sections_agree_with_each_other(run):
    for section in run[0]["temperatures"].values():
        assert list(section["by_category"]) == list(CATEGORIES)
        assert list(section["by_subtask"]) == ["mt_bench", "qa"]
        for head, shapes in section["counts"].items():
            for shape, counts in shapes.items():
                tau = section["tau"][head][shape]
                assert tau == pytest.approx(counts["committed"] / counts["rounds"], abs=1e-4)
                by_depth = section["acceptance_by_depth"][head][shape]
                assert sum(by_depth) == pytest.approx(
                    counts["accepted"] / counts["rounds"], abs=1e-3
                )
                taus = [section["by_category"][name][head][shape] for name in CATEGORIES]
                assert min(taus) <= tau <= max(taus)


def test_the_plot_is_a_png(run):
    assert (run[1] / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_needs_no_target(run, target, prompts, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise AssertionError("the target was loaded although all texts are there")

    monkeypatch.setattr(recording_engine, "load_target", refuse)
    report, folder = run
    words = ["evaluate", "--prompts", str(prompts), "--target", str(target)]
    kept = ["--cache", str(folder / "cache"), "--json", str(folder / "again.json")]
    head = ["--heads", f"again={HERE / 'eagle3'}", "--shapes", "tree,chain4"]
    assert outrider([*words, *kept, *head, *FAST, "--temperatures", "1"]) == 0
    again = json.loads((folder / "again.json").read_text())
    expected = report["temperatures"]["1"]["tau"]["eagle3"]
    assert again["tau"] == {"again": {"tree": expected["tree"], "chain4": expected["chain4"]}}
    table = capsys.readouterr().out
    assert "tau at temperature 1, 6 questions" in table
    assert "| category | again tree | again chain4 |" in table


def test_look_ups_need_no_head_and_no_rows(target, prompts, tmp_path):
    words = ["--prompts", str(prompts), "--target", str(target), "--cache", str(tmp_path)]
    out = ["--json", str(tmp_path / "out.json"), "--limit", "3", "--temperatures", "0"]
    assert main([*words, *FAST, *out, "--shapes", "ngram4,ngram8"]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report["tau"]["ngram"]) == {"ngram4", "ngram8"}
    assert (report["heads"], report["questions"]) == ({}, 3)


def refused(target, prompts, tmp_path, *more):
    words = ["--prompts", str(prompts), "--target", str(target), "--cache", str(tmp_path)]
    return main([*words, *FAST, "--limit", "1", "--temperatures", "0", *more])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "nobody"], "neither a directory nor a shipped head"),
        (["--heads", f"dflash:{HERE / 'eagle3'}"], "one of kind eagle3"),
        (["--heads", f"={HERE / 'eagle3'}"], "NAME="),
        (["--heads", f"a={HERE / 'eagle3'}", f"a={HERE / 'eagle'}"], "called 'a'"),
        (["--heads", f"ngram={HERE / 'eagle3'}"], "look-up's own name"),
        (["--heads", str(HERE / "eagle3"), "--shapes", "spiral"], "block_tree"),
        (["--heads", str(HERE / "eagle3"), "--shapes", "block"], "none of the heads drafts block"),
    ],
)
def test_what_cannot_be_replayed_is_said_before_any_work(target, prompts, tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        refused(target, prompts, tmp_path, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_head_of_another_target_is_refused(prompts, tmp_path):
    other = tiny_llama_dir(tmp_path / "other", vocab=300, hidden=32)
    with pytest.raises(IncompatiblePair, match="made for a target"):
        refused(other, prompts, tmp_path / "cache", "--heads", str(HERE / "eagle3"))
    assert not (tmp_path / "cache").exists()


def test_empty_prompts_are_refused(target, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="holds no questions"):
        refused(target, empty, tmp_path, "--heads", str(HERE / "eagle3"))


def test_a_torn_text_is_refused(run, target, prompts, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(run[1] / "cache", cache)
    for path in cache.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ConfigError, match="delete it"):
        refused(target, prompts, cache, "--heads", str(HERE / "eagle3"))


def test_a_plot_without_matplotlib_names_the_extra_before_any_work(
    target, prompts, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluate_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"outrider\[train\]"):
        refused(target, prompts, tmp_path, "--plot", str(tmp_path / "out.png"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["--temperatures", "warm"], ["--temperatures", "0,3"], ["--limit", "0"]]
)
def test_numbers_are_checked(target, prompts, tmp_path, words):
    with pytest.raises(SystemExit) as ended:
        refused(target, prompts, tmp_path, *words)
    assert ended.value.code == 2


def test_every_shipped_head_is_replayed_unless_some_are_named(smollm2_dir):
    found = find_heads([], smollm2_dir)
    assert len(found) == len(shipped_heads()) > 0
    assert {head.directory.name for head in found} == set(shipped_heads())
    assert "eagle3" in {head.name for head in found}


def test_two_heads_of_one_kind_are_called_by_their_directories(target):
    found = find_heads([str(HERE / "eagle3"), str(HERE / "peagle")], target)
    assert [head.name for head in found] == ["eagle3", "peagle"]


def test_a_kind_that_needs_no_files_stands_alone(target):
    (found,) = find_heads(["look=ngram:"], target)
    assert (found.name, found.kind, found.directory, found.layers) == (
        "look",
        "ngram",
        None,
        frozenset(),
    )
    drafter = build_head(found, "", target, "fp32", 4, 64)
    assert drafter.capabilities.name == "look"


def test_the_first_tau_is_the_greedy_one():
    counts = {"h": {"tree": [ReplayCounts(4, 4, 9, 6, 10), ReplayCounts(1, 1, 3, 1, 2)]}}
    warm = {"h": {"tree": [ReplayCounts(4, 4, 9, 2, 6), ReplayCounts(1, 1, 3, 0, 1)]}}
    questions = [Question("mt_bench", "writing", "?"), Question("qa", "qa", "?")]
    both = Evaluation(questions, {1.0: warm, 0.0: counts}, {}).report()
    assert (both["tau"], both["temperature"]) == ({"h": {"tree": 2.4}}, 0.0)
    only = Evaluation(questions, {1.0: warm}, {}).report()
    assert only["tau"] == {"h": {"tree": 1.4}}
    assert only["temperatures"]["1"]["by_category"]["qa"] == {"h": {"tree": 1.0}}
