"""Mixtures of experts whose rows do not see each other: products of fixed form per expert.

How many rows of a step an expert gets depends on the step. So every expert's rows are padded to
the multiple at which its products ignore their number (invariance.py), each (row, expert) pair is
kept apart, and a row adds its experts up in the order in which its router ranked them. Takes the
weights of transformers' expert modules; knows no family: a module says itself how its weights lie
and how its gate works. For CPUs: elsewhere transformers' grouped products are left as they are.

Shapes: R rows, K experts per row, E experts, H hidden_size, I intermediate_size.
"""

from collections.abc import Iterator
from typing import Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from verifier_service.model.invariance import Matrix
from verifier_service.model.linear import Linear


class _ExpertsModule(Protocol):
    """What transformers' decorator for expert modules makes known of each."""

    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    gate_up_proj: torch.Tensor
    gate_up_proj_bias: torch.Tensor
    down_proj: torch.Tensor
    down_proj_bias: torch.Tensor

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class Experts:
    """All experts of one layer. Keeps its own packed weights and takes the module's away."""

    def __init__(self, module: _ExpertsModule) -> None:
        self._gate = module._apply_gate
        self._up = list(_linears(module, "gate_up_proj"))
        self._down = list(_linears(module, "down_proj"))
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            if hasattr(module, name):
                setattr(module, name, None)
        self.multiple = 1
        """What the rows of an expert are padded to."""
        self.num_rows: int | None = None
        """Rows of the step that are real; None: all. Padding would read experts for nothing."""

    @property
    def matrices(self) -> list[Matrix]:
        """All products, for the invariance check."""
        return [linear.matrices[0] for linear in (*self._up, *self._down)]

    def __call__(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """[R, H] from rows [R, H], chosen experts [R, K] and their weights [R, K].

        Zero for rows that are padding.
        """
        per_row = chosen.shape[1]
        pairs = chosen[: self.num_rows].flatten()
        order = torch.argsort(pairs, stable=True)
        counts = torch.bincount(pairs, minlength=len(self._up)).tolist()
        found = rows.new_empty(len(pairs), rows.shape[1])
        for expert, own in enumerate(torch.split(order, counts)):
            if len(own):
                x = rows.index_select(0, own // per_row)
                x = functional.pad(x, (0, 0, 0, -len(own) % self.multiple))
                y = self._down[expert](self._gate(self._up[expert](x)).to(rows.dtype))
                found.index_copy_(0, own, y[: len(own)])
        total = torch.zeros_like(rows, dtype=torch.float32)
        real = total[: self.num_rows]
        for rank, one in enumerate(found.view(len(real), per_row, -1).unbind(1)):
            real += one.float() * weights[: len(real), rank, None].float()
        return total.to(rows.dtype)


def take_experts(model: nn.Module) -> list[Experts]:
    """Put `Experts` in the place of every module of gated experts below `model`."""
    taken = []
    for module in model.modules():
        if _is_gated(module):
            experts = Experts(module)  # type: ignore[arg-type]  # looked at just now
            module.forward = experts
            taken.append(experts)
    return taken


def _is_gated(module: nn.Module) -> bool:
    return bool(
        getattr(module, "has_gate", False)
        and not getattr(module, "has_post_expert_norm", True)
        and getattr(module, "gate_up_proj", None) is not None
    )


def _linears(module: _ExpertsModule, name: str) -> Iterator[Linear]:
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    for weight, bias in zip(weights, biases, strict=True):
        yield Linear(weight.t().contiguous() if module.is_transposed else weight, bias)


def router_matrices(model: nn.Module) -> list[Matrix]:
    """The products of routers, which are no nn.Linear in transformers."""
    return [
        _Router(module).matrix
        for module in model.modules()
        if hasattr(module, "top_k") and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]


class _Router:
    """A router of transformers: rows in, a tuple of tensors by row out."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weight = cast("torch.Tensor", module.weight)
        self._most_rows: int | None = None

    @property
    def matrix(self) -> Matrix:
        """Its product, as the invariance check sees it."""
        outputs, inputs = self._weight.shape
        return Matrix(outputs, inputs, self._product, "router", self._limit)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        bias = cast("torch.Tensor | None", getattr(self._module, "bias", None))
        parts = x.split(self._most_rows or len(x))  # type: ignore[no-untyped-call]
        return torch.cat([functional.linear(part, self._weight, bias) for part in parts])

    def _limit(self, most_rows: int) -> None:
        """Route at most so many rows at once from now on, by the module's own forward."""
        self._most_rows = most_rows
        module = self._module
        whole = type(module).forward

        def in_parts(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parts = rows.flatten(0, -2).split(most_rows)  # type: ignore[no-untyped-call]
            found = [whole(module, part) for part in parts]
            return tuple(torch.cat(same) for same in zip(*found, strict=True))

        module.forward = in_parts
