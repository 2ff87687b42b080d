"""Synthesised turns: openings and temperatures mixed, near duplicates out, resumed exactly."""

import json

import pytest
import torch

from protos.errors import ConfigError
from tests.tiny import tiny_llama_dir
from verifier_service.data.chat import Chat
from verifier_service.data.cli import main
from verifier_service.data.conversations import Sampler
from verifier_service.data.engines import build_engine
from verifier_service.data.openings import Openings, default_openings, load_openings
from verifier_service.data.prompt_files import read_prompts
from verifier_service.data.synthesise import TurnsRun, synthesise, turn_job
from verifier_service.data.turns_file import TurnRules, TurnsFile

OPENINGS = Openings(("What is", "Tell me", "rivers"), 5)
SAMPLER = Sampler((0.8, 1.0, 1.2), 0, 8, 5)
ENDS = frozenset(range(0, 384, 2))
"""A random target hardly ever ends a turn: half of its words shall do."""
RULES = TurnRules(min_words=1, num_distinct_words=3)


class Killed(Exception):
    """The process ends here."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def chat(directory):
    return Chat(directory)


def _write(directory, chat, out, count, batch=4, kill_after=None, sampler=SAMPLER, rules=RULES):
    torch.set_num_threads(1)
    engine = build_engine(directory, batch, None, "fp32")
    run = TurnsRun(out, chat, ENDS, engine.target.facts.digest, sampler, OPENINGS, rules)

    def report(done: int, total: int, num_tokens: int) -> None:
        if done == kill_after:
            raise Killed

    return synthesise(engine, run, chat, sampler, OPENINGS, count, 2 * batch, report)


def test_turns_are_distinct_and_resume_exactly(directory, chat, tmp_path):
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert _write(directory, chat, whole, 8) == 8
    lines = [json.loads(line) for line in whole.read_text().split("\n")[:-1]]
    assert len({RULES.key(line["q"]) for line in lines}) == 8
    for place in (1, 4, 7):
        part.unlink(missing_ok=True)
        with pytest.raises(Killed):
            _write(directory, chat, part, 8, kill_after=place)
        with part.open("a") as stream:
            stream.write('{"q": "torn')
        assert _write(directory, chat, part, 8, batch=2) == 8
        assert part.read_bytes() == whole.read_bytes()
    # More of the same run go on where it stopped, as if they had been asked for at once.
    assert _write(directory, chat, part, 10) == 10
    assert part.read_bytes().startswith(whole.read_bytes())
    prompts = read_prompts([whole]).conversations
    assert [c.messages[0]["content"] for c in prompts] == [line["q"] for line in lines]


def test_every_turn_begins_with_its_candidates_opening(directory, chat, tmp_path):
    out = tmp_path / "turns.jsonl"
    _write(directory, chat, out, 8)
    lines = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
    assert all(line["q"].startswith(OPENINGS.of(line["candidate"])) for line in lines)
    assert len({OPENINGS.of(line["candidate"]) for line in lines}) > 1


def test_a_candidates_prompt_is_the_user_header_and_its_opening(chat):
    ask = next(turn_job(chat, OPENINGS, SAMPLER, 4))
    header = chat.user_header_ids()
    assert ask.prompt_ids[: len(header)] == header
    assert chat.text(ask.prompt_ids).endswith(OPENINGS.of(4))
    free = next(turn_job(chat, Openings((), 5), SAMPLER, 4))
    assert free.prompt_ids == header


def test_candidates_mix_temperatures_openings_and_seeds(chat):
    asks = [next(turn_job(chat, OPENINGS, SAMPLER, i)) for i in range(60)]
    assert {ask.params.temperature for ask in asks} == {0.8, 1.0, 1.2}
    assert len({(ask.params.temperature, ask.prompt_ids) for ask in asks}) == 9
    assert len({ask.params.seed for ask in asks}) == 60


def test_openings_follow_from_the_seed():
    drawn = [OPENINGS.of(i) for i in range(30)]
    assert drawn == [OPENINGS.of(i) for i in range(30)]
    assert drawn != [Openings(OPENINGS.texts, 6).of(i) for i in range(30)]
    assert Openings((), 5).of(3) == ""


def _file(tmp_path, rules=TurnRules(), run_id="run"):  # noqa: B008  # a value, never changed
    return TurnsFile(tmp_path / "t.jsonl", run_id, rules)


def test_near_duplicates_are_refused_whatever_their_case_and_marks(tmp_path):
    file = _file(tmp_path, TurnRules(3, 4))
    assert file.offer(0, "What is a river?", True)
    assert not file.offer(1, "what is - a RIVER, and why", True)
    assert file.offer(2, "What is a lake?", True)
    assert not _file(tmp_path, TurnRules(3, 4)).offer(3, "What is a lake really?", True)
    assert file.skips.counts == {"like one before": 1}


def test_unended_and_short_candidates_are_refused(tmp_path):
    file = _file(tmp_path)
    assert not file.offer(0, "What is a river?", False)
    assert not file.offer(1, "What river", True)
    assert not file.offer(2, "... --- ...", True)
    assert file.skips.counts == {"not ended": 1, "too short": 2}
    assert file.following == 3


def test_a_target_that_writes_nothing_usable_is_given_up(tmp_path):
    file = _file(tmp_path)
    with pytest.raises(ConfigError, match="in a row were unusable"):
        any(file.offer(index, "", False) for index in range(1000))
    assert file.following < 1000


def test_turns_with_line_ends_of_unicode_are_read_back(tmp_path):
    assert _file(tmp_path).offer(0, "one\u2028two\x85 three four", True)
    assert len(_file(tmp_path)) == 1


def test_turns_of_other_settings_or_other_files_are_not_continued(tmp_path):
    _file(tmp_path).offer(0, "What is a river?", True)
    before = (tmp_path / "t.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="other settings"):
        _file(tmp_path, run_id="other")
    assert (tmp_path / "t.jsonl").read_bytes() == before
    for text in ('{"q": "no candidate"}\n', "notes\n", "[1]\n", "no line end yet"):
        (tmp_path / "t.jsonl").write_text(text)
        with pytest.raises(ConfigError, match="no synthesised turns"):
            _file(tmp_path)
        assert (tmp_path / "t.jsonl").read_text() == text


def test_the_built_in_list_is_used_and_lists_are_checked(tmp_path):
    assert len(load_openings(default_openings())) > 100
    path = tmp_path / "words.txt"
    path.write_text("# note\n\n  two words \nriver\nriver\n")
    assert load_openings(path) == ("two words", "river")
    path.write_text("# note\n")
    for wrong in (path, tmp_path / "absent.txt"):
        with pytest.raises(ConfigError, match="seed words"):
            load_openings(wrong)


def test_the_command_writes_turns_and_says_what_it_refused(directory, tmp_path, capsys):
    out = tmp_path / "turns.jsonl"
    words = ["synthesise", "--out", str(out), "--target", str(directory), "--count", "3"]
    words += ["--dtype", "fp32", "--threads", "1", "--top-k", "0", "--min-words", "1"]
    assert main([*words, "--max-new", "40"]) == 0
    captured = capsys.readouterr()
    assert "3 turns" in captured.out
    assert "3/3 turns" in captured.err
    with pytest.raises(ConfigError, match="other settings"):
        main([*words, "--max-new", "40", "--seed-words", "none"])
