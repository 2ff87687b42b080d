"""EAGLE-1 training: its losses are EAGLE's, its noise belongs to rows, its file is read again."""

import json
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.eagle3_reader import SharedWeights
from drafter_service.checkpoint.eagle_reader import eagle_head_of
from drafter_service.checkpoint.eagle_writer import write_eagle
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.eagle3.config import LayerFacts, Rope
from drafter_service.training.cli import main
from drafter_service.training.eagle_loss import (
    EagleLoss,
    EagleLossShape,
    TokenLoss,
    TopTokenLoss,
    feature_losses,
    noised,
)
from drafter_service.training.loss import restricted_loss
from drafter_service.training.ttt import unroll
from protos.errors import CheckpointError
from tests.tiny import tiny_llama_dir
from tests.unit.drafter.training_fakes import (
    HIDDEN,
    VOCAB,
    draft_index_of,
    one_record_batch,
    tiny_batch,
    tiny_records,
)
from tests.unit.drafter_service.eagle3_cases import tiny_eagle_head

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden" / "eagle"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden/eagle is not here")
RECORDS = tiny_records(6)


@needs_golden
def test_losses_and_gradient_equal_eagles_training_code():
    directory = GOLDEN / "eagle1_safeailab_bias"
    io = load_file(directory / "io.safetensors")
    target = load_file(directory / "target.safetensors")
    lm_head = target["lm_head.weight"]
    shared = SharedWeights(target["model.embed_tokens.weight"], lm_head)
    head = eagle_head_of(describe(directory), directory, shared, torch.float32)
    head.fc.weight.requires_grad_(True)
    everything = TokenLoss(lm_head, torch.arange(512), from_final=True)
    mask = io["train.loss_mask"]
    parts = []
    for shape in (EagleLossShape(1.0, 0.0, 0.0), EagleLossShape(0.0, 1.0, 0.0)):
        total = torch.zeros(())
        for text in range(2):
            final = io["train.target_features"][text]
            choices = (final @ lm_head.T).argmax(-1).masked_fill(mask[text] == 0, -1)
            features, ids = io["train.features"][text], io["train.next_ids"][text]
            batch = one_record_batch(features, ids, final, choices)
            total = total + EagleLoss(head, everything, shape)(batch, 0).total
        parts.append(total / (mask.sum() + 1e-5))
    feature_loss, token_loss = parts
    torch.testing.assert_close(feature_loss.detach(), io["train.feature_loss"])
    torch.testing.assert_close(token_loss.detach(), io["train.token_loss"])
    total = feature_loss + 0.1 * token_loss
    torch.testing.assert_close(total.detach(), io["train.total_loss"])
    (gradient,) = torch.autograd.grad(total, (head.fc.weight,))
    expected = io["train.grad.fc.weight"]
    scale = expected.abs().max()
    torch.testing.assert_close(gradient / scale, expected / scale, atol=1e-3, rtol=0)


def _final_batch(indices):
    """A batch whose features are one final state per row, as the recipe reads them."""
    batch = tiny_batch(RECORDS, indices)
    return replace(
        batch,
        features=batch.features[:, :HIDDEN],
        prompt_features=batch.prompt_features[:, :HIDDEN],
    )


def test_noise_of_a_row_depends_on_the_update_and_the_row_alone():
    together, alone = _final_batch((1, 4, 5)), _final_batch((4,))
    rows = together.records[1]
    prompt, features = noised(together, 7, 0.2)
    prompt_alone, features_alone = noised(alone, 7, 0.2)
    assert torch.equal(features[rows.answer], features_alone)
    assert torch.equal(prompt[rows.prompt], prompt_alone)
    assert not torch.equal(noised(alone, 8, 0.2)[1], features_alone)


def test_noise_is_uniform_and_wider_for_shorter_records():
    batch = _final_batch((0, 1, 2, 3, 4, 5))
    prompt, features = noised(batch, 3, 0.2)
    for rows, record in zip(batch.records, RECORDS, strict=True):
        width = 0.2 * 512 / len(record.ids)
        noise = (features - batch.features)[rows.answer] / width
        assert noise.abs().max() <= 0.5
        assert noise.abs().max() > 0.45
        assert noise.mean().abs() < 0.1
        if rows.prompt.stop > rows.prompt.start:
            assert (prompt - batch.prompt_features)[rows.prompt].abs().max() <= width / 2
    distinct = (features - batch.features).flatten().unique()
    assert len(distinct) > 0.9 * features.numel()


def _guesses(head, batch):
    outputs = []
    unroll(head, batch, 1, outputs.append)
    return outputs[0].y


@pytest.mark.parametrize("from_final", [True, False])
def test_tokens_are_compared_on_the_ids_asked_for(from_final):
    batch = _final_batch((1, 4))
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4))
    kept = torch.arange(0, VOCAB, 2)
    y = torch.randn(batch.num_rows, HIDDEN, requires_grad=True)
    tokens = TokenLoss(lm_head[kept], draft_index_of(kept, VOCAB), from_final)
    rows = (batch.choices >= 0).nonzero()[:, 0]
    total, hits, counted = tokens(y[rows], batch, rows)
    included = rows[batch.choices[rows] % 2 == 0]
    if from_final:
        probs = (batch.final[included] @ lm_head[kept].T).softmax(-1)
    else:
        probs = torch.zeros(len(included), VOCAB)
        probs.scatter_(1, batch.top_ids[included], batch.top_logps[included].exp())
        probs = probs[:, kept] / probs[:, kept].sum(-1, keepdim=True)
    logits = y[included] @ lm_head[kept].T
    expected = restricted_loss(logits, probs).sum()
    assert counted == len(included) == len(hits)
    torch.testing.assert_close(total, expected)
    (gradient,) = torch.autograd.grad(total, (y,))
    (defined,) = torch.autograd.grad(expected, (y,))
    torch.testing.assert_close(gradient, defined, atol=1e-5, rtol=1e-4)


