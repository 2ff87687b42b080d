"""One cluster for all end-to-end tests: a tiny target in float32, real drafters, real HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drafter_service.checkpoint.writer import write_eagle3
from drafter_service.eagle3.config import Eagle3Config, Rope
from drafter_service.eagle3.head import Eagle3Head
from tests.e2e.live import LiveCluster, free_port, start_cluster
from tests.tiny import tiny_llama_dir

HIDDEN, VOCAB, LAYERS = 64, 384, 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a cluster of their own go first: the shared one, once started, takes its part of
    the cores until the end."""
    items.sort(key=lambda item: "live" in getattr(item, "fixturenames", ()))


def tiny_head_dir(path: Path, target: Path) -> Path:
    """A random EAGLE-3 head for the tiny target: real in every way but its quality."""
    config = Eagle3Config(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        aux_layers=tuple(range(LAYERS)),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        rope=Rope(theta=10000.0),
        norm_eps=1e-5,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB // 2,
    )
    torch.manual_seed(0)
    head = Eagle3Head(config, torch.arange(0, VOCAB, 2))
    path.mkdir()
    write_eagle3(path, head, target.name, torch.float32)
    return path


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, float32."""
    return tiny_llama_dir(tmp_path_factory.mktemp("target") / "tiny-llama")


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Iterator[LiveCluster]:
    """The running cluster; the clean Ctrl-C at its end is part of the test."""
    directory = tmp_path_factory.mktemp("live")
    head = tiny_head_dir(directory / "head", tiny_target)
    small = {"num_cpus": 0.1}
    config = {
        "models": ["tiny"],
        "verifier": {
            "target": str(tiny_target),
            "dtype": "fp32",
            "num_threads": 1,
            "replicas": 2,
            "engine": {
                "page_size": 16,
                "num_slots": 8192,
                "max_running": 8,
                "min_agreement": 0,  # random heads guess nothing
            },
            "placement": small,
            "traces": {"dir": str(directory / "traces"), "max_mb": 8},
        },
        "drafters": [
            {
                "name": "eagle3",
                "kind": "eagle3",
                "checkpoint": str(head),
                "dtype": "fp32",
                "placement": small,
            },
            {
                "name": "here",
                "kind": "eagle3",
                "checkpoint": str(head),
                "dtype": "fp32",
                "colocated": True,
            },
            {
                "name": "scaled",
                "kind": "ngram",
                "idle_session_s": 2,
                "drain_s": 2,
                "placement": small,
                "autoscaling": {
                    "min_replicas": 1,
                    "max_replicas": 2,
                    "target_sessions": 3,
                    "upscale_delay_s": 0.5,
                    "downscale_delay_s": 1,
                    "look_back_s": 2,
                },
            },
        ],
        "router": {"period_s": 0.5, "silence_s": 10},
        "http": {"placement": small, "max_requests": 64},
    }
    cluster = start_cluster(config, directory, free_port())
    yield cluster
    if cluster.process.poll() is None:
        assert cluster.stop() == 0
