"""Tiny random targets as Hugging Face directories, for tests that need a real model quickly.

Each function writes config, safetensors weights (float32), generation config and a byte-level
tokenizer with a chat template, and returns the directory. Nothing is downloaded and nothing is
random beyond `seed`: the same arguments give the same bytes. Weights are scaled so that greedy
text wanders instead of repeating itself (at least 20 distinct tokens in 64; tested in
tests/unit/model/test_tiny.py).
"""

from itertools import product
from pathlib import Path
from string import ascii_lowercase

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2. <|im_end|> is the models' EOS, <|endoftext|> their BOS."""
EOS_ID = 2
MIN_TEXT_VOCAB = len(SPECIALS) + 256
"""Below this many ids there is no room for all bytes and no tokenizer is written."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_llama_dir(
    path: Path,
    seed: int = 0,
    vocab: int = 384,
    hidden: int = 64,
    layers: int = 3,
    max_context: int = 2048,
) -> Path:
    """A random Llama with grouped heads (4 query, 2 key-value) in directory `path`."""
    config = LlamaConfig(**_sizes(vocab, hidden, layers, max_context))
    return write_tiny(config, path, seed)


def tiny_qwen3_dir(
    path: Path,
    seed: int = 0,
    vocab: int = 384,
    hidden: int = 64,
    layers: int = 3,
    max_context: int = 2048,
) -> Path:
    """A random Qwen3 (norms on queries and keys, head_dim apart from hidden size) in `path`."""
    sizes = _sizes(vocab, hidden, layers, max_context) | {"head_dim": 32}
    return write_tiny(Qwen3Config(**sizes), path, seed)


def byte_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of exactly `vocab` ids: specials, bytes, then two-letter pieces."""
    alphabet = sorted(ByteLevel.alphabet())
    pieces = {token: number for number, token in enumerate((*SPECIALS, *alphabet))}
    merges = []
    for left, right in product(ascii_lowercase, repeat=2):
        if len(pieces) == vocab:
            break
        merges.append((left, right))
        pieces[left + right] = len(pieces)
    core = Tokenizer(BPE(vocab=pieces, merges=merges))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = ByteLevelDecoder()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[EOS_ID],
        pad_token=SPECIALS[0],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _sizes(vocab: int, hidden: int, layers: int, max_context: int) -> dict[str, object]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": max_context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }


def write_tiny(config: PreTrainedConfig, path: Path, seed: int) -> Path:
    """A random model of any `config` as a directory, with a tokenizer where there is room."""
    path.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                middle = 0.0 if name.endswith("bias") else 1.0
                weight.copy_(middle + 0.2 * torch.randn(weight.shape, generator=generator))
                continue
            gain = 1.0 if "embed" in name or "wte" in name else 1.3 * weight.shape[1] ** -0.5
            weight.copy_(gain * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(path)
    vocab = config.get_text_config().vocab_size
    if vocab >= MIN_TEXT_VOCAB:
        byte_tokenizer(vocab).save_pretrained(path)
    return path
