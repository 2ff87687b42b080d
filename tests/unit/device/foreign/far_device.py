"""A device that is none: tensors that compute on the CPU and refuse to meet a tensor of the CPU.

`FarDevice` stands in for a GPU where there is none. A far tensor wraps a CPU tensor and says that
it lives on torch's spare device type; every operation on far tensors runs on what they wrap, and an
operation that mixes far tensors with tensors of the CPU fails, as it would on a GPU. Copies between
the two and whatever waits for the device are counted. Values are the CPU's own, bit for bit, so a
program that is right on a CPU must give the very same results here.

Registers the spare device type with torch for the whole process: use it in a process of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

FAR = torch.device("privateuseone", 0)
_aten = torch.ops.aten
_CROSSING = {_aten.copy_.default, _aten._to_copy.default, _aten.to.dtype_layout, _aten.to.device}
_READING = {
    _aten.item.default,
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
}


class MixedDevices(AssertionError):
    """An operation was given far tensors and tensors of the CPU."""


class FarTensor(torch.Tensor):
    """A tensor on the far device. `near` holds its values."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> "FarTensor":
        # A view shares its base's version counter, which inference tensors have none of.
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(
                cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=FAR
            )

    def __init__(self, near: torch.Tensor) -> None:
        self.near = near

    def __repr__(self) -> str:
        return f"far {self.near!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a far tensor outside of FarDevice")


@dataclass
class Traffic:
    """sent: copies to the device; read: values or tensors read back, each of which waits."""

    sent: int = 0
    read: int = 0
    by_op: Counter[str] = field(default_factory=Counter)


@contextmanager
def far_device() -> Iterator[Traffic]:
    """Within, tensors may be made on FAR."""
    traffic = Traffic()
    with ExitStack() as stack:
        stack.enter_context(_Functions(traffic))
        stack.enter_context(_Operations(traffic))
        yield traffic


def register() -> None:
    """Make the spare device type known to torch, once in a process."""
    _setup_privateuseone_for_python_backend()


class _Functions(TorchFunctionMode):
    """What torch does outside of its dispatcher."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") == FAR:
            del kwargs["device"]
            return func(*args, **kwargs).to(FAR)
        if func is torch.Tensor.tolist and isinstance(args[0], FarTensor):
            self._traffic.read += 1
            return args[0].near.tolist()
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, structure = tree_flatten((args, kwargs or {}))
        far = [value for value in flat if isinstance(value, FarTensor)]
        near = [v for v in flat if isinstance(v, torch.Tensor) and not isinstance(v, FarTensor)]
        asked = next((value for value in flat if isinstance(value, torch.device)), None)
        crossing = func in _CROSSING
        if far and near and not crossing:
            shapes = [tuple(tensor.shape) for tensor in near]
            raise MixedDevices(f"{func} of far tensors and tensors {shapes} of the CPU")
        self._count(func, far, near, asked)
        goes_far = bool(far) if asked is None else asked == FAR
        if func is _aten.copy_.default:
            goes_far = isinstance(args[0], FarTensor)
        near_args, near_kwargs = tree_unflatten([_near(value) for value in flat], structure)
        out = func(*near_args, **near_kwargs)
        if crossing and asked is not None and goes_far is not bool(far) and out is near_args[0]:
            # Crossing always copies, also where the CPU hands the same tensor back.
            out = out.clone()
        wrappers = {id(tensor.near): tensor for tensor in far}
        return tree_map(lambda value: self._placed(value, goes_far, wrappers), out)

    def _placed(self, value: Any, goes_far: bool, wrappers: dict[int, FarTensor]) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not goes_far:
            return value
        return wrappers[id(value)] if id(value) in wrappers else FarTensor(value)

    def _count(self, func: Any, far: list[Any], near: list[Any], asked: Any) -> None:
        self._traffic.by_op[str(func)] += 1
        if func in _READING or (func is _aten.index.Tensor and _has_bool(far)):
            self._traffic.read += bool(far)
        elif func in _CROSSING:
            target_is_far = asked == FAR if asked is not None else bool(far)
            self._traffic.sent += bool(near) and target_is_far
            self._traffic.read += bool(far) and asked is not None and not target_is_far


def _near(value: Any) -> Any:
    """What the CPU is asked instead."""
    if isinstance(value, FarTensor):
        return value.near
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _has_bool(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.dtype is torch.bool for tensor in tensors[1:])
