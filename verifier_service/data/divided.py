"""A run divided into blocks that somebody computes: parts come in any order, the file in one.

    blocks still missing -> compute -> parts folder -> in block order -> the one file

Knows neither engines nor clusters: `compute` is asked for blocks and gives packed parts. A part is
on disk before it counts, so a run that is killed at any moment computes again only what was under
way. Invariant: the finished file is the one that a single engine writes.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from verifier_service.data.answers_file import read_header
from verifier_service.data.block_order import BlockOrder, Compute
from verifier_service.data.chat import Chat
from verifier_service.data.conversations import Conversation, Sampler, digest_of
from verifier_service.data.engines import TargetSummary
from verifier_service.data.openings import Openings
from verifier_service.data.parts import PartsFolder
from verifier_service.data.regenerate import AnswersRun, Report, Totals, answers_header
from verifier_service.data.synthesise import TurnsRun
from verifier_service.data.worker import Item, Work

_CANDIDATES_PER_TURN: Final = 16
"""How many candidates are handed out for each turn that is missing, before more are."""


def parts_path(out: Path) -> Path:
    """Where the parts of a file lie until it is whole."""
    return out.with_name(out.name + ".parts")


def answers_work(
    target: TargetSummary, conversations: Sequence[Conversation], sampler: Sampler, block_size: int
) -> Work:
    """The work of answering these conversations, block_size of them a part."""
    facts = [target.digest, target.max_context, sampler.describe(), digest_of(conversations)]
    return Work(_run_id([*facts, block_size]), block_size, sampler)


def turns_work(run: TurnsRun, sampler: Sampler, openings: Openings, block_size: int) -> Work:
    """The work of writing candidates for the turns of `run`, block_size of them a part."""
    return Work(_run_id([run.run_id, block_size]), block_size, sampler, openings)


def regenerate_divided(
    chat: Chat,
    target: TargetSummary,
    conversations: Sequence[Conversation],
    work: Work,
    out: Path,
    compute: Compute,
    report: Report,
) -> Totals:
    """As `regenerate`, with parts that `compute` makes.

    Raises ConfigError when the file or the parts belong to another run, or when parts come from
    targets that do not compute alike.
    """

    def begun(fingerprint: str) -> AnswersRun:
        header = answers_header(
            target.name, target.vocab_size, target.digest, fingerprint, conversations, work.sampler
        )
        return AnswersRun(out, header, chat, target.max_context, conversations, work.sampler)

    size, total = work.block_size, len(conversations)
    fingerprint = _fingerprint_of(out)
    run = begun(fingerprint) if fingerprint else None
    done = run.done if run is not None else 0
    order = BlockOrder(
        PartsFolder(parts_path(out), work.run),
        target.digest,
        fingerprint,
        compute,
        lambda block: _conversation_items(conversations[block * size : (block + 1) * size]),
    )
    blocks = range(done // size, -(-total // size)) if done < total else range(0)

    def on_part(num_items: int, num_tokens: int) -> None:
        report(max(done // size * size + num_items, done), total, num_tokens)

    with closing(order.parts(blocks, on_part)) as parts:
        for part in parts:
            run = run if run is not None else begun(part.fingerprint)
            for outcome in part.outcomes:
                if outcome.index >= run.done:
                    run.append(outcome)
    assert run is not None, "without a file there is at least one block"
    totals = run.finish()
    order.folder.remove()
    return totals


def synthesise_divided(
    run: TurnsRun, target: TargetSummary, work: Work, count: int, compute: Compute, report: Report
) -> int:
    """As `synthesise`, with candidates that `compute` makes; returns how many turns there are."""
    size = work.block_size
    order = BlockOrder(
        PartsFolder(parts_path(run.out), work.run),
        target.digest,
        "",
        compute,
        lambda block: [(index, "") for index in range(block * size, (block + 1) * size)],
    )
    while len(run.file) < count:
        first = run.file.following // size
        missing = count - len(run.file)
        blocks = range(first, first + 1 + _CANDIDATES_PER_TURN * missing // size)
        with closing(
            order.parts(blocks, lambda _, tokens: report(len(run.file), count, tokens))
        ) as parts:
            for part in parts:
                for outcome in part.outcomes:
                    if len(run.file) < count:
                        run.offer(outcome)
                if len(run.file) >= count:
                    break
    report(len(run.file), count, order.num_tokens)
    order.folder.remove()
    return len(run.file)


def _conversation_items(conversations: Sequence[Conversation]) -> list[Item]:
    return [(conversation.index, conversation.to_json()) for conversation in conversations]


def _fingerprint_of(out: Path) -> str:
    """Of the target that began the file; "" when there is no file yet."""
    if not out.exists() or not out.stat().st_size:
        return ""
    return str(read_header(out).get("fingerprint", "none"))


def _run_id(facts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
