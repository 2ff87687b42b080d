"""`outrider data compose`: prompts out of templates, word lists and texts the target wrote itself.

    lists:      {topic: [a flood, tea], place: [Japan, Ohio]}
    templates:  {news: ["Write about {topic} in {place}."], summary: ["Summarize: {text}"]}

The result is a prompt file (JSONL with `q`) for `answer`. A slot is filled from the list of its
name; `{text}`, `{text2}` and `{text3}` from the answers of an answers file. Needs no model.
Invariant: the prompts follow from the file, the texts and the seed alone.
"""

import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from protos.errors import ConfigError

TEXT_SLOTS: Final = ("text", "text2", "text3")
_TRIES_PER_PROMPT: Final = 20


class Templates(BaseModel):
    """A templates file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lists: dict[str, tuple[str, ...]] = {}
    templates: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One composed prompt; kind: the group of its template."""

    text: str
    kind: str


def load_templates(path: Path) -> Templates:
    """Raises ConfigError for unreadable YAML, unknown keys and slots that nothing fills."""
    try:
        found = Templates.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"templates {path.name}: {error}") from error
    for template in (t for group in found.templates.values() for t in group):
        for slot in _slots(template):
            if not found.lists.get(slot) and slot not in TEXT_SLOTS:
                raise ConfigError(f"{path.name}: nothing fills {{{slot}}} of {template!r}")
    return found


def compose(
    templates: Templates, counts: Mapping[str, int], texts: Sequence[str], seed: int
) -> list[Prompt]:
    """`counts[kind]` distinct prompts of each kind, in mixed order.

    Raises ConfigError for an unknown kind, for a kind that needs texts where there are none, and
    when a kind has not that many different prompts.
    """
    chance = random.Random(seed)
    prompts: list[Prompt] = []
    for kind, count in counts.items():
        if kind not in templates.templates:
            raise ConfigError(
                f"no templates of kind {kind}; known: {', '.join(templates.templates)}"
            )
        seen: dict[str, None] = {}
        for _ in range(_TRIES_PER_PROMPT * count):
            if len(seen) == count:
                break
            seen.setdefault(_fill(templates, kind, texts, chance))
        if len(seen) < count:
            raise ConfigError(f"kind {kind} gives only {len(seen)} different prompts")
        prompts.extend(Prompt(text, kind) for text in seen)
    chance.shuffle(prompts)
    return prompts


def write_prompts(prompts: Sequence[Prompt], out: Path) -> None:
    """One JSON object a line: `q` and `src`, the kind."""
    lines = [json.dumps({"q": p.text, "src": p.kind}, ensure_ascii=False) for p in prompts]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _fill(templates: Templates, kind: str, texts: Sequence[str], chance: random.Random) -> str:
    template = chance.choice(templates.templates[kind])
    slots = _slots(template)
    wanted = [slot for slot in slots if slot in TEXT_SLOTS]
    if len(wanted) > len(texts):
        raise ConfigError(f"kind {kind} needs texts: name an answers file")
    values = dict(zip(wanted, chance.sample(texts, len(wanted)), strict=True))
    values |= {slot: chance.choice(templates.lists[slot]) for slot in slots if slot not in wanted}
    return template.format(**values)


def _slots(template: str) -> list[str]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"template {template!r}: {error}") from error
    return sorted(set(names))
