"""Data runs with a tiny target: broken off anywhere, they end in the same file."""

import json

import msgpack
import pytest
import torch

from protos.errors import ConfigError
from tests.tiny import tiny_llama_dir
from verifier_service.data.answers_file import read_answers
from verifier_service.data.chat import Chat
from verifier_service.data.cli import main
from verifier_service.data.conversations import Conversation, Sampler
from verifier_service.data.engines import build_engine
from verifier_service.data.prompt_files import read_prompts
from verifier_service.data.regenerate import regenerate
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


def _conversations(path) -> list[Conversation]:
    """Seven conversations, nine answers, in three files of three forms."""
    shared = [("human", "first"), ("gpt", "old"), ("human", "second"), ("gpt", "old")]
    sharegpt = [
        {"id": "a", "conversations": [{"from": f, "value": v} for f, v in shared]},
        {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
    ]
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    questions = [{"q": f"question number {i}"} for i in range(3)]
    (path / "q.jsonl").write_text("\n".join(map(json.dumps, [{"turns": ["1", "2"]}, *questions])))
    (path / "s.json").write_text(json.dumps(sharegpt, indent=1))
    (path / "c.jsonl").write_text(json.dumps(chat))
    return read_prompts([path / "q.jsonl", path / "s.json", path / "c.jsonl"]).conversations


def _run(engine, chat, conversations, out, window=8, report=None) -> int:
    done = regenerate(engine, chat, conversations, SAMPLER, out, window, report or _quiet)
    return done.num_records


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
    conversations = _conversations(tmp_path)
    whole = tmp_path / "whole.msgpack"
    assert _run(_engine(directory), chat, conversations, whole) == 9
    for place, torn in ((1, 0), (2, 5), (3, 1), (5, 3), (6, 0)):
        part = tmp_path / f"part{place}.msgpack"
        with pytest.raises(Killed):
            _run(_engine(directory), chat, conversations, part, 3, _kill_after(place))
        with part.open("r+b") as stream:
            stream.truncate(part.stat().st_size - torn)
        # Another batch size, as on another machine: neighbours never change a text.
        _run(_engine(directory, 2), chat, conversations, part, 4)
        assert part.read_bytes() == whole.read_bytes()


def test_a_file_cut_at_any_byte_resumes_to_the_same_file(directory, chat, tmp_path):
    conversations = _conversations(tmp_path)[:2]
    whole, part = tmp_path / "whole.msgpack", tmp_path / "part.msgpack"
    engine = _engine(directory)
    _run(engine, chat, conversations, whole)
    with pytest.raises(Killed):
        _run(_engine(directory), chat, conversations, part, 8, _kill_after(2))
    data = part.read_bytes()
    header = len(msgpack.packb(read_answers(part)[0]))
    for size in range(header, len(data), 13):
        part.write_bytes(data[:size])
        _run(engine, chat, conversations, part)
        assert part.read_bytes() == whole.read_bytes()


def test_later_turns_hold_the_targets_own_answers(directory, chat, tmp_path):
    conversations = _conversations(tmp_path)
    shared = conversations[4]
    assert shared.turns == ("second",)
    out = tmp_path / "a.msgpack"
    _run(_engine(directory), chat, conversations, out)
    _, answers = read_answers(out)
    first, second = answers[5], answers[6]
    own = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": chat.text(first.answer_ids)},
        {"role": "user", "content": "second"},
    ]
    assert first.prompt_ids == chat.prompt_ids(own[:1])
    assert second.prompt_ids == chat.prompt_ids(own)
    assert all(1 <= len(a.answer_ids) <= 12 for a in answers)


def test_temperatures_are_mixed_over_conversations(directory, chat, tmp_path):
    conversations = _conversations(tmp_path)
    cold, hot = tmp_path / "cold.msgpack", tmp_path / "hot.msgpack"
    _run(_engine(directory), chat, conversations, cold)
    other = Sampler((0.0, 1.0), 0, 12, 4)
    regenerate(_engine(directory), chat, conversations, other, hot, 8, _quiet)
    pairs = zip(read_answers(cold)[1], read_answers(hot)[1], strict=True)
    same = [a.answer_ids == b.answer_ids for a, b in pairs]
    # Conversations 0, 2, 4, 6 are greedy whatever the seed; the first and fifth have two turns.
    assert [same[i] for i in (0, 1, 3, 5, 6, 8)] == [True] * 6
    assert not any(same[i] for i in (2, 4, 7))


