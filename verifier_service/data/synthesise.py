"""`outrider data synthesise`: user turns that the target writes after its template's user header.

    header | opening -> the rest of the turn          opening: drawn from a list, or nothing

Every candidate has its own opening, temperature and seed. Knows nothing of answers, nor of which
candidates are taken. Invariant: a candidate follows from the run's settings and its number alone.
"""

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

from verifier_service.data.answers_file import Answer
from verifier_service.data.chat import Chat
from verifier_service.data.conversations import Sampler
from verifier_service.data.openings import Openings, digest_of
from verifier_service.data.regenerate import Outcome
from verifier_service.data.turns_file import TurnRules, TurnsFile
from verifier_service.data.writer import Ask, Job, run_in_order
from verifier_service.engine.loop import Engine


class TurnsRun:
    """The turns file of one run: takes outcomes of candidates in order."""

    def __init__(
        self,
        out: Path,
        chat: Chat,
        ends: frozenset[int],
        digest: str,
        sampler: Sampler,
        openings: Openings,
        rules: TurnRules,
    ) -> None:
        """ends: ids that end a turn. digest: of the target. Raises ConfigError as TurnsFile."""
        self.out = out
        self._chat = chat
        self._ends = ends
        self._openings = openings
        self.run_id = turns_run_id(digest, sampler, openings, rules)
        self.file = TurnsFile(out, self.run_id, rules)

    def offer(self, outcome: Outcome) -> bool:
        """True when the candidate was taken; those before `file.following` never are."""
        if outcome.index < self.file.following:
            return False
        (turn,) = outcome.answers
        ids = turn.answer_ids
        text = self._openings.of(outcome.index) + self._chat.text(ids)
        return self.file.offer(outcome.index, text, bool(ids) and ids[-1] in self._ends)


def synthesise(
    engine: Engine,
    run: TurnsRun,
    chat: Chat,
    sampler: Sampler,
    openings: Openings,
    count: int,
    window: int,
    report: Callable[[int, int, int], None],
) -> int:
    """Offer candidates until the file holds `count` turns; returns how many it holds.

    Raises ConfigError when the target keeps producing nothing usable.
    """
    if len(run.file) >= count:
        return len(run.file)
    jobs = (
        turn_job(chat, openings, sampler, index) for index in itertools.count(run.file.following)
    )
    num_tokens = 0
    for outcome in run_in_order(engine, jobs, window):
        num_tokens += outcome.num_tokens
        if run.offer(outcome):
            report(len(run.file), count, num_tokens)
        if len(run.file) >= count:
            break
    return len(run.file)


def turn_job(chat: Chat, openings: Openings, sampler: Sampler, index: int) -> Job[Outcome]:
    """One candidate: what follows the user header and the opening."""
    header_ids = chat.user_header_ids(openings.of(index))
    ids = yield Ask(header_ids, sampler.params(index, 0))
    return Outcome(index, (Answer(header_ids, ids),))


def turns_run_id(digest: str, sampler: Sampler, openings: Openings, rules: TurnRules) -> str:
    """Identifies what decides the turns: target, sampling, openings and rules."""
    words = [sampler.describe(), digest_of(openings.texts), openings.seed]
    taken = [rules.min_words, rules.num_distinct_words]
    return hashlib.sha256(json.dumps([digest, *words, *taken]).encode()).hexdigest()[:16]
