"""Prompt files and conversations: what is to be answered, in which order, with which sampling.

Knows no engine. A line holds `q`, `turns` (user turns, answered one after another) or `messages`
(answered once). Invariant: conversations depend on the file and the settings alone, so a resumed
run meets the same ones in the same order.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from protos.errors import ConfigError
from protos.params import SamplingParams

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages given, and user turns to come after each answer. index: place in the file."""

    index: int
    messages: tuple[Message, ...]
    turns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampler:
    """Mixed temperatures: a repeating pattern over conversations. seed: of the whole run."""

    temperatures: tuple[float, ...]
    top_k: int
    max_tokens: int
    seed: int

    def params(self, index: int, turn: int) -> SamplingParams:
        """Sampling of one answer; its seed depends on the conversation and turn alone."""
        digest = hashlib.sha256(f"{self.seed}:{index}:{turn}".encode()).digest()
        return SamplingParams(
            temperature=self.temperatures[index % len(self.temperatures)],
            top_k=self.top_k,
            seed=int.from_bytes(digest[:7], "little"),
            max_tokens=self.max_tokens,
        )


def read_conversations(path: Path, limit: int | None = None) -> list[Conversation]:
    """Conversations of a JSONL file, repeated first turns left out.

    Raises ConfigError naming the line that cannot be used.
    """
    found: list[Conversation] = []
    seen: set[str] = set()
    for number, line in _lines(path):
        messages, turns = _parse(line, f"{path.name} line {number}")
        key = json.dumps(messages, sort_keys=True)
        if key in seen:
            continue
        seen.add(key)
        found.append(Conversation(len(found), messages, turns))
        if limit is not None and len(found) == limit:
            break
    if not found:
        raise ConfigError(f"{path.name} holds no prompts")
    return found


def digest_of(conversations: Iterable[Conversation]) -> str:
    """Identifies the prompts of a run, for its header."""
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(json.dumps([conversation.messages, conversation.turns]).encode())
    return digest.hexdigest()[:16]


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read as UTF-8 text") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path.name} line {number} is no JSON") from error
        if not isinstance(entry, dict):
            raise ConfigError(f"{path.name} line {number} is no JSON object")
        yield number, entry


def _parse(entry: Mapping[str, object], where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    question, turns, messages = (entry.get(key) for key in ("q", "turns", "messages"))
    if isinstance(question, str) and question.strip():
        return (_user(question),), ()
    if isinstance(turns, list) and turns and all(isinstance(t, str) and t.strip() for t in turns):
        return (_user(turns[0]),), tuple(turns[1:])
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return tuple({"role": m["role"], "content": m["content"]} for m in messages), ()
    raise ConfigError(f"{where} needs q (text), turns (texts) or messages (role and content)")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
