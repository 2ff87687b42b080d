"""Decodes with vLLM when told to, and says how long it took. Run by vLLM's Python.

Needs vLLM and nothing of this project: `vllm_plain` starts it in vLLM's own environment. Reads one
JSON object a line from standard input, first the settings, then one a measurement; answers each
with one line on the file descriptor that it is given.
"""

import json
import os
import sys
import time


def main() -> int:
    """Ends with the input; 1 when vLLM refuses."""
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1) as out:
        task = json.loads(sys.stdin.readline())
        try:
            engine, version = start(task)
        except Exception as error:  # what is shown is exactly what this build says
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)
            return 1
        print(json.dumps({"version": version}), file=out)
        for line in sys.stdin:
            asked = json.loads(line)
            rate = tokens_per_s(engine, asked["prompts"], asked["new_tokens"])
            print(json.dumps({"tokens_per_s": rate}), file=out)
    return 0


def start(task: dict) -> tuple:
    """vLLM's engine, and its version."""
    import vllm
    from vllm import LLM

    llm = LLM(
        model=task["target"],
        dtype="bfloat16",
        enforce_eager=task["eager"],
        max_model_len=2048,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )
    return llm.llm_engine, vllm.__version__


def tokens_per_s(engine: object, prompts: list, new_tokens: int) -> float:
    """From the moment all requests decode to the moment the first one ends."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for number, ids in enumerate(prompts):
        name = f"{time.monotonic_ns()}-{number}"
        engine.add_request(name, TokensPrompt(prompt_token_ids=ids), params)
    counts: dict[str, int] = {}
    began = before = None
    rate = 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
        if began is None and len(counts) == len(prompts) and min(counts.values()) > 0:
            began, before = time.perf_counter(), sum(counts.values())
        if not rate and began is not None and max(counts.values()) >= new_tokens:
            rate = (sum(counts.values()) - before) / (time.perf_counter() - began)
    return rate


if __name__ == "__main__":
    raise SystemExit(main())
