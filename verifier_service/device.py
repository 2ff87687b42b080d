"""Where a target computes: the device a setting names, and a step's index tensors brought to it.

A step is laid out on the host, in Python and numpy; what the layers read of it crosses in one copy
per element type, however many tensors it is made of. Knows no layout's fields. Invariant: on the
CPU nothing is copied and nothing changes.
"""

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import torch

from protos.errors import ConfigError

T = TypeVar("T")


def resolve_device(name: str) -> torch.device:
    """The device of the setting `auto`, `cpu` or `cuda`; auto takes a GPU where torch finds one.

    Raises ConfigError when a GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device: cuda is not available here")
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, not {name!r}")
    # A replica sees its own GPU as number 0.
    return torch.device("cuda", 0) if has_gpu and name != "cpu" else torch.device("cpu")


def describe_device(device: torch.device) -> str:
    """What decides the kernels that run there, for a fingerprint; "" for the CPU."""
    if device.type != "cuda":
        return "" if device.type == "cpu" else device.type
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return f"{name} sm{major}{minor} cuda{torch.version.cuda}"


def ship(values: T, device: torch.device) -> T:
    """`values` (dataclasses and tuples, nested) with all their host tensors on `device`."""
    if device.type == "cpu":
        return values
    host = list(_tensors(values))
    arrived: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in host):
        own = [tensor for tensor in host if tensor.dtype == dtype]
        packed = torch.cat([tensor.flatten() for tensor in own])
        if device.type == "cuda":
            packed = packed.pin_memory()
        sizes = [tensor.numel() for tensor in own]
        parts = torch.split(packed.to(device, non_blocking=True), sizes)
        for tensor, part in zip(own, parts, strict=True):
            arrived[id(tensor)] = part.view(tensor.shape)
    return _replaced(values, arrived)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name))


def _replaced(value: T, arrived: dict[int, torch.Tensor]) -> T:
    """The same structure with every tensor's copy in its place."""
    if isinstance(value, torch.Tensor):
        return arrived[id(value)]  # type: ignore[return-value]  # a tensor for a tensor
    if isinstance(value, tuple):
        return type(value)(_replaced(item, arrived) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {
            part.name: _replaced(getattr(value, part.name), arrived)
            for part in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **parts)
    return value