def test_recorded_ids_alone_are_compared_when_asked_for():
    batch = _final_batch((2,))
    lm_head = torch.randn(VOCAB, HIDDEN)
    y, rows = torch.randn(batch.num_rows, HIDDEN), torch.arange(batch.num_rows)
    total, hits, counted = TopTokenLoss(lm_head)(y, batch, rows)
    expected = 0.0
    for row in range(batch.num_rows):
        logits = lm_head[batch.top_ids[row]] @ y[row]
        expected -= float(batch.top_logps[row].softmax(-1) @ logits.log_softmax(-1))
        assert hits[row] == (logits.argmax() == 0)
    assert total.item() == pytest.approx(expected, rel=1e-5)
    assert counted == batch.num_rows


def test_a_batch_adds_up_from_its_records_and_spares_what_follows_the_end():
    layer = LayerFacts(HIDDEN, 4, 2, 8, 32, 1e-5)
    head = tiny_eagle_head(layer=layer, vocab_size=VOCAB)
    loss = EagleLoss(head, TopTokenLoss(head.lm_head.weight.detach()), EagleLossShape())
    total = loss(_final_batch((1, 4, 5)), 3).total.item()
    assert total == pytest.approx(
        sum(loss(_final_batch((index,)), 3).total.item() for index in (1, 4, 5)), rel=1e-5
    )
    batch = _final_batch((4,))
    ended = replace(batch, choices=batch.choices.index_fill(0, torch.tensor([2]), -1))
    quiet = EagleLoss(head, TopTokenLoss(head.lm_head.weight.detach()), EagleLossShape(1.0, 0, 0))
    missing = quiet(batch, 0).total.item() - quiet(ended, 0).total.item()
    y = _guesses(head, batch)
    expected = feature_losses(y, batch.final)[2].item()
    assert missing == pytest.approx(expected, rel=1e-3)


def test_a_scaled_rope_is_not_written(tmp_path):
    head = tiny_eagle_head()
    head.config = replace(head.config, rope=Rope(theta=1e4, kind="linear", factor=2.0))
    with pytest.raises(CheckpointError, match="linear"):
        write_eagle(tmp_path, head)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("eagle")
    tiny_llama_dir(root / "target", vocab=64, hidden=32)
    rng = np.random.default_rng(0)
    with (root / "answers.msgpack").open("wb") as stream:
        header = {"format": "outrider-answers", "vocab_size": 64, "records": 12}
        stream.write(msgpack.packb(header))
        for number in range(12):
            prompt, answer = rng.integers(3, 64, 5 + number), rng.integers(3, 64, 20 - number)
            parts = {"p": prompt.astype("<u2").tobytes(), "r": answer.astype("<u2").tobytes()}
            stream.write(msgpack.packb(parts))
    settings = {
        "answers": str(root / "answers.msgpack"),
        "target": str(root / "target"),
        "features": str(root / "features"),
        "run": str(root / "run"),
        "record_layers": [0, 1, 2],
        "head": {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48, "num_layers": 2},
        "rows_per_update": 64,
        "held_out_share": 0.2,
        "warmup_updates": 1,
        "epochs": 1,
        "threads": torch.get_num_threads(),
    }
    (root / "eagle.yaml").write_text(yaml.safe_dump(settings))
    command = ["eagle", "--config", str(root / "eagle.yaml"), "--output", str(root / "head")]
    assert main(command) == 0
    return root, settings


def test_the_trained_head_is_read_as_eagles_and_drafts(trained):
    root, _ = trained
    target = read_target_weights(root / "target")
    described = describe(root / "head")
    assert (described.kind, described.format) == ("eagle", "safeailab")
    assert not described.own_embedding
    assert not described.own_lm_head
    shared = SharedWeights(target.embed_tokens, target.lm_head)
    head = eagle_head_of(described, root / "head", shared, torch.float32)
    assert head.config.num_layers == 2
    told = json.loads((root / "head" / "provenance.json").read_text())
    assert len(told["held_out"]["accuracy"]) == 5
    assert told["held_out"]["num_rows"][0] > 20


def test_training_goes_on_from_an_exported_head(trained):
    root, settings = trained
    settings = settings | {"run": str(root / "again"), "peak_rate": 1e-9}
    (root / "again.yaml").write_text(yaml.safe_dump(settings))
    command = ["eagle", "--config", str(root / "again.yaml"), "--stage", "train"]
    assert main([*command, "--warm-from", str(root / "head")]) == 0
    before = load_file(root / "head" / "model.safetensors")
    after = load_file(root / "again" / "best.safetensors")
    torch.testing.assert_close(
        after["fc.weight"].float(), before["fc.weight"].float(), atol=1e-2, rtol=0
    )
    settings["head"] = settings["head"] | {"num_layers": 1}
    (root / "again.yaml").write_text(yaml.safe_dump(settings | {"run": str(root / "other")}))
    assert main([*command, "--warm-from", str(root / "head")]) == 1
