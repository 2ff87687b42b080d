"""EagleHead and its trees against tensors made by the public EAGLE code (shared/golden/eagle)."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.eagle3_reader import SharedWeights
from drafter_service.checkpoint.eagle_reader import eagle_head_of
from drafter_service.eagle3.reference import draft_rows
from protos.features import FINAL_LAYER

CASE = "eagle1_safeailab_bias"


def load_head(directory, target):
    shared = SharedWeights(target["model.embed_tokens.weight"], target["lm_head.weight"])
    return eagle_head_of(describe(directory), directory, shared, torch.float32)


@pytest.fixture(scope="module")
def case(golden_dir):
    directory = golden_dir / "eagle" / CASE
    head = load_head(directory, load_file(directory / "target.safetensors"))
    return head, load_file(directory / "io.safetensors")


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_the_description_says_what_the_head_eats(golden_dir):
    described = describe(golden_dir / "eagle" / CASE)
    assert (described.kind, described.aux_layers) == ("eagle", (FINAL_LAYER,))
    assert described.projection is None
    assert (described.own_embedding, described.own_lm_head) == (True, False)


def test_prefill_equals_the_public_implementation(case):
    head, io = case
    close(head.mix(io["prefill.next_ids"], io["prefill.features"]), io["prefill.fused"])
    rows = draft_rows(head, io["prefill.features"], io["prefill.next_ids"])
    close(rows.y, io["prefill.hidden"])
    close(rows.logits, io["prefill.logits"])


def test_chain_and_resume_equal_the_public_implementation(case):
    head, io = case
    drafts = io["chain.tokens"].tolist()
    rows = draft_rows(head, io["prefill.features"], io["prefill.next_ids"], drafts)
    close(rows.y[-len(drafts) :], io["chain.hidden"])
    close(rows.logits[-len(drafts) :], io["chain.logits"])
    features = torch.cat([io["prefill.features"], io["resume.features"]])
    ids = torch.cat([io["prefill.next_ids"], io["resume.next_ids"]])
    drafts = io["resume_chain.tokens"].tolist()
    rows = draft_rows(head, features, ids, drafts)
    close(rows.logits[len(io["prefill.next_ids"]) : -len(drafts)], io["resume.logits"])
    close(rows.logits[-len(drafts) :], io["resume_chain.logits"])


def test_embedding_and_lm_head_are_taken_from_the_target(golden_dir, tmp_path, case):
    """A file without its embedding drafts the same, and one without a bias drafts otherwise."""
    head, io = case
    source = golden_dir / "eagle" / CASE
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    tensors = load_file(source / "model.safetensors")
    target = load_file(source / "target.safetensors")
    target["model.embed_tokens.weight"] = tensors.pop("embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    expected = draft_rows(head, io["prefill.features"], io["prefill.next_ids"]).logits
    again = load_head(tmp_path, target)
    assert torch.equal(
        draft_rows(again, io["prefill.features"], io["prefill.next_ids"]).logits, expected
    )
    tensors.pop("fc.bias")
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"bias": False}))
    bare = load_head(tmp_path, target)
    logits = draft_rows(bare, io["prefill.features"], io["prefill.next_ids"]).logits
    assert (logits - expected).abs().max() > 0.1
