"""The embedded default target: converted once, then a target like others."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protos.errors import ConfigError
from tests.unit.model.stepping import contiguous, greedy, paged
from verifier_service.model import embedded, gguf
from verifier_service.model.embedded import (
    default_cache_dir,
    ensure_embedded_target,
    ensure_target,
)
from verifier_service.model.load import load_target
from verifier_service.step import Span


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    target = load_target(smollm2_dir, torch.bfloat16, num_threads=2)
    target.allocate(1024)
    return target


@pytest.fixture(scope="module")
def prompt(smollm2_dir):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    return list(ids)


def test_smollm2_is_invariant_in_bf16(smollm2):
    assert smollm2.facts.invariant, smollm2.facts.invariance_note
    assert smollm2.facts.bytes_per_slot == 23_040


def test_smollm2_greedy_ids_equal_generate_in_float32(smollm2_dir, prompt):
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    del model
    # On two threads float32 is not invariant on every machine, and says so.
    target = load_target(smollm2_dir, torch.float32, num_threads=1)
    assert target.facts.invariant, target.facts.invariance_note
    target.allocate(256)
    expected = expected[0, len(prompt) :].tolist()
    assert greedy(target, prompt, len(expected)) == expected


def test_smollm2_tree_on_scattered_slots_equals_plain_decoding(smollm2, prompt):
    continuation = greedy(smollm2, prompt, 8)
    ids = [*prompt, *continuation]
    start = len(prompt)
    plain = smollm2.forward([contiguous(ids).span(0, len(ids))])[start:]
    request = paged(ids, page=16, high=1024)
    smollm2.forward([request.span(0, start, 0)])
    # The true continuation at rows 0, 1, 3, 5; a lie beside each.
    tokens = (ids[start], ids[start + 1], 7, ids[start + 2], 8, ids[start + 3], 9)
    parents = (-1, 0, 0, 1, 1, 3, 3)
    logits = smollm2.forward([Span(1, tokens, start, request.slots[: start + 7], parents, 7)])
    assert torch.equal(logits[[0, 1, 3, 5]], plain[:4])


def test_the_directory_is_written_once(smollm2_dir, monkeypatch):
    def refuse(*_):
        raise AssertionError("converted twice")

    monkeypatch.setattr(gguf, "_convert", refuse)
    assert ensure_embedded_target() == ensure_target("embedded") == smollm2_dir
    assert smollm2_dir.parent == default_cache_dir()


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"outrider\[local\]"):
        ensure_embedded_target(tmp_path)
