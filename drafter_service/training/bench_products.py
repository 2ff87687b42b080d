"""Which matrix products an update makes, and how long they take by themselves.

Products are seen as they are dispatched, those of the backward pass and of hand-written gradients
too. Alone they run on random operands of the same shapes, strides and dtype. Knows no recipe.

Shapes: I rows, J inner, L columns, B products of a batch.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_OPERANDS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm.default: 1,
}
"""Operations that multiply matrices, and the place of the first factor."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a factor: [I, J] or [B, I, J]."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def random(self) -> Tensor:
        """A tensor of this layout; broadcast axes hold one row."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))
        storage.normal_(0.0, 0.1)
        return tensor


@dataclass(frozen=True, slots=True)
class Product:
    """Two factors."""

    left: Layout
    right: Layout

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        batch = self.left.shape[0] if len(self.left.shape) == 3 else 1
        return 2 * batch * self.left.shape[-2] * self.left.shape[-1] * self.right.shape[-1]


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the products made while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Product] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """See TorchDispatchMode."""
        place = _OPERANDS.get(func)
        if place is not None:
            left, right = args[place], args[place + 1]
            if left.numel() and right.numel():
                self.counts[Product(_layout(left), _layout(right))] += 1
        return func(*args, **(kwargs or {}))

    @property
    def flops(self) -> int:
        """Of everything counted."""
        return sum(product.flops * count for product, count in self.counts.items())


class ProductsAlone:
    """The products of an update, each run by itself."""

    def __init__(self, counts: Mapping[Product, int]) -> None:
        self._runs = [
            (product.left.random(), product.right.random(), count)
            for product, count in counts.items()
        ]
        self.flops = sum(product.flops * count for product, count in counts.items())

    def seconds(self, clock: Clock = time.perf_counter) -> float:
        """All of them once, as often as the update makes each."""
        spent = 0.0
        for left, right, count in self._runs:
            left @ right  # the kernel is chosen and memory touched before the clock starts
            started = clock()
            for _ in range(count):
                left @ right
            spent += clock() - started
        return spent


def _layout(tensor: Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)
