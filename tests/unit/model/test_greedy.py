"""Greedy ids through paged tree attention are transformers' own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.model.stepping import greedy

PROMPTS = ([5, 6, 7], [17], list(range(60, 123)), list(range(70, 135)))


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_ids_equal_generate_in_float32(tiny_dirs, tiny_target, family, fuse):
    model = AutoModelForCausalLM.from_pretrained(tiny_dirs[family])
    target = tiny_target(family, torch.float32, fuse)
    for prompt in PROMPTS:
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=80, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        assert greedy(target, prompt, 80) == expected
        assert len(set(expected)) >= 20


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_bf16_logits_differ_from_the_modules_by_rounding_only(tiny_target, family):
    # The stated difference: a few units of bf16's last place at the logits' own magnitude.
    from tests.unit.model.stepping import contiguous

    span = contiguous(range(100, 200)).span(0, 100)
    fused = tiny_target(family, torch.bfloat16, True).forward([span]).float()
    modules = tiny_target(family, torch.bfloat16, False).forward([span]).float()
    exact = tiny_target(family, torch.float32, True).forward([span])
    scale = exact.abs().max()
    assert (fused - exact).abs().max() < 0.05 * scale
    assert (fused - modules).abs().max() < 0.05 * scale
