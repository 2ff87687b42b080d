"""Driving a target by hand: slots, spans and plain decoding, for the tests beside this file."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verifier_service.model.target import TransformersTarget
from verifier_service.step import Span

NUM_SLOTS = 2048


@dataclass(frozen=True)
class Request:
    """A request by hand: its ids and the slot of every position."""

    ids: tuple[int, ...]
    slots: torch.Tensor
    first_slot: int | None = None
    key: int = 1

    def span(self, start: int, end: int, num_logits: int | None = None) -> Span:
        """Rows [start, end) as a chunk or chain, logits for all of them by default."""
        count = end - start if num_logits is None else num_logits
        return Span(
            self.key,
            self.ids[start:end],
            start,
            self.slots[:end],
            None,
            count,
            self.first_slot,
        )


def contiguous(ids: Sequence[int], first: int = 1, key: int = 1) -> Request:
    """A sequence in one ascending run of slots."""
    return Request(tuple(ids), torch.arange(first, first + len(ids)), first, key)


def paged(
    ids: Sequence[int], page: int, seed: int = 0, low: int = 1, high: int = NUM_SLOTS, key: int = 1
) -> Request:
    """A sequence on shuffled pages of `page` slots from [low, high)."""
    pages = list(range(-(-low // page), high // page))
    random.Random(seed).shuffle(pages)
    slots = torch.tensor([p * page + i for p in pages for i in range(page)])
    return Request(tuple(ids), slots[: len(ids)], None, key)


def step_by_step(target: TransformersTarget, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), V] of plain decoding: one row per step, contiguous slots."""
    plain = contiguous(ids)
    return torch.cat([target.forward([plain.span(i, i + 1)]) for i in range(len(ids))])


def greedy(target: TransformersTarget, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy ids after `prompt`: one chunk, then anchor-only spans."""
    ids = list(prompt)
    for _ in range(count):
        start = 0 if len(ids) == len(prompt) else len(ids) - 1
        logits = target.forward([contiguous(ids).span(start, len(ids), num_logits=1)])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :]


def random_parents(rng: random.Random, num_nodes: int, depth: int) -> tuple[int, ...]:
    """A random tree of `num_nodes` rows, row 0 the anchor, at most `depth` levels below it."""
    parents, depths = [-1], [0]
    while len(parents) < num_nodes:
        parent = rng.randrange(len(parents))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return tuple(parents)


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the anchor to `row`."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
