"""The tiny targets are fit for the tests that lean on them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_llama_dir, tiny_qwen3_dir

PROMPTS = ([5, 6, 7], [17], [3, 200, 150, 9, 81])


@pytest.mark.parametrize("make", [tiny_llama_dir, tiny_qwen3_dir])
def test_greedy_text_has_at_least_20_distinct_tokens_in_64(make, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make(tmp_path))
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None
        )
        assert len(set(ids[0, len(prompt) :].tolist())) >= 20


def test_text_round_trips_through_the_byte_tokenizer(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir(tmp_path))
    text = "héllo  wörld, ab zq 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 384


def test_chat_template_ends_where_the_assistant_speaks(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir(tmp_path))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_same_seed_gives_the_same_weights(tmp_path):
    first = tiny_llama_dir(tmp_path / "a", seed=3) / "model.safetensors"
    second = tiny_llama_dir(tmp_path / "b", seed=3) / "model.safetensors"
    other = tiny_llama_dir(tmp_path / "c", seed=4) / "model.safetensors"
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
