"""Which attention backend a target uses: tiles (the reference, any device) or FlexAttention.

FlexAttention is compiled on the machine it runs on, so it is tried at load: the same small steps
through both backends must agree, else the target is served with tiles and the log says why.
"""

import logging
from collections.abc import Callable
from enum import StrEnum

import torch

from protos.errors import ConfigError
from verifier_service.model.flex import Flex, compiled_flex
from verifier_service.model.target import TransformersTarget
from verifier_service.step import Span

logger = logging.getLogger(__name__)

TRIAL_SLOTS = 512
"""Slots that `fault_of` needs."""
_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Largest difference allowed, as a share of the largest logit."""


class Attention(StrEnum):
    """auto: FlexAttention on a GPU, tiles elsewhere."""

    AUTO = "auto"
    TILES = "tiles"
    FLEX = "flex"


def with_backend(
    asked: Attention, device: torch.device, make: Callable[[Flex | None], TransformersTarget]
) -> TransformersTarget:
    """The target that `make` gives for the backend asked for, or for the one that works.

    make(None): with tiles. Raises ConfigError when FlexAttention was asked for and fails.
    """
    wants_flex = asked is Attention.FLEX or (asked is Attention.AUTO and device.type == "cuda")
    if not wants_flex:
        return make(None)
    flexed, tiled = make(compiled_flex()), make(None)
    fault = fault_of(flexed, tiled)
    if not fault:
        return flexed
    if asked is Attention.FLEX:
        raise ConfigError(f"attention: flex cannot be used here: {fault}")
    logger.warning("target %s attends in tiles: %s", tiled.facts.name, fault)
    return tiled


def fault_of(flexed: TransformersTarget, tiled: TransformersTarget) -> str:
    """Why FlexAttention must not be used, "" when it gives what tiles give."""
    try:
        found = _trial(flexed)
    except (RuntimeError, ImportError) as error:
        # What compilers raise has many names; RuntimeError is above all of torch's.
        return f"FlexAttention failed: {str(error).strip().partition(chr(10))[0]}"
    expected = _trial(tiled)
    largest = float(expected.abs().max())
    apart = float((found - expected).abs().max())
    # Not apart <= ...: a NaN is no agreement.
    if not apart <= _TOLERANCE[tiled.dtype] * largest:
        return f"FlexAttention's logits are {apart:.3g} off where the largest is {largest:.3g}"
    return ""


def _trial(target: TransformersTarget) -> torch.Tensor:
    """Logits of a prompt, of a step with a tree beside a chain, and of single rows; on the host."""
    target.allocate(TRIAL_SLOTS)
    generator = torch.Generator().manual_seed(5)
    vocab, length = target.facts.vocab_size, min(140, target.facts.max_context - 16)
    ids = torch.randint(vocab, (length + 16,), generator=generator).tolist()
    slots = torch.randperm(TRIAL_SLOTS - 1, generator=generator) + 1
    one, two = slots[: length + 12], slots[-(length + 12) :]

    def span(key: int, own: torch.Tensor, start: int, count: int) -> Span:
        end = start + count
        return Span(key, tuple(ids[start:end]), start, own[:end], None, count)

    parents = (-1, 0, 0, 1, 1, 2, 3, 3, 6)
    tree = Span(1, tuple(ids[length : length + 9]), length, one[: length + 9], parents, 9)
    steps = [
        [span(1, one, 0, length)],
        [span(2, two, 0, length)],
        [tree, span(2, two, length, 4)],
        [span(1, one, length, 1), span(2, two, length + 4, 1)],
    ]
    logits = torch.cat([target.forward(step).float().cpu() for step in steps])
    target.free()
    return logits
