"""Questions for benchmarks: Spec-Bench's JSONL, first turns, a few from every subtask.

Knows no model. MT-bench's eight categories are one subtask. The choice depends on the file alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protos.errors import ConfigError

SUBTASKS: Final = ("translation", "summarization", "qa", "math_reasoning", "rag")
MT_BENCH: Final = "mt_bench"


@dataclass(frozen=True, slots=True)
class Question:
    """A user's first turn and where it comes from."""

    subtask: str
    category: str
    text: str


def read_questions(path: Path) -> list[Question]:
    """All questions of a JSONL file with `turns` or `q`, and a `category` where there is one.

    Raises: ConfigError naming the line.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read as UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["turns"][0] if "turns" in entry else entry["q"]
            category = str(entry.get("category", "prompts"))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path.name} line {number} holds neither turns nor q") from error
        spec_bench = "category" in entry
        subtask = category if category in SUBTASKS or not spec_bench else MT_BENCH
        found.append(Question(subtask, category, str(text)))
    if not found:
        raise ConfigError(f"{path.name} holds no questions")
    return found


def per_subtask(questions: Sequence[Question], count: int) -> list[Question]:
    """At most `count` of every subtask, taken in turn from its categories, in file order."""
    chosen: list[Question] = []
    for subtask in dict.fromkeys(q.subtask for q in questions):
        members = [q for q in questions if q.subtask == subtask]
        categories = dict.fromkeys(q.category for q in members)
        queues = [[q for q in members if q.category == c] for c in categories]
        taken: list[Question] = []
        while len(taken) < count and any(queues):
            taken += [queue.pop(0) for queue in queues if queue][: count - len(taken)]
        chosen += taken
    return chosen
