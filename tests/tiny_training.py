"""A tiny target with recorded answers, and a training config for it: seconds from end to end."""

from pathlib import Path

import msgpack
import numpy as np
import yaml

from tests.tiny import tiny_llama_dir

VOCAB, HIDDEN = 64, 32


def write_tiny_answers(path: Path, num_records: int = 12, seed: int = 0) -> Path:
    """Framed msgpack: random prompts and answers of 5 to 20 tokens."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as stream:
        header = {"format": "outrider-answers", "vocab_size": VOCAB, "records": num_records}
        stream.write(msgpack.packb(header))
        for number in range(num_records):
            prompt = rng.integers(3, VOCAB, 5 + number % 12)
            answer = rng.integers(3, VOCAB, 20 - number % 12)
            parts = {"p": prompt.astype("<u2").tobytes(), "r": answer.astype("<u2").tobytes()}
            stream.write(msgpack.packb(parts))
    return path


def tiny_training(root: Path, num_records: int = 12, **changes: object) -> Path:
    """Target, answers and `eagle3.yaml` under `root`; the path of the last."""
    tiny_llama_dir(root / "target", vocab=VOCAB, hidden=HIDDEN)
    write_tiny_answers(root / "answers.msgpack", num_records)
    settings = {
        "answers": str(root / "answers.msgpack"),
        "target": str(root / "target"),
        "features": str(root / "features"),
        "run": str(root / "run"),
        "record_layers": [0, 1, 2],
        "head": {
            "aux_layers": [0, 1, 2],
            "draft_vocab_size": 32,
            "num_heads": 4,
            "num_kv_heads": 2,
            "intermediate_size": 48,
        },
        "rows_per_update": 64,
        "held_out_share": 0.2,
        "warmup_updates": 1,
        "epochs": 2,
        "threads": 1,
    }
    path = root / "eagle3.yaml"
    path.write_text(yaml.safe_dump(settings | changes))
    return path
