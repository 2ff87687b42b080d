"""The loss of EAGLE-1: the next final state is guessed, and its token through the target's lm_head.

    feature_weight * SmoothL1(y_t, f_{t+1}) + token_weight * - sum_v p_v log q_v
    p = softmax(lm_head f_{t+1}),  q = softmax(lm_head y_t)

(paper 2401.15077; `reference/eagle.md` 2.) On a CPU 49 thousand ids would cost several times the
head itself, so p and q may be compared on the most frequent ids alone, or on the best ids recorded
for each row. One step only, on true features with EAGLE's noise: every feature gets a number of
(U - 0.5) * std * 512 / tokens, drawn by row and channel. Rows with nothing after them (the end of
text) do not count. Knows no files.

Shapes: M answer rows of a batch, N of them that count, G prompt rows, C hidden size, W ids
compared, V target vocabulary, K ids recorded per row.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from drafter_service.eagle.head import EagleHead
from drafter_service.training.batches import Batch
from drafter_service.training.draws import uniform
from drafter_service.training.loss import Comparison, fused_loss
from drafter_service.training.recipe import Loss, StepSums
from drafter_service.training.targets import Targets, dense_targets, top_targets
from drafter_service.training.ttt import StepOutput, unroll

NOISE_PURPOSE = 32  # steps of training-time test draw by purposes below
CHANNELS = 1 << 14  # more than a hidden size; keys of rows are multiples of it
TOKENS = 512  # the length at which noise has its own width


@dataclass(frozen=True, slots=True)
class EagleLossShape:
    """Weights of both losses and the width of the noise."""

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise_std: float = 0.2


class TokenLoss:
    """Cross entropy on fixed ids: `rows_WC` are their rows of the target's lm_head."""

    def __init__(self, rows_WC: Tensor, index_V: Tensor, from_final: bool) -> None:
        """index_V: place of every target id among them, or -1. from_final: p is computed from the
        final states, not taken from the ids recorded."""
        self._rows_WC = rows_WC
        self._index_V = index_V
        self._from_final = from_final

    def __call__(self, y_NC: Tensor, batch: Batch, rows_N: Tensor) -> tuple[Tensor, Tensor, int]:
        """(sum over those of the rows whose choice can be compared, hits, how many)."""
        wanted_M = self._index_V[batch.choices.clamp_min(0)]
        wanted_M = wanted_M.masked_fill(batch.choices < 0, -1)
        kept = (wanted_M[rows_N] >= 0).nonzero()[:, 0]
        rows = rows_N[kept]
        total, found = fused_loss(
            y_NC[kept],
            self._rows_WC,
            self._targets(batch, wanted_M),
            rows,
            wanted_M[rows],
            Comparison(),
        )
        return total, found.hits, len(kept)

    def _targets(self, batch: Batch, wanted_M: Tensor) -> Targets:
        if not self._from_final:
            return top_targets(batch.top_ids, batch.top_logps, self._index_V)
        return dense_targets(batch.final, self._rows_WC, wanted_M, batch.top_logps[:, 0])


class TopTokenLoss:
    """Cross entropy of p and q both restricted to the ids recorded for a row."""

    def __init__(self, lm_head_VC: Tensor) -> None:
        self._lm_head_VC = lm_head_VC

    def __call__(self, y_NC: Tensor, batch: Batch, rows_N: Tensor) -> tuple[Tensor, Tensor, int]:
        """(sum over the rows, hits among the ids recorded, how many)."""
        probs_NK = batch.top_logps[rows_N].softmax(-1)
        weights_NKC = self._lm_head_VC[batch.top_ids[rows_N]]
        logits_NK = (weights_NKC @ y_NC[:, :, None])[:, :, 0].float()
        losses_N = -(probs_NK * logits_NK.log_softmax(-1)).sum(-1)
        hits_N = logits_NK[:, 0] >= logits_NK.amax(-1)
        return losses_N.sum(), hits_N, len(rows_N)


class EagleLoss:
    """A head's loss."""

    def __init__(
        self, net: EagleHead, tokens: TokenLoss | TopTokenLoss, shape: EagleLossShape
    ) -> None:
        self._net = net
        self._tokens = tokens
        self._shape = shape

    def __call__(self, batch: Batch, number: int) -> Loss:
        """Weighted sum over rows; the denominator is all rows."""
        rows_N = (batch.choices >= 0).nonzero()[:, 0]
        outputs: list[StepOutput] = []
        unroll(self._net, self._noised(batch, number), 1, outputs.append)
        y_NC = outputs[0].y[rows_N]
        features = feature_losses(y_NC, batch.final[rows_N]).sum()
        tokens, hits, counted = self._tokens(y_NC, batch, rows_N)
        total = self._shape.feature_weight * features + self._shape.token_weight * tokens
        sums = StepSums((float(tokens.detach()),), (float(hits.sum()),), (float(counted),))
        return Loss(total, float(batch.num_rows), sums)

    def _noised(self, batch: Batch, number: int) -> Batch:
        if not self._shape.noise_std:
            return batch
        prompt_features, features = noised(batch, number, self._shape.noise_std)
        return replace(batch, prompt_features=prompt_features, features=features)


def feature_losses(y_NC: Tensor, final_NC: Tensor) -> Tensor:
    """[N] float32: SmoothL1, the mean over channels."""
    return functional.smooth_l1_loss(y_NC.float(), final_NC.float(), reduction="none").mean(-1)


def noised(batch: Batch, number: int, std: float) -> tuple[Tensor, Tensor]:
    """(features of the prompt rows, of the answer rows) of a batch, with the noise of an update.

    A row's noise depends on the update and the row alone, whatever batch or worker holds it.
    """
    prompt_keys, prompt_scale = [], []
    answer_scale = torch.empty(batch.num_rows)
    for rows in batch.records:
        length = rows.answer.stop - rows.answer.start
        positions = batch.prompt_positions[rows.prompt]
        scale = std * TOKENS / (len(positions) + length + 1)
        first = batch.keys[rows.answer][:1] - batch.positions[rows.answer][:1]
        prompt_keys.append(first + positions if length else positions)
        prompt_scale.append(torch.full((len(positions),), scale))
        answer_scale[rows.answer] = scale
    prompt = _with_noise(
        batch.prompt_features, torch.cat(prompt_keys), torch.cat(prompt_scale), number
    )
    return prompt, _with_noise(batch.features, batch.keys, answer_scale, number)


def _with_noise(features: Tensor, keys: Tensor, scale: Tensor, number: int) -> Tensor:
    cells = keys[:, None] * CHANNELS + torch.arange(features.shape[1])
    noise = (uniform(number, NOISE_PURPOSE, cells) - 0.5).float() * scale[:, None]
    return features + noise.to(features.dtype)
