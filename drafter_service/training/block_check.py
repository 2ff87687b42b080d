"""How good a block drafter is on held-out answers, without a server.

Every answer row is made an anchor, its context the true features, as when it drafts. Whether draft
j names the target's own choice after the recorded tokens is all that replaying needs: as long as
the drafts before were right, those tokens are the draft's. Scored with the target's whole lm_head.

Shapes: M answer rows of a batch, X anchors, J drafts of a block, N rows.
"""

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from drafter_service.dflash.net import BlockNet
from drafter_service.training.batches import Batch
from drafter_service.training.block_targets import draft_rows
from drafter_service.training.blocks import run_blocks
from drafter_service.training.evaluate import replay_chains
from drafter_service.training.recipe import HeldOut

ANCHORS_PER_PASS = 256
LOGITS_ROWS = 256


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Agreement by draft over all rows, and replayed chains over greedy answers."""

    accuracy: tuple[float, ...]
    tau: float
    accepted_by_depth: tuple[float, ...]
    num_rows: int
    num_rounds: int


def check_blocks(
    net: BlockNet, batches: Iterable[tuple[Batch, tuple[bool, ...]]], most: int | None
) -> HeldOut:
    """At most `most` batches, each with whether its records are greedy answers."""
    num_drafts = net.config.num_drafts
    hits, counts = torch.zeros(num_drafts), torch.zeros(num_drafts)
    accepted = [0] * (num_drafts + 1)
    for batch, greedy in itertools.islice(batches, most):
        agreed_JM, counted_JM = agreement(net, batch)
        hits += agreed_JM.sum(1)
        counts += counted_JM.sum(1)
        for rows, is_greedy in zip(batch.records, greedy, strict=True):
            if is_greedy:
                num_rows = int(counted_JM[0, rows.answer].sum())  # an end of text is no anchor
                replay_chains(agreed_JM[:, rows.answer][:, :num_rows], accepted)
    rounds = sum(accepted)
    tau = sum((num + 1) * times for num, times in enumerate(accepted)) / max(1, rounds)
    report = BlockReport(
        accuracy=tuple((hits / counts.clamp_min(1)).tolist()),
        tau=tau,
        accepted_by_depth=tuple(
            sum(accepted[depth:]) / max(1, rounds) for depth in range(1, num_drafts + 1)
        ),
        num_rows=int(counts[0]),
        num_rounds=rounds,
    )
    return HeldOut(tau, asdict(report))


@torch.inference_mode()
def agreement(net: BlockNet, batch: Batch) -> tuple[Tensor, Tensor]:
    """([J, M] the best draft is the target's choice, [J, M] there is such a choice)."""
    num_drafts = net.config.num_drafts
    agreed_MJ = torch.zeros(batch.num_rows, num_drafts, dtype=torch.bool)
    counted_MJ = torch.zeros(batch.num_rows, num_drafts, dtype=torch.bool)
    for first in range(0, batch.num_rows, ANCHORS_PER_PASS):
        anchors_X = torch.arange(first, min(first + ANCHORS_PER_PASS, batch.num_rows))
        drafts = draft_rows(batch, anchors_X, num_drafts)
        choices_XJ = batch.choices[drafts.rows]
        counted_XJ = drafts.exists & (choices_XJ >= 0)
        hidden_XBC = run_blocks(net, batch, anchors_X)[:, net.config.first_draft_slot :]
        best_N = best_ids(net, hidden_XBC[counted_XJ])
        agreed_XJ = torch.zeros_like(counted_XJ)
        agreed_XJ[counted_XJ] = best_N == choices_XJ[counted_XJ]
        agreed_MJ[anchors_X], counted_MJ[anchors_X] = agreed_XJ, counted_XJ
    return agreed_MJ.T, counted_MJ.T


def best_ids(net: BlockNet, hidden_NC: Tensor) -> Tensor:
    """[N] ids with the best logit of states before `norm`."""
    normed_NC = net.norm(hidden_NC)
    starts = range(0, len(normed_NC), LOGITS_ROWS)
    best = [net.lm_head(normed_NC[start : start + LOGITS_ROWS]).max(-1).indices for start in starts]
    return net.target_ids[torch.cat(best)] if best else torch.zeros(0, dtype=torch.int64)
