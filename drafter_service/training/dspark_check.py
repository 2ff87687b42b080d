"""How good a drafter with a serial head is on held-out answers, and how honest its confidence.

From every answer row the drafts are walked as they are when serving: each behind the drafted token
before it, until one is not what the target chose. Draft j is *reached* when all before it were
chosen by the target and recorded; only reached drafts count here, so the accuracy of a slot is the
rate at which its draft is accepted. Scored with the target's whole lm_head.

Shapes: M answer rows of a batch, X anchors, J drafts of a block, N reached drafts.
"""

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from drafter_service.dflash.net import BlockNet
from drafter_service.training.batches import Batch
from drafter_service.training.block_check import ANCHORS_PER_PASS
from drafter_service.training.block_targets import draft_rows
from drafter_service.training.blocks import run_blocks
from drafter_service.training.evaluate import replay_chains
from drafter_service.training.recipe import HeldOut

NUM_BINS = 10

HeldOutBatches = Iterable[tuple[Batch, tuple[bool, ...]]]


@dataclass(frozen=True, slots=True)
class Walk:
    """agreed: the draft is the target's choice; said: the confidence head's logit, 0 where a draft
    was not reached."""

    agreed: Tensor  # [J, M] bool
    reached: Tensor  # [J, M] bool
    said: Tensor  # [J, M] float32


@dataclass(frozen=True, slots=True)
class PathReport:
    """accuracy, confidence (mean) and brier of reached drafts by slot; ece over all of them;
    replayed chains over greedy answers."""

    accuracy: tuple[float, ...]
    confidence: tuple[float, ...]
    brier: tuple[float, ...]
    ece: float
    num_reached: tuple[int, ...]
    tau: float
    accepted_by_depth: tuple[float, ...]
    num_rounds: int


def check_paths(net: BlockNet, batches: HeldOutBatches, most: int | None) -> HeldOut:
    """At most `most` batches, each with whether its records are greedy answers."""
    num_drafts = net.config.num_drafts
    accepted = [0] * (num_drafts + 1)
    walks: list[Walk] = []
    for batch, greedy in itertools.islice(batches, most):
        found = walk(net, batch)
        walks.append(found)
        for rows, is_greedy in zip(batch.records, greedy, strict=True):
            if is_greedy:
                num_rows = int(found.reached[0, rows.answer].sum())  # an end of text is no anchor
                replay_chains(found.agreed[:, rows.answer][:, :num_rows], accepted)
    whole = joined(walks, num_drafts)
    rounds = sum(accepted)
    tau = sum((num + 1) * times for num, times in enumerate(accepted)) / max(1, rounds)
    said_JM = whole.said.sigmoid()
    squares_JM = (said_JM - whole.agreed.float()).square()
    report = PathReport(
        accuracy=_by_slot(whole.agreed.float(), whole.reached),
        confidence=_by_slot(said_JM, whole.reached),
        brier=_by_slot(squares_JM, whole.reached),
        ece=calibration_error(said_JM[whole.reached], whole.agreed[whole.reached]),
        num_reached=tuple(int(count) for count in whole.reached.sum(1)),
        tau=tau,
        accepted_by_depth=tuple(
            sum(accepted[depth:]) / max(1, rounds) for depth in range(1, num_drafts + 1)
        ),
        num_rounds=rounds,
    )
    return HeldOut(tau, asdict(report))


@torch.inference_mode()
def walk(net: BlockNet, batch: Batch) -> Walk:
    """The greedy chain of every answer row, up to its first miss."""
    shape = (batch.num_rows, net.config.num_drafts)
    agreed_MJ, reached_MJ = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape).bool()
    said_MJ = torch.zeros(shape)
    for first in range(0, batch.num_rows, ANCHORS_PER_PASS):
        anchors_X = torch.arange(first, min(first + ANCHORS_PER_PASS, batch.num_rows))
        part = _walk_anchors(net, batch, anchors_X)
        agreed_MJ[anchors_X], reached_MJ[anchors_X] = part.agreed, part.reached
        said_MJ[anchors_X] = part.said
    return Walk(agreed_MJ.T, reached_MJ.T, said_MJ.T)


def _walk_anchors(net: BlockNet, batch: Batch, anchors_X: Tensor) -> Walk:
    """As `walk`, [X, J]."""
    markov, confidence = net.markov_head, net.confidence_head
    assert markov is not None  # the recipe's net has both
    assert confidence is not None
    drafts = draft_rows(batch, anchors_X, net.config.num_drafts)
    hidden_XBC = net.norm(run_blocks(net, batch, anchors_X))
    agreed_XJ, reached_XJ = torch.zeros(drafts.rows.shape).bool(), torch.zeros_like(drafts.exists)
    said_XJ = torch.zeros(drafts.rows.shape)
    tokens_X, on_path_X = batch.ids[anchors_X], torch.ones(len(anchors_X), dtype=torch.bool)
    state_XR = markov.start(len(anchors_X))
    for draft in range(net.config.num_drafts):
        rows_X = drafts.rows[:, draft]
        choices_X = batch.choices[rows_X]
        here_X = on_path_X & drafts.exists[:, draft] & (choices_X >= 0)
        if not here_X.any():
            break
        hidden_NC = hidden_XBC[here_X, net.config.first_draft_slot + draft]
        tokens_N = tokens_X[here_X]
        bias_NW, state_XR[here_X] = markov.step(tokens_N, hidden_NC, state_XR[here_X])
        best_N = net.target_ids[(net.logits(hidden_NC) + bias_NW).max(-1).indices]
        said_XJ[here_X, draft] = confidence.logits(hidden_NC, markov.token_rows(tokens_N))
        tokens_X = tokens_X.masked_scatter(here_X, best_N)
        agreed_XJ[:, draft] = here_X & (tokens_X == choices_X)
        reached_XJ[:, draft] = here_X
        recorded_X = batch.ids[torch.minimum(rows_X + 1, batch.last_row[rows_X])]
        on_path_X = agreed_XJ[:, draft] & (recorded_X == choices_X)
    return Walk(agreed_XJ, reached_XJ, said_XJ)


def joined(walks: list[Walk], num_drafts: int) -> Walk:
    """One walk of all rows."""
    nothing = Walk(*(torch.zeros(num_drafts, 0),) * 3)
    parts = [nothing, *walks]
    return Walk(
        torch.cat([part.agreed.bool() for part in parts], 1),
        torch.cat([part.reached.bool() for part in parts], 1),
        torch.cat([part.said for part in parts], 1),
    )


def calibration_error(said_N: Tensor, agreed_N: Tensor) -> float:
    """Expected calibration error of probabilities, over equal bins."""
    bins_N = (said_N * NUM_BINS).long().clamp_max(NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS).index_add_(0, bins_N, said_N - agreed_N.float())
    return float(gaps.abs().sum()) / max(1, len(said_N))


def _by_slot(values_JM: Tensor, reached_JM: Tensor) -> tuple[float, ...]:
    sums_J = (values_JM * reached_JM).sum(1)
    return tuple((sums_J / reached_JM.sum(1).clamp_min(1)).tolist())
