"""A linear layer whose weights may be laid out once for the kernel that reads them.

oneDNN repacks a plain bf16 weight on every call; packed once, the same product takes half the
time at a few rows and gives the same bits (measured on torch 2.13, Zen 4). Float32, builds without
oneDNN and other devices than the CPU keep the plain weight. Where kernels change their sums with
the number of rows (AMX does beyond 32 for some shapes), the invariance check sets a limit; more
rows are multiplied in parts, or as x (W^T) with W^T laid out, or as W x^T, whichever that check
finds to sum alike. Knows no model.

Shapes: R rows, I input features, O output features.
"""

from enum import Enum, auto
from typing import Protocol

import torch
from torch.nn import functional

from verifier_service.model.invariance import Matrix

_PACK_ROWS = 16
"""The number of rows the packed layout is chosen for; any number may be given later."""
_REST_ROWS = 128
"""What is left behind the last whole part of more rows is multiplied so many at once: kernels
change at sizes between, which a larger part may pass over and a rest would meet."""


class _Form(Enum):
    """How many rows are multiplied: STRAIGHT with W^T [I, O], TURNED with W [O, I] and x^T."""

    STRAIGHT = auto()
    TURNED = auto()


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True where this build can hold packed weights of `dtype` on `device`."""
    return bool(
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's own
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear:
    """y = x W^T + b, for x [R, I] and weight [O, I]. Computes on the weight's device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))
        self.bias = None if bias is None else bias.detach().clone()
        self.most_rows: int | None = None
        """Rows multiplied at once; None: any number."""
        self._wide_rows = 0
        self._form = _Form.STRAIGHT
        self._wide: torch.Tensor | None = None
        self._packed = can_pack(weight.dtype, weight.device)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACK_ROWS)
            if self._packed
            else weight.detach()
        )

    @property
    def matrices(self) -> list[Matrix]:
        """This product, alone and with a residual, as the invariance check sees it."""

        def added(x: torch.Tensor) -> torch.Tensor:
            repeats = -(-self.shape[0] // self.shape[1])
            return self.add(x, x.repeat(1, repeats)[:, : self.shape[0]].contiguous())

        biased = "" if self.bias is None else " with bias"
        wideners = (self.widen_straight, self.widen_turned)
        return [
            Matrix(*self.shape, self, f"product{biased}", self.limit, wideners),
            Matrix(*self.shape, added, f"product{biased} and residual", self.limit, wideners),
        ]

    def limit(self, most_rows: int) -> None:
        """Multiply at most so many rows at once from now on."""
        self.most_rows = min(most_rows, self.most_rows or most_rows)

    def widen_straight(self, wide_rows: int) -> None:
        """Beyond the limit, multiply up to so many rows at once as x (W^T); 0: as limited.

        Keeps a second copy of a packed weight, as `widen_turned` does.
        """
        self._widen(_Form.STRAIGHT, wide_rows)

    def widen_turned(self, wide_rows: int) -> None:
        """Beyond the limit, multiply up to so many rows at once as W x^T; 0: as limited."""
        self._widen(_Form.TURNED, wide_rows)

    def plain(self) -> torch.Tensor:
        """The weight [O, I], not packed; a copy where it is."""
        return self._weight.to_dense() if self._packed else self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, I] -> [R, O]."""
        if self.fits(x.shape[0]):
            return self._product(x)
        out = x.new_empty(x.shape[0], self.shape[0])
        for part, into in zip(self._parts(x), self._parts(out), strict=True):
            self._multiply(part, into)
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual [R, O] + x W^T + b, rounded once where the kernel can."""
        if self.fits(x.shape[0]):
            return self._sum(x, residual)
        if self.turns(x.shape[0]):
            return added_turned(self, x, residual)
        out = torch.empty_like(residual)
        for part in zip(self._parts(x), self._parts(residual), self._parts(out), strict=True):
            self._multiply_add(*part)
        return out

    def turns(self, num_rows: int) -> bool:
        """Whether so many rows are multiplied as W x^T, but for a rest."""
        return self._form is _Form.TURNED and self._wide is not None and not self.fits(num_rows)

    def add_turned(self, x: torch.Tensor, stream: torch.Tensor) -> None:
        """Add W x^T + b to stream [O, R] in place, rounded as `add` does. Where it `turns`."""
        low = 0
        for size in part_sizes(x.shape[0], self._wide_rows):
            rows, own = x[low : low + size], stream[:, low : low + size]
            low += size
            if self.fits(size):
                own.copy_(self._sum(rows, own.t().contiguous()).t())
                continue
            assert self._wide is not None
            torch.addmm(own, self._wide, rows.t(), out=own)
            if self.bias is not None:
                own += self.bias[:, None]

    def fits(self, num_rows: int) -> bool:
        """Whether so many rows are multiplied by the kernel for few."""
        return self.most_rows is None or num_rows <= self.most_rows

    def _widen(self, form: _Form, wide_rows: int) -> None:
        if not wide_rows:
            self._wide = None
        elif self._wide is None or form is not self._form:
            plain = self.plain()
            self._wide = plain.t().contiguous() if form is _Form.STRAIGHT else plain
        self._wide_rows, self._form = wide_rows, form

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        most = self._wide_rows or self.most_rows or x.shape[0]
        parts: tuple[torch.Tensor, ...] = x.split(part_sizes(x.shape[0], most))  # type: ignore[no-untyped-call]
        return parts

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        # So few rows were never compared in another form: what a last part may be.
        if self._wide is None or self.fits(x.shape[0]):
            out.copy_(self._product(x))
        elif self._form is _Form.TURNED:
            out.copy_(turned_product(self._wide, self.bias, x).t())
        elif self.bias is None:
            torch.mm(x, self._wide, out=out)
        else:
            torch.addmm(self.bias, x, self._wide, out=out)

    def _multiply_add(self, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> None:
        if self._wide is None or self.fits(x.shape[0]):
            out.copy_(self._sum(x, residual))
            return
        torch.addmm(residual, x, self._wide, out=out)
        if self.bias is not None:
            out += self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not self._packed:
            return functional.linear(x, self._weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self.bias, "none", [], ""
        )
        return y

    def _sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and self.bias is None:
            return torch.addmm(residual, x, self._weight.t())
        if not self._packed:
            return residual + functional.linear(x, self._weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._weight, self.bias, "add"
        )
        return y


def part_sizes(num_rows: int, most: int) -> list[int]:
    """How many rows each of the parts has that so many rows are multiplied in."""
    rest = num_rows % most
    smaller = min(most, _REST_ROWS)
    sizes = [most] * (num_rows // most) + [smaller] * (rest // smaller)
    return [*sizes, rest % smaller] if rest % smaller else sizes


class AddsTurned(Protocol):
    """What adds its output for x [R, I] to a turned stream [O, R] in place."""

    def add_turned(self, x: torch.Tensor, stream: torch.Tensor) -> None: ...


def added_turned(layer: AddsTurned, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual [R, O] + a layer's output for x, by the very sums of a turned stream."""
    stream = residual.t().contiguous()
    layer.add_turned(x, stream)
    return stream.t().contiguous()


def turned_product(
    weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor:
    """W x^T + b, [O, R], of a plain weight."""
    if bias is None:
        return torch.mm(weight, x.t())
    return torch.addmm(bias[:, None], weight, x.t())
