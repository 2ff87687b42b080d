"""Data runs with a tiny target: broken off anywhere, they end in the same file."""

import json

import pytest
import torch

from protos.errors import ConfigError
from tests.tiny import tiny_llama_dir
from verifier_service.data.answer import answer_all
from verifier_service.data.answers_file import read_answers
from verifier_service.data.chat import Chat
from verifier_service.data.cli import build_engine, main
from verifier_service.data.conversations import Sampler, read_conversations
from verifier_service.data.synthesise import synthesise
from verifier_service.engine.loop import Engine


class Killed(Exception):
    """The process ends here."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def chat(directory):
    return Chat(directory)


def _engine(directory, batch: int = 4) -> Engine:
    torch.set_num_threads(1)
    return build_engine(directory, batch, None, "fp32")


SAMPLER = Sampler((0.0, 1.0), 0, 12, 3)


def _prompt_file(path):
    entries = [{"q": f"question number {i}"} for i in range(6)]
    entries.insert(2, {"turns": ["first turn", "second turn", "third turn"]})
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def _kill_after(num_reports: int):
    def report(done: int, total: int, num_tokens: int) -> None:
        nonlocal num_reports
        num_reports -= 1
        if num_reports == 0:
            raise Killed

    return report


def _quiet(done: int, total: int, num_tokens: int) -> None:
    return None


def test_a_run_killed_anywhere_ends_in_the_same_file(directory, chat, tmp_path):
    conversations = read_conversations(_prompt_file(tmp_path / "p.jsonl"))
    whole = tmp_path / "whole.msgpack"
    engine = _engine(directory, batch=4)
    assert answer_all(engine, chat, conversations, SAMPLER, whole, 8, _quiet) == 9
    for place, torn in ((1, 0), (2, 5), (3, 1), (4, 3)):
        part = tmp_path / f"part{place}.msgpack"
        with pytest.raises(Killed):
            answer_all(
                _engine(directory), chat, conversations, SAMPLER, part, 3, _kill_after(place)
            )
        with part.open("r+b") as stream:
            stream.truncate(part.stat().st_size - torn)
        # Another batch size, as on another machine: neighbours never change a text.
        answer_all(_engine(directory, 2), chat, conversations, SAMPLER, part, 4, _quiet)
        assert part.read_bytes() == whole.read_bytes()


def test_later_turns_hold_the_targets_own_answers(directory, chat, tmp_path):
    conversations = read_conversations(_prompt_file(tmp_path / "p.jsonl"))
    out = tmp_path / "a.msgpack"
    answer_all(_engine(directory), chat, conversations, SAMPLER, out, 8, _quiet)
    _, answers = read_answers(out)
    first, second = answers[2], answers[3]
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert len(second.prompt_ids) > len(first.prompt_ids) + 2
    assert all(1 <= len(a.answer_ids) <= 12 for a in answers)


def test_a_finished_run_does_nothing_more(directory, chat, tmp_path):
    conversations = read_conversations(_prompt_file(tmp_path / "p.jsonl"))
    out = tmp_path / "a.msgpack"
    answer_all(_engine(directory), chat, conversations, SAMPLER, out, 8, _quiet)
    before = out.read_bytes()
    answer_all(_engine(directory), chat, conversations, SAMPLER, out, 8, _kill_after(1))
    assert out.read_bytes() == before


def test_other_prompts_do_not_continue_a_file(directory, chat, tmp_path):
    conversations = read_conversations(_prompt_file(tmp_path / "p.jsonl"))
    out = tmp_path / "a.msgpack"
    answer_all(_engine(directory), chat, conversations[:2], SAMPLER, out, 8, _quiet)
    with pytest.raises(ConfigError, match="prompts"):
        answer_all(_engine(directory), chat, conversations[2:], SAMPLER, out, 8, _quiet)


def _write_turns(engine, chat, out, count, report=_quiet):
    return synthesise(engine, chat, Sampler((1.0,), 0, 60, 5), count, out, 6, report)


def test_synthesised_turns_are_distinct_and_resume_exactly(directory, chat, tmp_path, monkeypatch):
    # A random target hardly ever ends a turn of several words; let one word do.
    monkeypatch.setattr("verifier_service.data.synthesise._MIN_WORDS", 1)
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert _write_turns(_engine(directory), chat, whole, 6) == 6
    turns = [json.loads(line)["q"] for line in whole.read_text().splitlines()]
    assert len({t.casefold() for t in turns}) == 6
    with pytest.raises(Killed):
        _write_turns(_engine(directory), chat, part, 6, _kill_after(3))
    with part.open("a") as stream:
        stream.write('{"q": "torn')
    assert _write_turns(_engine(directory, 2), chat, part, 6) == 6
    assert part.read_text() == whole.read_text()
    assert [c.messages[0]["content"] for c in read_conversations(whole)] == turns


def test_the_command_answers_a_prompt_file(directory, tmp_path, capsys):
    prompts = _prompt_file(tmp_path / "p.jsonl")
    out = tmp_path / "out" / "answers.msgpack"
    words = ["answer", str(prompts), "--out", str(out), "--target", str(directory)]
    words += ["--max-new", "4", "--limit", "2", "--dtype", "fp32", "--threads", "1", "--batch", "2"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "2 records" in captured.out
    assert "tokens/s" in captured.err
    header, answers = read_answers(out)
    assert header["records"] == len(answers) == 2


def test_the_user_header_is_what_the_template_writes_before_a_user(chat):
    header, prompt = chat.user_header_ids(), chat.prompt_ids([{"role": "user", "content": "hi"}])
    assert prompt[: len(header)] == header
    assert len(header) < len(prompt)
