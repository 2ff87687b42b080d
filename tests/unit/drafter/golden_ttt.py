"""Training cases of public projects, brought to one form: rows, targets, weights of their losses.

Every project shifts and masks in its own way (`shared/golden/eagle/INDEX.md`); here each text
becomes rows t = (features t, token t+1) with the target's distribution after token t+1 beside
them, and a weight for the loss of every row and step. Rows added on the right make the zeros
exist that the projects shift in; being to the right, they disturb no real row.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.eagle3_reader import SharedWeights, head_of
from drafter_service.eagle3.config import Rope
from drafter_service.eagle3.head import Eagle3Head

STEPS = 4


@dataclass(frozen=True)
class Text:
    """One document: rows, what they are compared with, and what each row counts at each step."""

    features: Tensor  # [T, A]
    ids: Tensor  # [T]
    probs: Tensor  # [T, W]
    weights: Tensor  # [STEPS, T]
    logits: list[Tensor | None]  # of every step, [T, W], where the project's are comparable


@dataclass(frozen=True)
class GoldenCase:
    """A project's training case. kl: its loss subtracts the target's entropy."""

    head: Eagle3Head
    texts: list[Text]
    step_losses: Tensor
    total: Tensor
    fc_gradient: Tensor
    decay: float
    kl: bool = False


def load_case(directory: Path) -> GoldenCase:
    """By the project in the case's name."""
    makers: dict[str, Callable[[Path], GoldenCase]] = {
        "speculators": _speculators,
        "deepspec": _deepspec,
        "modelopt": _modelopt,
        "safeailab": _eagle,
        "specforge": _eagle,
    }
    (make,) = [maker for word, maker in makers.items() if word in directory.name]
    return make(directory)


def _head(directory: Path, variant: str = "") -> Eagle3Head:
    target = load_file(directory / "target.safetensors")
    embedding = next(t for name, t in target.items() if "embed_tokens" in name)
    described = describe(directory, 8).choose(variant)
    shared = SharedWeights(embedding, target.get("lm_head.weight", embedding))
    head = head_of(described, directory, shared, torch.float32)
    assert head.fc is not None
    head.fc.weight.requires_grad_(True)
    return head


def _eagle(directory: Path) -> GoldenCase:
    """EAGLE's and SpecForge's: sums over counted rows by B * T; mask moves after step 0 only."""
    io = load_file(directory / "io.safetensors")
    head = _head(directory)
    if "theta500k" in directory.name:  # its training code takes no base but this
        head.config = replace(head.config, rope=Rope(theta=10000.0))
        head.reset_frequencies()
    kept = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    kept[head.target_ids] = True
    texts = []
    for text in range(2):
        target, mask = _left(io["ttt.target_logits"][text], 1), io["ttt.loss_mask"][text]
        counted = kept[target.argmax(-1)]
        weights = [_left(mask, step) * _left(counted, step) / 32 for step in range(STEPS)]
        ids, probs = _left(io["ttt.input_ids"][text], 1), target[:, head.target_ids].softmax(-1)
        logits = [io[f"ttt.logits.{step}"][text] for step in range(STEPS)]
        real = io["ttt.attention_mask"][text].bool()
        shown = [torch.where(real[:, None], given, torch.nan) for given in logits]
        texts.append(Text(io["ttt.features"][text], ids, probs, torch.stack(weights), shown))
    return _case(head, texts, io, 0.8)


def _deepspec(directory: Path) -> GoldenCase:
    """By B * T; the last real position does not count; mask not shifted at step 0."""
    io = load_file(directory / "io.safetensors")
    head, target = _head(directory), load_file(directory / "target.safetensors")
    lm_head = target.get("lm_head.weight")
    texts = []
    for text in range(2):
        length = int(io["ttt.attention_mask"][text].sum())
        mask = io["ttt.loss_mask"][text].clone()
        mask[length - 1] = 0
        own = (io["ttt.target_last_hidden"][text] @ lm_head.T).softmax(-1)
        probs = _left(own, 1)
        probs[-1] = 1 / probs.shape[1]
        weights = torch.stack([_left(mask, step) / 32 for step in range(STEPS)])
        logits = []
        for step in range(STEPS):
            given = io[f"ttt.logits.{step}"][text].clone()
            given[length - step :] = torch.nan
            logits.append(given)
        ids = _left(io["ttt.input_ids"][text], 1)
        texts.append(Text(io["ttt.features"][text], ids, probs, weights, logits))
    return _case(head, texts, io, 0.8)


def _speculators(directory: Path) -> GoldenCase:
    """Packed documents, by the mask's sum; nothing is dropped for its choice."""
    io = load_file(directory / "io.safetensors")
    head, target = _head(directory), load_file(directory / "target.safetensors")
    eps = json.loads((directory / "target_config.json").read_text())["rms_norm_eps"]
    norm = next(weight for name, weight in target.items() if name.endswith("norm.weight"))
    hidden = io["ttt.verifier_last_hidden"]
    normed = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], norm, eps)
    probs = (normed @ target["lm_head.weight"][head.target_ids].T).softmax(-1)
    mask, documents = io["ttt.loss_mask"].float(), io["ttt.document_ids"]
    texts = []
    for document in documents.unique().tolist():
        rows = (documents == document).nonzero()[:, 0]
        if document < 0:
            assert not mask[rows].any()
            continue
        reach = slice(int(rows[0]), len(mask))  # what follows is seen by ids and targets alone
        weights = []
        for step in range(STEPS):
            weight = _left(mask, step) / (mask[step:].sum() + 1e-5)
            weights.append(torch.where(documents == document, weight, 0.0)[reach])
        own = (documents == document)[reach, None]
        shown = [
            torch.where(own, io[f"ttt.logits.{step}"][0][reach], torch.nan) for step in range(STEPS)
        ]
        features, ids = io["ttt.features"][reach], io["ttt.next_ids"][reach]
        texts.append(Text(features, ids, probs[reach], torch.stack(weights), shown))
    return _case(head, texts, io, 1.0, kl=True)


def _modelopt(directory: Path) -> GoldenCase:
    """Its row of step j stands j further right than ours; by the mask's sum."""
    io = load_file(directory / "io.safetensors")
    head = _head(directory)
    mask = _left(io["ttt.loss_mask"].T.float(), 1).T
    sums = [mask[:, step:].sum() + 1e-5 for step in range(STEPS)]
    texts = []
    for text in range(2):
        target = _left(io["ttt.target_logits"][text], 1)
        weights = [_left(mask[text], step) / sums[step] for step in range(STEPS)]
        logits = []
        for step in range(STEPS):
            given = _left(io[f"ttt.logits.{step}"][text], step).clone()
            given[len(given) - 1 - step :] = torch.nan
            logits.append(given)
        ids, probs = _left(io["ttt.input_ids"][text], 1), target[:, head.target_ids].softmax(-1)
        texts.append(Text(io["ttt.features"][text], ids, probs, torch.stack(weights), logits))
    return _case(head, texts, io, 0.9)


def _case(
    head: Eagle3Head, texts: list[Text], io: dict[str, Tensor], decay: float, kl: bool = False
) -> GoldenCase:
    told = io["ttt.step_loss"], io["ttt.total_loss"], io["ttt.grad.fc.weight"]
    return GoldenCase(head, texts, *told, decay, kl)


def _left(values: Tensor, num: int) -> Tensor:
    """Rows moved left, zeros entering on the right."""
    return torch.cat([values[num:], values.new_zeros(num, *values.shape[1:])])
