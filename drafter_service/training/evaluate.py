"""How good a head is on held-out answers, without a server.

Depth d of a draft from row t is step d-1 of the training-time test: true features up to t, the
head's own feedback after that, ground-truth tokens in between. As long as every earlier token
was right, that is exactly what a chain draft computes, so the chains of a greedy answer can be
replayed from the hits alone: from a row, accept until the first miss, commit one more, go on.

Knows no family: any head that drafts a chain out of features will do (`ttt.ChainHead`).

Shapes: M answer rows of a batch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.training.batches import Batch
from drafter_service.training.ttt import ChainHead, StepOutput, unroll

LOGITS_ROWS = 1024


@dataclass(frozen=True, slots=True)
class HeldOutReport:
    """Argmax agreement by depth over all rows, and replayed chains over greedy answers."""

    accuracy: tuple[float, ...]
    num_rows: tuple[int, ...]
    chain_depth: int
    chain_tau: float
    chain_accepted_by_depth: tuple[float, ...]
    num_rounds: int


@torch.inference_mode()
def agreement(head: ChainHead, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """([depth, M] the best guess is the target's choice, [depth, M] there is such a choice)."""
    agreed_DM = torch.zeros(depth, batch.num_rows, dtype=torch.bool)
    counted_DM = torch.zeros(depth, batch.num_rows, dtype=torch.bool)

    def after(output: StepOutput) -> None:
        choices_M = batch.choices[output.target_rows]
        counted_DM[output.step] = output.valid & (choices_M >= 0)
        guesses_M = best_ids(head, output.y)
        agreed_DM[output.step] = (guesses_M == choices_M) & counted_DM[output.step]

    unroll(head, batch, depth, after)
    return agreed_DM, counted_DM


def best_ids(head: ChainHead, y_NC: Tensor) -> Tensor:
    """[N] target ids of the head's best guess."""
    starts = range(0, len(y_NC), LOGITS_ROWS)
    best = [head.logits(y_NC[start : start + LOGITS_ROWS]).max(-1).indices for start in starts]
    return head.target_ids[torch.cat(best)]


def evaluate(
    head: ChainHead,
    batches: Iterable[tuple[Batch, tuple[bool, ...]]],
    depth: int = 5,
    chain_depth: int = 4,
    report: Callable[[str], None] | None = None,
) -> HeldOutReport:
    """`batches` yields a batch and, per record of it, whether its answer is greedy.

    Accuracy counts rows whose target exists; a choice outside the draft vocabulary is a miss.
    """
    hits = [0] * depth
    counts = [0] * depth
    accepted = [0] * (chain_depth + 1)
    for batch, greedy in batches:
        agreed, counted = agreement(head, batch, depth)
        for step in range(depth):
            hits[step] += int(agreed[step].sum())
            counts[step] += int(counted[step].sum())
        for rows, is_greedy in zip(batch.records, greedy, strict=True):
            if is_greedy:
                num_rows = int(counted[0, rows.answer].sum())  # an end of text is no anchor
                replay_chains(agreed[:chain_depth, rows.answer][:, :num_rows], accepted)
        if report is not None:
            report(f"held-out: {counts[0]} rows, accuracy {hits[0] / max(1, counts[0]):.3f}")
    rounds = sum(accepted)
    committed = sum((num + 1) * times for num, times in enumerate(accepted))
    return HeldOutReport(
        accuracy=tuple(h / max(1, c) for h, c in zip(hits, counts, strict=True)),
        num_rows=tuple(counts),
        chain_depth=chain_depth,
        chain_tau=committed / max(1, rounds),
        chain_accepted_by_depth=tuple(
            sum(accepted[d:]) / max(1, rounds) for d in range(1, chain_depth + 1)
        ),
        num_rounds=rounds,
    )


def replay_chains(agreed_DR: Tensor, accepted: list[int]) -> None:
    """Walk one answer: add 1 to `accepted[k]` for every round that accepted k tokens.

    `agreed_DR[d, r]`: whether depth d + 1 of a draft from row r names the target's choice.
    """
    depth, num_rows = agreed_DR.shape
    prefix = agreed_DR.to(torch.int64).cumprod(0).sum(0).tolist()
    row = 0
    while row < num_rows:
        num_accepted = min(int(prefix[row]), depth)
        accepted[num_accepted] += 1
        row += num_accepted + 1
