"""A linear layer whose weights may be laid out once for the kernel that reads them.

oneDNN repacks a plain bf16 weight on every call; packed once, the same product takes half the
time at a few rows and gives the same bits (measured on torch 2.13, Zen 4). Float32, builds without
oneDNN and other devices than the CPU keep the plain weight. Where kernels change their sums with
the number of rows (AMX does beyond 32 for some shapes), the invariance check sets a limit; more
rows are multiplied in parts, or as W x^T, whose sums that check found to be the same. Knows no
model.

Shapes: R rows, I input features, O output features.
"""

import torch
from torch.nn import functional

from verifier_service.model.invariance import Matrix

_PACK_ROWS = 16
"""The number of rows the packed layout is chosen for; any number may be given later."""


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
        self._bias = None if bias is None else bias.detach().clone()
        self._most_rows: int | None = None
        self._wide_rows = 0
        self._plain: torch.Tensor | None = None
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
            residual = x.mean(dim=-1, keepdim=True).expand(-1, self.shape[0]).contiguous()
            return self.add(x, residual)

        biased = "" if self._bias is None else " with bias"
        return [
            Matrix(*self.shape, self, f"product{biased}", self.limit, self.widen),
            Matrix(*self.shape, added, f"product{biased} and residual", self.limit, self.widen),
        ]

    def limit(self, most_rows: int) -> None:
        """Multiply at most so many rows at once from now on."""
        self._most_rows = min(most_rows, self._most_rows or most_rows)

    def widen(self, wide_rows: int) -> None:
        """Beyond the limit, multiply up to so many rows at once as W x^T; 0: in parts as limited.

        Keeps a second copy of a packed weight.
        """
        self._wide_rows = wide_rows
        if not wide_rows:
            self._plain = None
        elif self._plain is None:
            self._plain = self._weight.to_dense() if self._packed else self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, I] -> [R, O]."""
        if self._most_rows is None or len(x) <= self._most_rows:
            return self._product(x)
        return torch.cat([self._wide(part) for part in self._parts(x)])

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual [R, O] + x W^T + b, rounded once where the kernel can."""
        if self._most_rows is None or len(x) <= self._most_rows:
            return self._sum(x, residual)
        parts = zip(self._parts(x), self._parts(residual), strict=True)
        return torch.cat([self._wide_sum(*part) for part in parts])

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = x.split(self._wide_rows or self._most_rows)  # type: ignore[no-untyped-call]
        return parts

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        if self._plain is None or self._is_short(x):
            return self._product(x)
        if self._bias is None:
            return torch.mm(self._plain, x.t()).t()
        return torch.addmm(self._bias[:, None], self._plain, x.t()).t()

    def _is_short(self, x: torch.Tensor) -> bool:
        """True for so few rows that W x^T was never compared at them: what a last part may be."""
        return self._most_rows is not None and len(x) <= self._most_rows

    def _wide_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self._plain is None or self._is_short(x):
            return self._sum(x, residual)
        whole = torch.addmm(residual.t(), self._plain, x.t()).t()
        return whole if self._bias is None else whole + self._bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return y

    def _sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and self._bias is None:
            return torch.addmm(residual, x, self._weight.t())
        if not self._packed:
            return residual + functional.linear(x, self._weight, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._weight, self._bias, "add"
        )
        return y
