"""Training-time test: its mask and its rows."""

import pytest
import torch

from drafter_service.eagle3.reference import draft_rows
from drafter_service.training.ttt import unroll
from drafter_service.training.ttt_attention import TttAttention, mask_by_definition
from tests.unit.drafter.training_fakes import (
    tiny_batch,
    tiny_head,
    tiny_records,
)


def _collect(head, batch, num_steps, keep=None):
    outputs = []

    def after(output):
        outputs.append(output)
        return None if keep is None else keep(output)

    with torch.no_grad():
        unroll(head, batch, num_steps, after)
    return outputs


def test_a_window_counts_back_from_the_base_row_and_keeps_later_steps():
    rows = mask_by_definition(4, 1, window=2).int().tolist()
    assert rows[3] == [0, 0, 1, 1, 0, 0, 0, 1]


def test_mask_lets_a_later_step_see_step_zero_and_its_own_row_only():
    rows = mask_by_definition(4, 2).int().tolist()
    assert rows[0] == [1, 0, 0, 0] + [1, 0, 0, 0] * 2
    assert rows[2] == [1, 1, 1, 0] + [0, 0, 1, 0] * 2


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_fast_attention_equals_the_mask_in_plain_loops(step, window):
    torch.manual_seed(0)
    batch = tiny_batch(tiny_records(1), (0,))
    rows = batch.records[0]
    num_prompt, num_answer = rows.prompt.stop, batch.num_rows
    total, heads, kv_heads, dim = num_prompt + num_answer, 4, 2, 8
    keys = [torch.randn(total, kv_heads, dim) for _ in range(step + 1)]
    values = [torch.randn(total, kv_heads, dim) for _ in range(step + 1)]
    queries = torch.randn(total, heads, dim)
    attention = TttAttention(
        batch.records,
        (keys[0][:num_prompt], values[0][:num_prompt]),
        (keys[0][num_prompt:], values[0][num_prompt:]),
        window,
    )
    for later in range(1, step + 1):
        attention.add_step(keys[later][num_prompt:], values[later][num_prompt:])
    fast = attention.attend(queries[num_prompt:], torch.arange(num_answer))

    mask = mask_by_definition(total, step, window)
    k, v = torch.cat(keys), torch.cat(values)
    for row in range(num_prompt, total):
        for head in range(heads):
            scores = k[:, head // 2] @ queries[row, head] * dim**-0.5
            weights = scores.masked_fill(~mask[row], float("-inf")).softmax(-1)
            expected = weights @ v[:, head // 2]
            got = fast[row - num_prompt, head * dim : (head + 1) * dim]
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_row_that_goes_on_alone_computes_what_it_computes_in_company():
    head, records = tiny_head(), tiny_records(6)
    batch = tiny_batch(records, (1, 4, 5))
    everyone = _collect(head, batch, 4)
    some = _collect(head, batch, 4, keep=lambda output: output.rows % (output.step + 2) == 0)
    assert 0 < len(some[3].rows) < len(everyone[3].rows) / 2
    for full, part in zip(everyone, some, strict=True):
        torch.testing.assert_close(part.y, full.y[part.rows], atol=1e-5, rtol=1e-5)


def test_steps_equal_a_draft_recomputed_without_cache():
    head, records = tiny_head(), tiny_records(3)
    batch = tiny_batch(records, (2,))
    record, row = records[2], 3
    outputs = _collect(head, batch, 3)
    features = torch.cat([batch.prompt_features, batch.features])
    num_committed = record.prompt_len + row
    ids = torch.from_numpy(record.ids)
    drafts = ids[num_committed + 1 : num_committed + 3].tolist()
    with torch.no_grad():
        expected = draft_rows(head, features[:num_committed], ids[1 : num_committed + 1], drafts)
    for step in range(3):
        torch.testing.assert_close(
            outputs[step].y[row], expected.y[num_committed - 1 + step], atol=1e-5, rtol=1e-5
        )
