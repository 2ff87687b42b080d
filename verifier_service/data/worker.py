"""One replica's share of a divided run: a block of items in, its part out, on an engine of its own.

    items of a block -> generations, continuously batched -> part

Knows neither clusters nor files. Invariant: a part depends on the run's settings and the block
alone, not on who computes it or what was computed before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verifier_service.data.chat import Chat
from verifier_service.data.conversations import Conversation, Sampler
from verifier_service.data.engines import EngineChoice
from verifier_service.data.openings import Openings
from verifier_service.data.parts import Part, pack_part
from verifier_service.data.regenerate import Outcome, answer_job
from verifier_service.data.synthesise import turn_job
from verifier_service.data.writer import Job, run_in_order

Item = tuple[int, str]
"""A conversation's index and its JSON; a candidate's number and "" where turns are written."""


@dataclass(frozen=True, slots=True)
class Work:
    """A run as its replicas see it. openings: None where conversations are answered."""

    run: str
    block_size: int
    sampler: Sampler
    openings: Openings | None = None


class Worker:
    """An engine, and the work it does block by block. Belongs to one thread."""

    def __init__(self, choice: EngineChoice, work: Work) -> None:
        """Loads the target. Raises CheckpointError or ConfigError."""
        self._work = work
        self._window = 2 * choice.batch
        self._chat = Chat(choice.directory())
        self._engine = choice.build()

    def compute(self, items: Sequence[Item]) -> Iterator[tuple[int, bytes]]:
        """(block, packed part) of the blocks that these items make up, whole blocks each."""
        blocks: dict[int, list[Item]] = {}
        for item in items:
            blocks.setdefault(item[0] // self._work.block_size, []).append(item)
        facts = self._engine.target.facts
        for block, own in blocks.items():
            jobs = (self._job(index, text) for index, text in own)
            outcomes = tuple(run_in_order(self._engine, jobs, self._window))
            part = Part(self._work.run, block, facts.digest, facts.fingerprint, outcomes)
            yield block, pack_part(part)

    def _job(self, index: int, text: str) -> Job[Outcome]:
        work = self._work
        if work.openings is not None:
            return turn_job(self._chat, work.openings, work.sampler, index)
        conversation = Conversation.from_json(text)
        return answer_job(self._chat, self._engine.max_context, conversation, work.sampler)
