"""Conversations and their sampling: what is to be answered, in which order, with which seeds.

Knows no files and no engine. Invariant: an answer's sampling depends on the run's settings, the
conversation's index and the turn alone, so a resumed or divided run draws the same answers.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.params import SamplingParams

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages given, and user turns to come after each answer.

    index: place among the run's conversations. where: file and line, for people.
    """

    index: int
    messages: tuple[Message, ...]
    turns: tuple[str, ...] = ()
    where: str = field(default="", compare=False)

    def to_json(self) -> str:
        """What a replica needs of it; `from_json` reads it."""
        return json.dumps([self.index, self.messages, self.turns])

    @staticmethod
    def from_json(text: str) -> "Conversation":
        """The conversation that `to_json` wrote; `where` is left behind."""
        index, messages, turns = json.loads(text)
        return Conversation(index, tuple(messages), tuple(turns))


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

    def describe(self) -> str:
        """For headers: everything that decides the sampling."""
        temperatures = ", ".join(f"{t:g}" for t in self.temperatures)
        sampling = f"temperatures {temperatures} in turn, top-k {self.top_k}, seed {self.seed}"
        return f"{sampling}, at most {self.max_tokens} tokens"


def digest_of(conversations: Iterable[Conversation]) -> str:
    """Identifies the prompts of a run, for its header."""
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(json.dumps([conversation.messages, conversation.turns]).encode())
    return digest.hexdigest()[:16]
