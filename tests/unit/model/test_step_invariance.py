"""A token's logits depend on its own prefix alone, bit for bit, on CPU in float32 and bf16.

Baseline everywhere: plain decoding, one row per step, contiguous slots, alone.
"""

import random

import pytest
import torch

from tests.unit.model.stepping import (
    NUM_SLOTS,
    contiguous,
    paged,
    path_to,
    random_parents,
    step_by_step,
)
from verifier_service.step import Span

LENGTH = 140
BORDERS = (5, 62, 63, 64, 65, 100, 126, 127, 128, 129)
IDS = tuple(random.Random(11).randrange(384) for _ in range(LENGTH))


@pytest.fixture(
    params=[
        ("llama", torch.float32, True),
        ("llama", torch.bfloat16, True),
        ("llama", torch.bfloat16, False),
        ("qwen3", torch.float32, False),
        ("qwen3", torch.bfloat16, True),
    ],
    ids=lambda p: f"{p[0]}-{str(p[1])[6:]}-{'fused' if p[2] else 'modules'}",
    scope="module",
)
def case(request, tiny_target):
    target = tiny_target(*request.param)
    assert target.facts.invariant, target.facts.invariance_note
    return target, step_by_step(target, IDS)


@pytest.mark.parametrize("length", [1, *BORDERS])
def test_prompt_in_one_chunk_equals_one_token_at_a_time(case, length):
    target, plain = case
    whole = target.forward([contiguous(IDS).span(0, length)])
    assert torch.equal(whole, plain[:length])


@pytest.mark.parametrize("seed", range(6))
def test_any_chunking_on_any_pages_equals_one_token_at_a_time(case, seed):
    target, plain = case
    rng = random.Random(seed)
    request = paged(IDS, page=(1, 16, 64)[seed % 3], seed=seed)
    done = 0
    while done < LENGTH:
        end = min(LENGTH, done + rng.choice((1, 2, 7, 31, 64, 65)))
        assert torch.equal(target.forward([request.span(done, end)]), plain[done:end])
        done = end


def test_single_steps_on_scattered_slots_equal_contiguous_ones(case):
    target, plain = case
    request = paged(IDS, page=16, seed=3)
    target.forward([request.span(0, 60, 0)])
    for start in range(60, 70):
        assert torch.equal(target.forward([request.span(start, start + 1)]), plain[start, None])


def test_logits_alone_equal_logits_among_eight_other_spans(case):
    target, plain = case
    rng = random.Random(5)
    others = []
    for number in range(8):
        ids = tuple(rng.randrange(384) for _ in range(120))
        low = 256 + number * 192
        other = paged(ids, page=16, seed=number, low=low, high=low + 192, key=2 + number)
        end = rng.randrange(20, 110)
        target.forward([other.span(0, end, 0)])
        kind = number % 4
        if kind == 3:
            parents = random_parents(rng, 9, 4)
            tokens = tuple(rng.randrange(384) for _ in parents)
            others.append(Span(other.key, tokens, end, other.slots[: end + 9], parents, 3))
        else:
            others.append(other.span(end, end + (1, 1, 5)[kind], 1))
    own = contiguous(IDS)
    for start, end in ((1, 2), (63, 64), (64, 65), (70, 90), (127, 128)):
        target.forward([own.span(0, start, 0)])
        mine = own.span(start, end)
        position = rng.randrange(9)
        spans = [*others[:position], mine, *others[position:]]
        logits = target.forward(spans)
        offset = sum(span.num_logits for span in spans[:position])
        assert torch.equal(logits[offset : offset + end - start], plain[start:end])


@pytest.mark.parametrize(
    ("start", "page"), [(start, (1, 16, 64, None)[i % 4]) for i, start in enumerate(BORDERS)]
)
def test_every_node_of_a_random_tree_equals_plain_decoding_of_its_path(case, start, page):
    target, plain = case
    rng = random.Random(1000 * start + (page or 0))
    parents = random_parents(rng, 24, 9)
    tokens = (IDS[start], *(rng.randrange(384) for _ in parents[1:]))
    ids = IDS[:start] + tokens
    request = contiguous(ids) if page is None else paged(ids, page, seed=start, high=600)
    target.forward([request.span(0, start, 0)])
    tree = Span(1, tokens, start, request.slots, parents, len(parents), request.first_slot)
    logits = target.forward([tree])
    assert torch.equal(logits[0], plain[start])
    scratch = torch.arange(NUM_SLOTS - 100, NUM_SLOTS)
    for leaf in set(range(len(parents))) - set(parents):
        path = path_to(parents, leaf)
        for depth, row in enumerate(path):
            slots = torch.cat([request.slots[:start], scratch[: depth + 1]])
            one = Span(1, (tokens[row],), start + depth, slots, None, 1)
            assert torch.equal(target.forward([one])[0], logits[row])


@pytest.mark.parametrize("start", [40, 63, 120])
def test_decoding_goes_on_as_plain_after_an_accepted_path_was_moved(case, start):
    target, plain = case
    rng = random.Random(start)
    # Rows 0, 2, 5, 7 carry the true continuation, the others lie.
    parents = (-1, 0, 0, 1, 2, 2, 3, 5, 5)
    truth = {0: 0, 2: 1, 5: 2, 7: 3}
    tokens = tuple(
        IDS[start + truth[row]] if row in truth else rng.randrange(384)
        for row in range(len(parents))
    )
    request = paged(IDS, page=16, seed=start)
    target.forward([request.span(0, start, 0)])
    logits = target.forward(
        [Span(1, tokens, start, request.slots[: start + 9], parents, len(parents))]
    )
    assert torch.equal(logits[list(truth)], plain[start : start + 4])
    rows = torch.tensor(list(truth))
    target.move(request.slots[start + rows], request.slots[start : start + 4])
    for position in range(start + 4, start + 12):
        step = target.forward([request.span(position, position + 1)])
        assert torch.equal(step[0], plain[position])
