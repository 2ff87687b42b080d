"""Prompt files of every form become the same conversations; what cannot be used is named."""

import json

import pytest

from protos.errors import ConfigError
from verifier_service.data.conversations import Conversation
from verifier_service.data.prompt_files import read_prompts


def _file(tmp_path, text: str, name: str = "prompts.json"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def _lines(tmp_path, *entries: object):
    return _file(tmp_path, "\n".join(map(json.dumps, entries)) + "\n\n", "prompts.jsonl")


def _said(role: str, text: object) -> dict:
    return {"role": role, "content": text}


def _shared(speaker: str, text: object) -> dict:
    return {"from": speaker, "value": text}


CHAT = [_said("system", "s"), _said("user", "u"), _said("assistant", "old"), _said("user", "v")]
SHAREGPT = [_shared("human", "one"), _shared("gpt", "old"), _shared("human", "two")]


def test_prompts_come_as_questions_turns_messages_or_sharegpt(tmp_path):
    entries = [
        {"q": "q"},
        {"turns": ["t", "more"]},
        {"messages": CHAT},
        {"id": 7, "conversations": SHAREGPT},
    ]
    q, turns, chat, shared = read_prompts([_lines(tmp_path, *entries)]).conversations
    assert (q.messages, q.turns) == ((_said("user", "q"),), ())
    assert (turns.messages, turns.turns) == ((_said("user", "t"),), ("more",))
    assert (chat.messages, chat.turns) == ((_said("system", "s"), _said("user", "u")), ("v",))
    assert (shared.messages, shared.turns) == ((_said("user", "one"),), ("two",))
    assert [c.where for c in (q, shared)] == ["prompts.jsonl line 1", "prompts.jsonl line 4"]


@pytest.mark.parametrize(
    "render",
    [
        lambda entries: json.dumps(entries),
        lambda entries: json.dumps(entries, indent=2),
        lambda entries: "\ufeff" + json.dumps(entries),
        lambda entries: "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n",
        lambda entries: "\n\n".join(json.dumps(entry, indent=1) for entry in entries),
        lambda entries: "\r\n".join(map(json.dumps, entries)),
    ],
    ids=["array", "indented", "bom", "array-by-line", "objects", "crlf"],
)
def test_arrays_objects_and_lines_hold_the_same(tmp_path, render):
    entries = [{"conversations": SHAREGPT}, {"messages": CHAT[1:2]}, {"q": "q"}]
    expected = read_prompts([_lines(tmp_path, *entries)]).conversations
    assert read_prompts([_file(tmp_path, render(entries))]).conversations == expected


def test_a_trailing_answer_is_left_out_and_a_trailing_question_is_asked(tmp_path):
    ended, open_ended = SHAREGPT[:2], SHAREGPT
    path = _lines(tmp_path, {"conversations": ended}, {"conversations": open_ended})
    assert [c.turns for c in read_prompts([path]).conversations] == [(), ("two",)]


def test_content_parts_are_read_as_text(tmp_path):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    (only,) = read_prompts([_lines(tmp_path, {"messages": [_said("user", parts)]})]).conversations
    assert only.messages[0]["content"] == "one\ntwo"


def test_line_ends_of_unicode_do_not_end_a_line_of_json(tmp_path):
    path = _file(tmp_path, '{"q": "one\u2028two\x85three"}\n{"q": "x"}\n')
    assert read_prompts([path]).conversations[0].messages[0]["content"] == "one\u2028two\x85three"


def test_several_files_are_one_run(tmp_path):
    first = _file(tmp_path, '{"q": "a"}\n{"q": "b"}', "first.jsonl")
    second = _file(tmp_path, '[{"q": "b"}, {"q": "c"}]', "second.json")
    prompts = read_prompts([first, second])
    assert [c.messages[0]["content"] for c in prompts.conversations] == ["a", "b", "c"]
    assert [c.index for c in prompts.conversations] == [0, 1, 2]
    assert prompts.num_repeated == 1
    assert len(read_prompts([first, second], limit=2).conversations) == 2


def test_conversations_that_only_begin_alike_are_both_kept(tmp_path):
    path = _lines(tmp_path, {"turns": ["hi", "a"]}, {"turns": ["hi", "b"]}, {"turns": ["hi", "a"]})
    prompts = read_prompts([path])
    assert [c.turns for c in prompts.conversations] == [("a",), ("b",)]
    assert prompts.num_repeated == 1


UNUSABLE = [
    ({"q": " "}, "empty"),
    ({"turns": []}, "empty"),
    ({"turns": ["a", ""]}, "empty"),
    ({"turns": ["a", 3]}, "without text"),
    ({"conversations": []}, "empty"),
    ({"messages": [_said("system", "s")]}, "empty"),
    ({"messages": [_said("user", None)]}, "without text"),
    ({"messages": [_said("user", [{"type": "image_url"}])]}, "without text"),
    ({"messages": ["hi"]}, "with a message that is no object"),
    ({"conversations": SHAREGPT[1:]}, "with roles out of order"),
    ({"conversations": [SHAREGPT[0], SHAREGPT[0]]}, "with roles out of order"),
    ({"messages": [CHAT[1], CHAT[0]]}, "with roles out of order"),
    ({"messages": [_said("tool", "x")]}, "with an unknown role 'tool'"),
    ({"messages": [{"content": "x"}]}, "with an unknown role 'None'"),
]


@pytest.mark.parametrize(("entry", "reason"), UNUSABLE)
def test_an_unusable_conversation_is_skipped_counted_and_named(tmp_path, entry, reason):
    prompts = read_prompts([_lines(tmp_path, {"q": "fine"}, entry, {"q": "also fine"})])
    assert len(prompts.conversations) == 2
    assert prompts.skips.counts == {reason: 1}
    assert prompts.skips.describe() == f"1 {reason} (prompts.jsonl line 2)"


def test_text_that_is_no_unicode_is_skipped(tmp_path):
    path = _file(tmp_path, '{"q": "\\ud800"}\n{"q": "fine"}\n')
    assert read_prompts([path]).skips.counts == {"with text that is no Unicode": 1}


def test_skips_name_the_first_places_and_count_all(tmp_path):
    prompts = read_prompts([_lines(tmp_path, {"q": "fine"}, *[{"turns": []}] * 5)])
    assert len(prompts.skips) == 5
    assert prompts.skips.describe().startswith("5 empty (prompts.jsonl line 2, ")
    assert prompts.skips.describe().endswith(", ...)")


def test_files_without_a_usable_conversation_are_refused_with_the_reasons(tmp_path):
    with pytest.raises(ConfigError, match=r"1 empty .*line 1.*1 with roles out of order"):
        read_prompts([_lines(tmp_path, {"q": ""}, {"conversations": SHAREGPT[1:]})])
    with pytest.raises(ConfigError, match="can be used"):
        read_prompts([_file(tmp_path, " \n")])


@pytest.mark.parametrize(
    "entry", [{}, {"text": "x"}, {"q": 3}, {"turns": "a"}, {"messages": {}}, [1], "q", None]
)
def test_what_is_no_prompt_is_an_error_that_names_file_and_line(tmp_path, entry):
    with pytest.raises(ConfigError, match=r"prompts\.jsonl line 2"):
        read_prompts([_lines(tmp_path, {"q": "fine"}, entry)])
    array = _file(tmp_path, json.dumps([{"q": "fine"}, entry], indent=1))
    line = json.dumps([{"q": "fine"}], indent=1).count("\n") + 1
    with pytest.raises(ConfigError, match=rf"prompts\.json line {line}\b"):
        read_prompts([array])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"q": "a"}\n{"q": "b"\n{"q": "c"}', 2),
        ('{"q": "a"}\nplain text', 2),
        ('[\n{"q": "a"},\n{"q": b}\n]', 3),
        ('[\n{"q": "a"}\n{"q": "b"}\n]', 3),
        ('[\n{"q": "a"},\n', 3),
        ('[\n{"q": "a"}\n', 3),
        ('[\n{"q": "a"}\n]\nmore', 4),
        ('{\n"q": "a"\n}\n{\n"q"\n}', 6),
        ("no prompts", 1),
    ],
)
def test_broken_json_is_an_error_that_names_file_and_line(tmp_path, text, line):
    with pytest.raises(ConfigError, match=rf"prompts\.json line {line}\b"):
        read_prompts([_file(tmp_path, text)])


def test_unreadable_files_are_named(tmp_path):
    binary = tmp_path / "data.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (binary, tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            read_prompts([path])


def test_conversations_travel_as_they_are():
    conversation = Conversation(4, ({"role": "user", "content": "\u00fc\u2028"},), ("a", "b"))
    assert Conversation.from_json(conversation.to_json()) == conversation
