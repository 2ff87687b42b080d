"""The load-time trial finds a kernel whose rows depend on their company."""

import pytest
import torch

from verifier_service.model import sdpa
from verifier_service.model.heads import AttentionShape
from verifier_service.model.sdpa_trial import fault_of_kernel

SHAPE = AttentionShape(4, 2, 16, 4)


def exact(asked, keys, values, attn_mask=None, scale=1.0):
    """Rows one by one, keys one by one in their lanes and pairs: the claim, in float64 sums that
    do not round."""
    scores = asked.double() @ keys.double().transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask.double()
    # Coarse weights: every sum of them is exact, in whatever order it is made.
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)).mul(2**10).round()
    mixed = weights @ values.mul(2**6).round().double()
    return (mixed / weights.sum(-1, keepdim=True) / 2**6).to(asked.dtype)


def test_a_kernel_that_keeps_rows_apart_passes(monkeypatch):
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", exact)
    assert fault_of_kernel(SHAPE, torch.bfloat16) == ""


def by_row_count(*args, **kwargs):
    found = exact(*args, **kwargs)
    return found if found.shape[2] > 8 else found * 1.01


def by_batch(*args, **kwargs):
    found = exact(*args, **kwargs)
    return found if found.shape[0] == 1 else found * 1.01


def by_key_count(*args, **kwargs):
    found = exact(*args, **kwargs)
    return found if args[1].shape[2] != 64 else found * 1.01


def wrong(*args, **kwargs):
    return exact(*args, **kwargs) * 1.5


def blind(asked, keys, values, attn_mask=None, scale=1.0):
    """Treats what is behind a branch as seen by all."""
    if attn_mask is not None and asked.shape[0] > 1:
        attn_mask = torch.zeros_like(attn_mask)
    return exact(asked, keys, values, attn_mask, scale)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (by_row_count, "differ from the rows of a longer chunk"),
        (by_key_count, "differ from the rows of a longer chunk"),
        (by_batch, "several requests"),
        (blind, "several requests"),
        (wrong, "of the largest off"),
    ],
)
def test_a_kernel_whose_rows_depend_on_company_is_found(monkeypatch, kernel, words):
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", kernel)
    assert words in fault_of_kernel(SHAPE, torch.bfloat16)


def by_column(asked, keys, values, attn_mask=None, scale=1.0):
    """Sums that round differently where hidden keys stand between."""
    found = exact(asked, keys, values, attn_mask, scale)
    if attn_mask is None:
        return found
    seen = attn_mask == 0
    gaps = (seen[..., 1:] & ~seen[..., :-1]).sum(-1)[..., None]
    return torch.where(gaps > 0, found * 1.01, found)


def many_rows(asked, keys, values, attn_mask=None, scale=1.0):
    """Another kernel for many rows, as real ones have, that minds copied keys."""
    if asked.shape[2] < 64:
        return exact(asked, keys, values, attn_mask, scale)
    return by_column(asked, keys, values, attn_mask, scale)


def test_a_kernel_for_many_rows_that_minds_gaps_is_found_too(monkeypatch):
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", many_rows)
    assert "tree" in fault_of_kernel(SHAPE, torch.bfloat16)


def behind_windows(asked, keys, values, attn_mask=None, scale=1.0):
    """Sums that round differently where the first keys of a row are hidden."""
    found = exact(asked, keys, values, attn_mask, scale)
    if attn_mask is None or asked.shape[2] > 64 or keys.shape[2] <= 576:
        return found
    return torch.where((attn_mask[..., :64] != 0).all(-1)[..., None], found * 1.01, found)


def test_a_kernel_that_minds_windows_is_found(monkeypatch):
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", behind_windows)
    assert "window of 300" in fault_of_kernel(SHAPE, torch.bfloat16)


def test_a_kernel_that_minds_gaps_between_keys_is_found_by_trees(monkeypatch):
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", by_column)
    assert "tree" in fault_of_kernel(SHAPE, torch.bfloat16)
