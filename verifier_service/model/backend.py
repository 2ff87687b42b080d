"""Which attention backend a target uses: tiles (the reference, any device) or a fused kernel.

Fused kernels are tried at load, on the machine they run on. FlexAttention is compiled there: the
same small steps through it and through tiles must agree. torch's own kernel for CPUs must not let
a row's bits depend on its company (sdpa_trial.py). One that fails is not used, and the log says
why.
"""

import logging
from collections.abc import Callable
from enum import StrEnum

import torch

from protos.errors import ConfigError
from verifier_service.model.attention import Tiles
from verifier_service.model.flex import FlexBackend, compiled_flex
from verifier_service.model.numerics import vector_units
from verifier_service.model.sdpa import Sdpa
from verifier_service.model.step_attention import Backend
from verifier_service.model.target import TransformersTarget
from verifier_service.step import Span

logger = logging.getLogger(__name__)

TRIAL_SLOTS = 512
"""Slots that `fault_of` needs."""
_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Largest difference allowed, as a share of the largest logit."""


class Attention(StrEnum):
    """auto: FlexAttention on a GPU; torch's fused kernel for bf16 on a CPU with matrix units (AMX),
    where it was measured to be faster; tiles elsewhere."""

    AUTO = "auto"
    TILES = "tiles"
    SDPA = "sdpa"
    FLEX = "flex"


def with_backend(
    asked: Attention,
    device: torch.device,
    dtype: torch.dtype,
    make: Callable[[Backend], TransformersTarget],
    sdpa_fault: Callable[[], str],
) -> TransformersTarget:
    """The target that `make` gives for the backend asked for, or for the one that works.

    sdpa_fault: why torch's fused kernel must not be used for this target, "" when it may.
    Raises ConfigError when a fused kernel was asked for by name and fails.
    """
    wanted = _auto(device, dtype) if asked is Attention.AUTO else asked
    if wanted is Attention.TILES:
        return make(Tiles())
    if wanted is Attention.SDPA:
        fault = sdpa_fault()
        if not fault:
            return make(Sdpa())
        tiled = make(Tiles())
    else:
        flexed, tiled = make(FlexBackend(compiled_flex())), make(Tiles())
        fault = fault_of(flexed, tiled)
        if not fault:
            return flexed
    if asked is not Attention.AUTO:
        raise ConfigError(f"attention: {asked} cannot be used here: {fault}")
    logger.warning("target %s attends in tiles: %s", tiled.facts.name, fault)
    return tiled


def _auto(device: torch.device, dtype: torch.dtype) -> Attention:
    if device.type == "cuda":
        return Attention.FLEX
    fits = device.type == "cpu" and dtype is torch.bfloat16 and "amx_bf16" in vector_units()
    return Attention.SDPA if fits else Attention.TILES


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
