"""`outrider data synthesise`: user turns that the target writes after its template's user header.

The result is a prompt file (JSONL with `q`) for `answer`. Knows nothing of answers. Resumes by
line: every line names the candidate it came from, and a torn last line is dropped.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

from protos.errors import ConfigError
from verifier_service.data.chat import Chat
from verifier_service.data.conversations import Sampler
from verifier_service.data.writer import Ask, Job, run_in_order
from verifier_service.engine.loop import Engine

_MIN_WORDS = 3
_MAX_TRIES_PER_TURN = 50


def synthesise(
    engine: Engine,
    chat: Chat,
    sampler: Sampler,
    count: int,
    out: Path,
    window: int,
    report: Callable[[int, int, int], None],
) -> int:
    """Append user turns until the file holds `count`; returns how many it holds.

    A turn is taken when the target ended it by itself, it has at least three words, and no turn
    before it says the same. Raises ConfigError when the target keeps producing nothing usable.
    """
    turns, following = _read(out)
    seen = {_key(text) for text in turns}
    header_ids = chat.user_header_ids()
    ends = frozenset(engine.target.facts.eos_token_ids)
    tries = num_tokens = 0
    if len(turns) >= count:
        return len(turns)
    jobs = (_turn(header_ids, sampler, index) for index in itertools.count(following))
    for index, ids in run_in_order(engine, jobs, window):
        tries += 1
        num_tokens += len(ids)
        text = chat.text(ids).strip()
        if ids and ids[-1] in ends and len(text.split()) >= _MIN_WORDS and _key(text) not in seen:
            seen.add(_key(text))
            turns.append(text)
            with out.open("a", encoding="utf-8") as stream:
                line = {"q": text, "src": "synthesised", "candidate": index}
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            tries = 0
            report(len(turns), count, num_tokens)
        if len(turns) >= count:
            break
        if tries >= _MAX_TRIES_PER_TURN:
            raise ConfigError(f"{tries} turns in a row were unusable: is this a chat model?")
    return len(turns)


def _turn(
    header_ids: tuple[int, ...], sampler: Sampler, index: int
) -> Job[tuple[int, tuple[int, ...]]]:
    ids = yield Ask(header_ids, sampler.params(index, 0))
    return index, ids


def _key(text: str) -> str:
    return " ".join(text.casefold().split())


def _read(path: Path) -> tuple[list[str], int]:
    """Turns of an earlier run and the candidate to go on with; cuts off a torn last line."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return [], 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with path.open("r+b") as stream:
            stream.truncate(len(whole))
    turns: list[str] = []
    following = 0
    for line in whole.decode("utf-8").splitlines():
        try:
            entry = json.loads(line)
            turns.append(str(entry["q"]))
            following = int(entry["candidate"]) + 1
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path.name} exists and holds no synthesised turns") from error
    return turns, following
