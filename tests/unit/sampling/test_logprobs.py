"""Log probabilities are the raw distribution's, in float32, whatever rows are asked together."""

import pytest
import torch

from verifier_service.sampling import logprobs
from verifier_service.sampling.logprobs import token_logprobs
from verifier_service.sampling.reference import logprobs_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_values_and_best_ids_equal_the_plain_loops(
    dtype: torch.dtype, num_top: int, monkeypatch: pytest.MonkeyPatch
):
    generator = torch.Generator().manual_seed(num_top)
    # Narrow bf16 ties at every rank; fewer ids than asked for in the second.
    for vocab_size, spread in ((300, 1.0), (7, 0.1), (300, 20.0)):
        logits = (torch.randn(9, vocab_size, generator=generator) * spread).to(dtype)
        rows, tokens = [8, 0, 3, 3], [1, 6, 2, 0]
        expected = [
            logprobs_reference(logits[row], token, num_top)
            for row, token in zip(rows, tokens, strict=True)
        ]
        for most in (2**24, 1):
            monkeypatch.setattr(logprobs, "_MAX_ELEMENTS", most)
            found = token_logprobs(logits, rows, tokens, num_top)
            assert [(each.logprob, list(each.top)) for each in found] == expected


def test_no_rows_have_no_values():
    assert token_logprobs(torch.zeros(1, 4), [], [], 3) == []
