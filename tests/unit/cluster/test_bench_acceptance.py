"""Benchmarks' own arithmetic: which questions, and what is counted."""

import json

import pytest

from cluster.tools.bench_acceptance import Answer, report
from cluster.tools.bench_prompts import MT_BENCH, Question, per_subtask, read_questions
from protos.errors import ConfigError
from protos.generation import RunCounts


def _file(tmp_path, *entries: object):
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def test_mt_benchs_categories_are_one_subtask_taken_in_turn(tmp_path):
    entries = [
        {"category": c, "turns": [f"{c} {i}", "second"]}
        for c in ("writing", "coding", "stem", "qa")
        for i in range(5)
    ]
    chosen = per_subtask(read_questions(_file(tmp_path, *entries)), 4)
    assert [q.text for q in chosen if q.subtask == MT_BENCH] == [
        "writing 0",
        "coding 0",
        "stem 0",
        "writing 1",
    ]
    assert [q.text for q in chosen if q.subtask == "qa"] == [f"qa {i}" for i in range(4)]


def test_plain_prompt_files_are_one_group(tmp_path):
    questions = read_questions(_file(tmp_path, {"q": "a"}, {"turns": ["b"]}))
    assert [(q.subtask, q.text) for q in questions] == [("prompts", "a"), ("prompts", "b")]


@pytest.mark.parametrize("entry", [{}, {"turns": []}, 3, {"turns": 5}])
def test_a_line_without_a_question_is_named(tmp_path, entry):
    with pytest.raises(ConfigError, match="line 2"):
        read_questions(_file(tmp_path, {"q": "a"}, entry))


def _answer(category: str, output: int, rounds: int, by_depth=(), ids=(1, 2)) -> Answer:
    counts = RunCounts(
        num_output=output,
        num_rounds=rounds,
        num_accepted=output - rounds,
        num_drafted=4 * rounds,
        accepted_by_depth=by_depth,
        accepted_by_source=(("eagle3", 3),),
    )
    return Answer(Question(category, category, "?"), ids, counts)


def test_tau_is_a_ratio_of_sums_without_the_prompts_own_step():
    answers = {"tree": [_answer("qa", 101, 51), _answer("rag", 11, 11)]}
    result = report(answers)
    assert result["tau"] == {"tree": round(110 / 60, 4)}
    assert result["by_category"]["qa"]["tree"] == 2.0
    assert result["tau_mean_of_questions"]["tree"] == 1.5


def test_acceptance_by_depth_is_a_share_of_all_rounds():
    answers = {"tree": [_answer("qa", 21, 11, (5, 2)), _answer("qa", 11, 11, (1,))]}
    assert report(answers)["acceptance_by_depth"]["tree"] == [0.3, 0.1]


def test_texts_that_differ_between_variants_are_counted():
    same, other = _answer("qa", 3, 2), _answer("qa", 3, 2, ids=(1, 3))
    assert report({"a": [same, same], "b": [same, same]})["different_texts"] == 0
    assert report({"a": [same, same], "b": [same, other]})["different_texts"] == 1