def test_a_finished_run_does_nothing_more(directory, chat, tmp_path):
    conversations = _conversations(tmp_path)
    out = tmp_path / "a.msgpack"
    _run(_engine(directory), chat, conversations, out)
    before = out.read_bytes()
    _run(_engine(directory), chat, conversations, out, 8, _kill_after(1))
    assert out.read_bytes() == before


def test_other_prompts_do_not_continue_a_file(directory, chat, tmp_path):
    conversations = _conversations(tmp_path)
    out = tmp_path / "a.msgpack"
    _run(_engine(directory), chat, conversations[:2], out)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="prompts"):
        _run(_engine(directory), chat, conversations[2:], out)
    assert out.read_bytes() == before


def test_prompts_too_long_for_the_context_are_skipped_and_named(directory, chat, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        "\n".join(json.dumps({"turns": [text, "and then?"]}) for text in ("a", "long " * 99, "b"))
    )
    conversations = read_prompts([tmp_path / "p.jsonl"]).conversations
    engine = build_engine(directory, 2, None, "fp32", max_context=100)
    out = tmp_path / "a.msgpack"
    for _ in range(2):  # written, then found whole
        totals = regenerate(engine, chat, conversations, SAMPLER, out, 4, _quiet)
        assert totals.num_records == 4
        assert totals.skips.describe() == "1 longer than the context (p.jsonl line 2)"
    with pytest.raises(ConfigError, match="1 longer than the context"):
        _run(engine, chat, [Conversation(0, conversations[1].messages)], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_conversation_ends_where_its_context_is_full(directory, chat, tmp_path):
    turns = ("go on", "x" * 200, "never asked")
    conversations = [Conversation(0, ({"role": "user", "content": "a"},), turns)]
    conversations += [Conversation(1, ({"role": "user", "content": "b"},))]
    engine = build_engine(directory, 2, None, "fp32", max_context=128)
    out = tmp_path / "a.msgpack"
    assert _run(engine, chat, conversations, out) == 3
    before = out.read_bytes()
    assert _run(engine, chat, conversations, out, 8, _kill_after(1)) == 3
    assert out.read_bytes() == before


def test_the_command_answers_files_of_several_forms(directory, tmp_path, capsys):
    _conversations(tmp_path)
    with (tmp_path / "q.jsonl").open("a") as stream:
        stream.write('\n{"q": ""}\n{"q": "question number 1"}')
    out = tmp_path / "out" / "answers.msgpack"
    words = [str(tmp_path / name) for name in ("q.jsonl", "s.json")]
    words += ["--out", str(out), "--target", str(directory)]
    words += ["--max-new", "4", "--limit", "5", "--dtype", "fp32", "--threads", "1", "--batch", "2"]
    assert main(["regenerate", *words]) == 0
    captured = capsys.readouterr()
    assert "7 records of 5 conversations" in captured.out
    assert "skipped: 1 empty (q.jsonl line 5)" in captured.out
    assert "1 repeated" in captured.out
    assert "tokens/s" in captured.err
    assert "left" in captured.err
    header, answers = read_answers(out)
    assert header["records"] == len(answers) == 7
    before = out.read_bytes()
    assert main(["answer", *words]) == 0
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "--batch"),
        (["--temperatures", "3"], "between 0 and 2"),
        (["--max-context", "999999"], "context"),
        (["--device", "cuda"], "cuda"),
    ],
)
def test_options_that_cannot_be_used_are_refused(directory, tmp_path, words, message):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    (tmp_path / "q.jsonl").write_text('{"q": "a"}')
    base = [str(tmp_path / "q.jsonl"), "--out", str(tmp_path / "o"), "--target", str(directory)]
    with pytest.raises(ConfigError, match=message):
        main(["regenerate", *base, *words])
    assert not (tmp_path / "o").exists()


def test_the_user_header_is_what_the_template_writes_before_a_user(chat):
    header, prompt = chat.user_header_ids(), chat.prompt_ids([{"role": "user", "content": "hi"}])
    assert prompt[: len(header)] == header
    assert len(header) < len(prompt)
