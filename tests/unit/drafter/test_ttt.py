"""Training-time test: its mask, its rows, its losses."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.eagle3.reference import draft_rows
from drafter_service.training.loss import restricted_loss
from drafter_service.training.targets import target_probs
from drafter_service.training.ttt import TttAttention, mask_by_definition, unroll
from tests.unit.drafter.training_fakes import (
    one_record_batch,
    tiny_batch,
    tiny_head,
    tiny_records,
)

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden" / "eagle"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden/eagle is not here")


def _collect(head, batch, num_steps, keep=None):
    outputs = []

    def after(output):
        outputs.append(output)
        return None if keep is None else keep(output)

    with torch.no_grad():
        unroll(head, batch, num_steps, after)
    return outputs


def test_mask_lets_a_later_step_see_step_zero_and_its_own_row_only():
    rows = mask_by_definition(4, 2).int().tolist()
    assert rows[0] == [1, 0, 0, 0] + [1, 0, 0, 0] * 2
    assert rows[2] == [1, 1, 1, 0] + [0, 0, 1, 0] * 2


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_fast_attention_equals_the_mask_in_plain_loops(step):
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
    )
    for later in range(1, step + 1):
        attention.add_step(keys[later][num_prompt:], values[later][num_prompt:])
    fast = attention.attend(queries[num_prompt:], torch.arange(num_answer))

    mask = mask_by_definition(total, step)
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


@needs_golden
@pytest.mark.parametrize("case", ["eagle3_safeailab", "eagle3_1_specforge_fcnorm"])
def test_step_losses_equal_the_public_training_code(case):
    directory = GOLDEN / case
    io = load_file(directory / "io.safetensors")
    embedding = load_file(directory / "target.safetensors")["model.embed_tokens.weight"]
    head = read_eagle3_head(directory, embedding, torch.float32, num_target_layers=8)
    num_rows, num_steps = io["ttt.input_ids"].shape[1], len(io["ttt.step_loss"])
    kept = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    kept[head.target_ids] = True
    sums = torch.zeros(num_steps)
    for text in range(2):
        # Ids and target logits move left; what enters on the right is zero. `num_steps` rows are
        # added so that those zeros exist; being to the right, they disturb no real row. In
        # SpecForge's case the ids were shifted before the call, with the same result.
        ids = _shifted(io["ttt.input_ids"][text], num_steps)
        logits = _shifted(io["ttt.target_logits"][text], num_steps)
        features = _padded(io["ttt.features"][text], num_steps)
        mask = _padded(io["ttt.loss_mask"][text], num_steps)
        batch = one_record_batch(features, ids, logits[:, head.target_ids], logits.argmax(-1))
        probs = target_probs(batch.final, torch.eye(head.config.draft_vocab_size))
        for output in _collect(head, batch, num_steps):
            step, real = output.step, slice(0, num_rows)
            real_mask = io["ttt.attention_mask"][text].bool()
            hidden = io[f"ttt.hidden.{step}"][text]
            torch.testing.assert_close(
                output.y[real][real_mask], hidden[real_mask], atol=1e-4, rtol=0
            )
            rows = output.target_rows[real]
            losses = restricted_loss(head.logits(output.y[real]), probs[rows])
            sums[step] += (losses * mask[rows] * kept[batch.choices[rows]]).sum()
    torch.testing.assert_close(sums / (2 * num_rows), io["ttt.step_loss"], atol=1e-4, rtol=0)


@needs_golden
def test_normed_feedback_of_later_steps_equals_speculators():
    directory = GOLDEN / "eagle3_1_speculators"
    io = load_file(directory / "io.safetensors")
    head = read_eagle3_head(directory, None, torch.float32)
    for document in (0, 1):
        rows = (io["ttt.document_ids"] == document).nonzero().flatten()
        ids = io["ttt.next_ids"][rows]
        batch = one_record_batch(
            io["ttt.features"][rows], ids, torch.zeros(len(ids), 1), torch.zeros_like(ids)
        )
        for output in _collect(head, batch, 4):
            expected = io[f"ttt.logits.{output.step}"][0, rows]
            got = head.logits(output.y)
            torch.testing.assert_close(got[output.valid], expected[output.valid], atol=1e-4, rtol=0)


def _padded(values, num):
    return torch.cat([values, values.new_zeros(num, *values.shape[1:])])


def _shifted(values, num):
    return torch.cat([values[1:], values.new_zeros(num + 1, *values.shape[1:])])
