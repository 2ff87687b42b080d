"""A target's weights, recorded answers and their features, all random, of the sizes of the real.

Time does not depend on what is learnt, so nothing needs to be recorded to measure a recipe. Sizes
are the embedded default's. Knows no recipe.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, LAYERS, NUM_TOP = 576, 49152, (1, 14, 26), 64
PROMPT = 60
SHORTEST, LONGEST = 60, 260
FIRST_ID = 17  # ids below are reserved
TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class World:
    """Where everything lies; what `TrainSettings` asks for."""

    answers: Path
    target: Path
    features: Path
    run: Path


def write_world(
    directory: Path, answer_rows: int, hidden: int = HIDDEN, vocab: int = VOCAB
) -> World:
    """Answers of at least `answer_rows` tokens in all; ids as frequent as words are (Zipf)."""
    world = World(*(directory / name for name in ("answers.msgpack", "target", "features", "run")))
    directory.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < answer_rows:
        lengths.append(int(rng.integers(SHORTEST, LONGEST)))
    _write_answers(world.answers, rng, lengths, vocab)
    _write_target(world.target, hidden, vocab)
    _write_features(world.features / world.answers.stem, lengths, hidden, vocab)
    return world


def _ids(rng: np.random.Generator, count: int, vocab: int) -> bytes:
    ranks = (rng.pareto(0.9, count) * 20).astype(np.int64)
    return (FIRST_ID + ranks % (vocab - FIRST_ID)).astype("<u2").tobytes()


def _write_answers(path: Path, rng: np.random.Generator, lengths: list[int], vocab: int) -> None:
    header = {"format": "outrider-answers", "vocab_size": vocab, "records": len(lengths)}
    with path.open("wb") as stream:
        stream.write(msgpack.packb(header))
        for length in lengths:
            prompt, answer = _ids(rng, PROMPT, vocab), _ids(rng, length, vocab)
            stream.write(msgpack.packb({"p": prompt, "r": answer}))


def _write_target(directory: Path, hidden: int, vocab: int) -> None:
    directory.mkdir()
    sizes = {"hidden_size": hidden, "vocab_size": vocab}
    (directory / "config.json").write_text(json.dumps(TARGET_CONFIG | sizes))
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocab, hidden, generator=generator).mul_(0.1)
    tensors = {
        "model.embed_tokens.weight": embedding.to(torch.bfloat16),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_features(directory: Path, lengths: list[int], hidden: int, vocab: int) -> None:
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    num_rows = sum(PROMPT + length for length in lengths)
    num_top = sum(length + 1 for length in lengths)
    ranks = torch.rand(num_top, NUM_TOP, generator=generator).pow(-1.1).mul(20).long()
    logps = torch.randn(num_top, NUM_TOP, generator=generator).mul(2).log_softmax(-1)
    tensors = {
        "aux": torch.randn(num_rows, len(LAYERS) * hidden, generator=generator).bfloat16(),
        "final": torch.randn(num_rows, hidden, generator=generator).bfloat16(),
        "top_ids": (FIRST_ID + ranks % (vocab - FIRST_ID)).to(torch.int32),
        "top_logps": logps.sort(-1, descending=True).values.to(torch.float16),
    }
    name = "shard-0000.safetensors"
    save_file(tensors, directory / name)
    records: dict[str, list[object]] = {}
    start = top_start = 0
    for number, length in enumerate(lengths):
        records[str(number)] = [name, start, PROMPT + length, top_start, length + 1]
        start, top_start = start + PROMPT + length, top_start + length + 1
    index = {"aux_layers": list(LAYERS), "hidden_size": hidden, "shards": [name]}
    (directory / "index.json").write_text(json.dumps(index | {"records": records}))
