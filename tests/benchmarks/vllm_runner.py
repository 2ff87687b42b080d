"""Answers prompts with vLLM and a draft head, and writes what was accepted. Run by vLLM's Python.

Needs vLLM and nothing of this project: `vllm_acceptance` starts it in vLLM's own environment. Reads
one JSON object from standard input, writes one to the path it names.
"""

import json
import sys


def main() -> int:
    """Exits with 1 and the error's own words when vLLM refuses."""
    task = json.load(sys.stdin)
    out = {}
    try:
        out = answer(task)
    except Exception as error:  # what is recorded is exactly what this build says
        out = {"error": f"{type(error).__name__}: {error}"}
    with open(task["out"], "w", encoding="utf-8") as file:
        json.dump(out, file)
    return 1 if "error" in out else 0


def answer(task: dict) -> dict:
    """Of every answer, the tokens of each of its steps; and vLLM's own sums."""
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=task["target"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=task["max_context"],
        max_num_seqs=8,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={
            "model": task["head"],
            "num_speculative_tokens": task["depth"],
            **({"method": task["method"]} if task["method"] else {}),
        },
    )
    params = SamplingParams(temperature=0.0, max_tokens=task["max_new"])
    engine = llm.llm_engine
    for number, ids in enumerate(task["prompts"]):
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=ids), params)
    steps = {str(number): [] for number in range(len(task["prompts"]))}
    while engine.has_unfinished_requests():
        for output in engine.step():
            ids, told = output.outputs[0].token_ids, steps[output.request_id]
            fresh = list(ids[sum(len(step) for step in told) :])
            if fresh:
                told.append(fresh)
    sums = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            value = getattr(metric, "value", None)
            sums[metric.name] = metric.values if value is None else value
    return {
        "version": vllm.__version__,
        "steps": list(steps.values()),
        "sums": sums,
    }


if __name__ == "__main__":
    raise SystemExit(main())
