"""The averaged weights of a run's best check, in one file with their score and position.

Knows no recipe. Invariant: the file appears whole or not at all, and its score only grows.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from drafter_service.training.trainer import Position


class Best:
    """One file of trained weights."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def score(self) -> float:
        """Of the weights kept, minus infinity before the first."""
        if not self._path.exists():
            return float("-inf")
        with safe_open(self._path, framework="pt") as stream:
            return float(stream.metadata()["score"])

    def offer(self, net: nn.Module, score: float, position: Position) -> None:
        """Keep the trained weights of `net` if they are better than those kept."""
        if score <= self.score:
            return
        metadata = {"score": repr(score), "position": json.dumps(asdict(position))}
        temporary = self._path.with_suffix(".tmp")
        weights = {
            name: p.detach().contiguous() for name, p in net.named_parameters() if p.requires_grad
        }
        save_file(weights, temporary, metadata=metadata)
        temporary.replace(self._path)

    @torch.no_grad()
    def load_into(self, net: nn.Module) -> Position:
        """Put the weights kept into `net`; where in the run they were found.

        Raises FileNotFoundError before the first check.
        """
        parameters = dict(net.named_parameters())
        for name, weight in load_file(self._path).items():
            parameters[name].copy_(weight)
        with safe_open(self._path, framework="pt") as stream:
            return Position(**json.loads(stream.metadata()["position"]))
