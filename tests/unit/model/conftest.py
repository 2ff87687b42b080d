"""Tiny targets shared by the tests of the model, loaded once per session."""

from collections.abc import Callable

import pytest
import torch

from tests.tiny import tiny_llama_dir, tiny_qwen3_dir
from tests.unit.model.stepping import NUM_SLOTS
from verifier_service.model.load import load_target
from verifier_service.model.target import TransformersTarget

TINY = {"llama": tiny_llama_dir, "qwen3": tiny_qwen3_dir}


@pytest.fixture(scope="session")
def tiny_dirs(tmp_path_factory):
    """Directory of each tiny family."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in TINY.items()}


@pytest.fixture(scope="session")
def tiny_target(tiny_dirs) -> Callable[..., TransformersTarget]:
    """tiny_target(family, dtype, fuse): loaded once, pool allocated."""
    loaded: dict[tuple[str, torch.dtype, bool], TransformersTarget] = {}

    def get(family: str, dtype: torch.dtype, fuse: bool = True) -> TransformersTarget:
        if (family, dtype, fuse) not in loaded:
            target = load_target(tiny_dirs[family], dtype, num_threads=2, fuse=fuse)
            target.allocate(NUM_SLOTS)
            loaded[family, dtype, fuse] = target
        return loaded[family, dtype, fuse]

    return get
