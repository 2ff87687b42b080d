"""Grammar masks on a foreign device: the same rows and the same choices as on the CPU."""

import random

import torch

from tests.unit.device.foreign.far_device import FAR, far_device
from tests.unit.engine.test_grammar_neighbours import VOCAB, some_rows
from verifier_service.sampling.choice import choose
from verifier_service.sampling.choice_batch import choose_batch
from verifier_service.sampling.shaping import shape_logits


def test_rows_with_grammars_are_those_of_the_cpu():
    rows, _ = some_rows(random.Random(6), 24)
    pasts = [row.past for row in rows if row.past is not None]
    positions = [row.position for row in rows]
    logits = 3.0 * torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(2))
    own = shape_logits(logits, [row.row for row in rows], pasts, positions)
    chosen = choose(logits, rows)
    with far_device():
        there = shape_logits(logits.to(FAR), [row.row for row in rows], pasts, positions)
        assert torch.equal(there.cpu(), own)
        assert choose_batch(logits.to(FAR), rows) == chosen
