"""Prompt files as conversations: questions, turns, chat messages and ShareGPT exports.

    {"q": "..."}                                                  one user turn
    {"turns": ["...", "..."]}                                     user turns
    {"messages": [{"role": "user", "content": "..."}, ...]}       chat messages
    {"conversations": [{"from": "human", "value": "..."}, ...]}   ShareGPT

A file is a JSON array of such objects, one object, or JSONL; which one is seen from its text. The
user's turns are kept, and a system text before them; whatever an assistant said is left out, for
the target says it anew. What is no such object is an error that names file and line. An object of
the right form whose conversation cannot be used (empty, roles out of order, no text) is skipped
and counted. Invariant: the result follows from the files and the limit alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protos.errors import ConfigError
from verifier_service.data.conversations import Conversation, Message
from verifier_service.data.json_entries import read_entries
from verifier_service.data.skips import Skips

_ROLES: Final = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
}
_FORMS: Final = "q (text), turns (texts), messages (role, content) or conversations (from, value)"
_EMPTY: Final = "empty"
_NO_TEXT: Final = "without text"

Dialogue = tuple[tuple[Message, ...], tuple[str, ...]]
"""Messages up to the first user turn, and the user turns after it."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the files hold. num_repeated: conversations left out because they came before."""

    conversations: list[Conversation]
    skips: Skips
    num_repeated: int


class _Unusable(Exception):
    """A conversation that is skipped; the text is the reason."""


def read_prompts(paths: Sequence[Path], limit: int | None = None) -> Prompts:
    """Conversations of the files in their order, repeated ones left out; at most `limit`.

    Raises ConfigError for what is no prompt file, naming file and line, and when no conversation
    can be used.
    """
    found: list[Conversation] = []
    skips = Skips()
    seen: set[str] = set()
    num_repeated = 0
    for where, entry in (pair for path in paths for pair in read_entries(path)):
        try:
            messages, turns = _dialogue(entry, where)
        except _Unusable as unusable:
            skips.add(str(unusable), where)
            continue
        key = json.dumps([messages, turns], sort_keys=True)
        if key in seen:
            num_repeated += 1
            continue
        seen.add(key)
        found.append(Conversation(len(found), messages, turns, where))
        if limit is not None and len(found) == limit:
            break
    if not found:
        names = ", ".join(path.name for path in paths)
        raise ConfigError(f"no conversation of {names} can be used: {skips.describe() or 'empty'}")
    return Prompts(found, skips, num_repeated)


def _dialogue(entry: object, where: str) -> Dialogue:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is no JSON object; expected one with {_FORMS}")
    key = next((key for key in ("q", "turns", "messages", "conversations") if key in entry), None)
    if key is None:
        raise ConfigError(f"{where} needs {_FORMS}")
    value: object = entry[key]
    if not isinstance(value, str if key == "q" else list):
        raise ConfigError(f"{where}: {key} must be a {'text' if key == 'q' else 'list'}")
    if key == "q":
        return _of_turns([value])
    assert isinstance(value, list)
    return _of_turns(value) if key == "turns" else _of_messages(value)


def _of_turns(turns: Sequence[object], before: tuple[Message, ...] = ()) -> Dialogue:
    if not turns:
        raise _Unusable(_EMPTY)
    texts = [_text(turn) for turn in turns]
    if not all(text.strip() for text in texts):
        raise _Unusable(_EMPTY)
    return (*before, {"role": "user", "content": texts[0]}), tuple(texts[1:])


def _of_messages(messages: Sequence[object]) -> Dialogue:
    """User turns of messages that alternate, a system text first where there is one."""
    spoken = [_role_and_content(message) for message in messages]
    before: tuple[Message, ...] = ()
    if spoken and spoken[0][0] == "system":
        before = ({"role": "system", "content": _text(spoken[0][1])},)
        spoken = spoken[1:]
    for place, (role, _) in enumerate(spoken):
        if role != ("user", "assistant")[place % 2]:
            raise _Unusable("with roles out of order")
    return _of_turns([content for _, content in spoken[::2]], before)


def _role_and_content(message: object) -> tuple[str, object]:
    if not isinstance(message, Mapping):
        raise _Unusable("with a message that is no object")
    speaker = message.get("from", message.get("role"))
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise _Unusable(f"with an unknown role {str(speaker)[:20]!r}")
    return role, message.get("value", message.get("content"))


def _text(value: object) -> str:
    """A text, or the texts of a list of content parts."""
    if isinstance(value, list):
        return "\n".join(_parts(value))
    if not isinstance(value, str):
        raise _Unusable(_NO_TEXT)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _Unusable("with text that is no Unicode") from error
    return value


def _parts(parts: Sequence[object]) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise _Unusable(_NO_TEXT)
        yield _text(part["text"])
