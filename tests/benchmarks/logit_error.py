"""How far from float32 are logits in bf16, by each way to attend, and in transformers?

    python -m tests.benchmarks.logit_error [--prompts FILE] [--json FILE]

Question: of the difference between bf16 and float32, how much is the fault of how we compute? For
each prompt (the first turn in the target's chat form) the logits behind its last token are compared
with transformers' own in float32: root mean square over the vocabulary, and whether the largest is
the same id. The rows behind the last prompt token choose the first token of an answer.

Confounders: bf16 weights are shared by all, float32 is computed from the same checkpoint; a mean
over prompts hides that errors of one prompt differ by a factor of five from another's.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cluster.http.text import load_text
from verifier_service.model.backend import Attention
from verifier_service.model.embedded import ensure_embedded_target
from verifier_service.model.load import load_target
from verifier_service.step import Span

HERE = Path(__file__).resolve().parent
Logits = Callable[[list[int]], torch.Tensor]
"""Prompt ids to float32 logits [V] behind the last one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the mean error and the share of equal largest ids, per way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, help="a directory; default: the embedded target")
    parser.add_argument("--prompts", type=Path, default=HERE / "spec_bench_48.jsonl")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    target = given.target or ensure_embedded_target()
    text = load_text(target)
    prompts = [
        list(text.encode_chat([{"role": "user", "content": json.loads(line)["turns"][0]}]))
        for line in given.prompts.read_text(encoding="utf-8").splitlines()
    ]
    exact = _theirs(target, torch.float32)
    ways = {
        "transformers": _theirs(target, torch.bfloat16),
        **{str(way): _ours(target, way) for way in (Attention.TILES, Attention.AUTO)},
    }
    errors: dict[str, list[float]] = {name: [] for name in ways}
    equal: dict[str, list[bool]] = {name: [] for name in ways}
    for ids in prompts:
        expected = exact(ids)
        for name, logits in ways.items():
            found = logits(ids)
            errors[name].append(float((found - expected).square().mean().sqrt()))
            equal[name].append(bool(found.argmax() == expected.argmax()))
    count = len(prompts)
    result = {
        name: {
            "rms_error": round(sum(errors[name]) / count, 3),
            "worst": round(max(errors[name]), 3),
            "same_largest": f"{sum(equal[name])} of {count}",
        }
        for name in ways
    }
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _theirs(target: Path, dtype: torch.dtype) -> Logits:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, local_files_only=True).eval()

    @torch.inference_mode()
    def logits(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].float()

    return logits


def _ours(target: Path, way: Attention) -> Logits:
    served = load_target(target, torch.bfloat16, attention=way)
    served.allocate(4096)

    def logits(ids: list[int]) -> torch.Tensor:
        slots = torch.arange(1, len(ids) + 1)
        return served.forward([Span(1, tuple(ids), 0, slots, None, 1, 1)])[-1].float()

    return logits


if __name__ == "__main__":
    raise SystemExit(main())
