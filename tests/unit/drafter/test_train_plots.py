"""What a log says after a crash, and plots of runs: every number that goes in can be read off."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drafter_service.training.plots import scaling
from drafter_service.training.plots.cli import main
from drafter_service.training.plots.curves import Curve, draw_curves
from drafter_service.training.plots.scaling import Point, points_of, read_taus
from drafter_service.training.run_log import read_run_log
from protos.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


def report(update: int, losses: list[float]) -> dict[str, object]:
    rates = [update / 100 + place for place in range(len(losses))]
    mean = sum(losses) / len(losses)
    facts = {"update": update, "rows": 10 * update, "loss": mean, "accuracy": [0.5, 0.25]}
    return {**facts, "update_losses": losses, "rates": rates}


def check(update: int, score: float) -> dict[str, object]:
    figures = {"accuracy": [0.6, 0.5, 0.4]}
    return {"held_out": figures, "score": score, "update": update, "rows": 10 * update}


def started(update: int) -> dict[str, object]:
    return {"started": True, "update": update, "rows": 10 * update}


def write_run(path: Path, lines: list[dict[str, object]], **facts: object) -> Path:
    path.mkdir()
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if facts:
        (path / "provenance.json").write_text(json.dumps(facts))
    return path


def test_updates_that_a_crash_has_undone_are_not_counted_twice(tmp_path):
    lines = [started(0), report(3, [5.0, 4.0, 3.0]), check(3, 1.1), report(6, [2.9, 2.8, 2.7])]
    again = [started(4), report(6, [2.6, 2.5]), check(6, 1.3)]
    log = read_run_log(write_run(tmp_path / "run", [*lines, check(6, 1.2), *again]) / "log.jsonl")
    losses = [loss for one in log.reports for loss in one.update_losses]
    assert losses == [5.0, 4.0, 3.0, 2.9, 2.6, 2.5]
    assert [one.update for one in log.reports] == [3, 4, 6]
    assert log.reports[1].loss == 2.9
    assert [len(one.rates) for one in log.reports] == [3, 1, 2]
    assert [(one.update, one.score) for one in log.checks] == [(3, 1.1), (6, 1.3)]


def test_a_run_begun_anew_in_its_directory_forgets_all_of_the_old_one(tmp_path):
    lines = [started(0), report(3, [5.0, 4.0, 3.0]), check(3, 1.1), started(0), report(1, [9.0])]
    log = read_run_log(write_run(tmp_path / "run", lines) / "log.jsonl")
    assert [one.update_losses for one in log.reports] == [(9.0,)]
    assert log.checks == []


def test_a_line_cut_short_is_passed_over_and_a_log_without_lines_refused(tmp_path):
    run = write_run(tmp_path / "run", [report(1, [5.0])])
    with (run / "log.jsonl").open("a") as stream:
        stream.write('{"update": 2, "ro')
    assert len(read_run_log(run / "log.jsonl").reports) == 1
    (run / "log.jsonl").write_text('{"update": 2, "ro')
    with pytest.raises(ConfigError, match="no line"):
        read_run_log(run / "log.jsonl")
    with pytest.raises(ConfigError, match=r"holds no log\.jsonl"):
        read_run_log(tmp_path / "nowhere" / "log.jsonl")


@pytest.fixture
def family(tmp_path):
    """Heads that learned from 1, 2 and 4 thousand tokens, and a run of another family."""
    for share in (1, 2, 4):
        facts = {"kind": "eagle3", "data": {"train_answer_tokens": 1000 * share}}
        write_run(tmp_path / f"x{share}", [check(1, 1.0 + share)], **facts)
    facts = {"kind": "eagle", "data": {"train_answer_tokens": 2000}, "held_out": {"tau": 1.25}}
    write_run(tmp_path / "old", [check(1, 9.0)], **facts)
    table = {f"x{share}": {"tree": 2.0 + share, "chain4": 1.5 + share} for share in (1, 2, 4)}
    (tmp_path / "found.json").write_text(json.dumps({"tau": table, "questions": 3}))
    return tmp_path


def test_points_come_from_evaluations_or_from_held_out_answers(family):
    taus = read_taus([family / "found.json"])
    assert points_of(family / "x4", taus, ["tree"]) == [Point("eagle3", "tree", 4000, 6.0)]
    assert [p.shape for p in points_of(family / "x4", taus)] == ["tree", "chain4"]
    assert points_of(family / "x2", {}) == [Point("eagle3", scaling.HELD_OUT, 2000, 3.0)]
    assert points_of(family / "old", {}) == [Point("eagle", scaling.HELD_OUT, 2000, 1.25)]


def test_plots_are_written_as_png(family, capsys):
    runs = [write_run(family / "r", [report(1, [5.0]), check(1, 1.5), report(2, [4.0])])]
    runs.append(write_run(family / "fresh", [started(0)]))
    assert main(["curves", *map(str, runs), "--out", str(family / "curves.png")]) == 0
    heads = [str(family / f"x{share}") for share in (1, 2, 4)]
    found = ["--tau", str(family / "found.json"), "--shape", "tree"]
    assert main(["scaling", *heads, *found, "--out", str(family / "scaling.png")]) == 0
    for name in ("curves", "scaling"):
        assert (family / f"{name}.png").read_bytes().startswith(PNG)
    assert "wrote" in capsys.readouterr().out


def test_drawn_lines_hold_the_logs_numbers(family, monkeypatch):
    figures = []
    for module in (scaling, sys.modules[draw_curves.__module__]):
        monkeypatch.setattr(module, "write_png", lambda figure, _path: figures.append(figure))
    log = read_run_log(write_run(family / "r", [report(1, [5.0]), check(1, 1.5)]) / "log.jsonl")
    draw_curves([Curve("r", log)], family / "unused.png")
    acceptance, loss, rate = figures[0].axes
    assert [list(line.get_ydata()) for line in acceptance.lines] == [[0.6], [0.5], [0.4]]
    assert [list(line.get_ydata()) for line in loss.lines] == [[5.0]]
    assert [list(line.get_ydata()) for line in rate.lines] == [[0.01]]
    assert all(axes.get_xlabel() or axes is rate for axes in figures[0].axes)
    assert all(axes.get_ylabel() for axes in figures[0].axes)
    points = [Point("a", "tree", 2000, 2.0), Point("a", "tree", 1000, 1.0)]
    scaling.draw_scaling([*points, Point("b", "tree", 1000, 1.5)], family / "unused.png")
    (axes,) = figures[1].axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.0, 2.0], [1.5]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a, tree", "b, tree"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1 k", "2 k"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["curves", "nowhere"], "holds no log.jsonl"),
        (["scaling", "nowhere"], "how much it learned from"),
        (["scaling", "x1", "--tau", "x1/provenance.json"], "is no evaluation"),
        (["scaling", "old", "--tau", "found.json"], "no tau of old; known: x1, x2, x4"),
        (["scaling", "x1", "--tau", "found.json", "--shape", "block"], "chain4, tree"),
        (["scaling", "fresh"], "not been checked"),
        (["curves", "x1", "--out", "none/c.png"], "cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_a_reason(family, monkeypatch, capsys, words, reason):
    facts = {"kind": "eagle3", "data": {"train_answer_tokens": 5}}
    write_run(family / "fresh", [started(0)], **facts)
    monkeypatch.chdir(family)
    assert main([*words[:2], "--out", "c.png", *words[2:]]) == 1
    assert reason in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(family, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["curves", str(family / "x1"), "--out", str(family / "c.png")]) == 1
    assert "outrider[train]" in capsys.readouterr().err


def test_the_command_starts_without_torch_and_matplotlib():
    code = (
        "import sys, drafter_service.training.plots.cli; "
        "sys.exit(str({'torch', 'matplotlib'} & set(sys.modules)) if "
        "{'torch', 'matplotlib'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
