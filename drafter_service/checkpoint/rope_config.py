"""Rotary scaling as config.json files state it, in the older and the newer layout. Torch-free.

Newer files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`; both together occur.
Invariant: a kind that is not known, or a share of the head that is not rotated, is refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any

from drafter_service.eagle3.config import ROPE_KINDS, Rope
from protos.errors import CheckpointError

Json = Mapping[str, Any]
DEFAULT_THETA = 10000.0


def read_rope(layer: Json, scaled_theta: float | None = None) -> Rope:
    """`scaled_theta` replaces the base of linear and dynamic scaling (a habit of the original
    EAGLE code). Raises CheckpointError, KeyError."""
    scaling: dict[str, Any] = dict(layer.get("rope_scaling") or {})
    scaling.update(layer.get("rope_parameters") or {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"rope type {kind!r} is not supported, only {ROPE_KINDS}")
    partial = scaling.get("partial_rotary_factor") or layer.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"partial_rotary_factor {partial} is not supported")
    theta = float(scaling.get("rope_theta") or layer.get("rope_theta") or DEFAULT_THETA)
    if kind in ("linear", "dynamic"):
        longest = int(layer.get("max_position_embeddings", 2048))
        base = theta if scaled_theta is None else scaled_theta
        return Rope(base, kind, float(scaling["factor"]), original_max_positions=longest)
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_positions=int(scaling["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        return _yarn(layer, scaling, theta)
    return _longrope(layer, scaling, theta) if kind == "longrope" else Rope(theta)


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """The same in the newer layout, as `read_rope` reads it."""
    words: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    original = {"original_max_position_embeddings": rope.original_max_positions}
    if rope.kind in ("linear", "dynamic"):
        return words | {"factor": rope.factor}
    if rope.kind == "llama3":
        frequencies = {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
        return words | {"factor": rope.factor} | frequencies | original
    if rope.kind == "yarn":
        ramp = {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.attention_factor,
        }
        return words | {"factor": rope.factor} | ramp | original
    if rope.kind == "longrope":
        factors = {
            "short_factor": list(rope.short_factors),
            "long_factor": list(rope.long_factors),
            "attention_factor": rope.attention_factor,
        }
        return words | {"factor": rope.factor} | factors | original
    return words


def _yarn(layer: Json, scaling: Json, theta: float) -> Rope:
    factor = float(scaling["factor"])
    given = scaling.get("attention_factor")
    upper, lower = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if given is None and upper and lower:
        given = _mscale(factor, float(upper)) / _mscale(factor, float(lower))
    original = scaling.get("original_max_position_embeddings") or layer["max_position_embeddings"]
    return Rope(
        theta,
        "yarn",
        factor=factor,
        original_max_positions=int(original),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_mscale(factor, 1.0) if given is None else float(given),
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(layer: Json, scaling: Json, theta: float) -> Rope:
    longest = int(layer.get("max_position_embeddings", 2048))
    key = "original_max_position_embeddings"
    original = int(scaling.get(key) or layer.get(key) or longest)
    factor = float(scaling.get("factor") or longest / original)
    given = scaling.get("attention_factor")
    if given is None:
        given = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(
        theta,
        "longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=float(given),
        short_factors=tuple(float(value) for value in scaling["short_factor"]),
        long_factors=tuple(float(value) for value in scaling["long_factor"]),
    )
