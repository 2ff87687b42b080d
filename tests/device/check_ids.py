"""Question: does the engine on a GPU give the same ids as eager transformers on the CPU?

bf16 kernels differ between the two, so a first difference is allowed where the CPU's two candidate
scores lie within two bf16 steps of each other (a near-tie); anything wider is a fault. Confounded
by nothing but the weights' own ties: greedy, one thread of control, fixed prompts. The engine runs
with the backend it chooses and with tiles, plain and with n-gram drafts, all by the same rule; the
same sampled requests must end alike plain and drafted, or part where the choice was nearly another.

    python tests/device/check_ids.py [--device cuda] [--target DIR] [--tokens 64] [--json FILE]

`--device cpu` runs the same comparison without a GPU.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from drafter_service.build import build_drafter
from drafter_service.config import DrafterSettings
from protos.errors import ConfigError
from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest
from protos.params import SamplingParams
from verifier_service.device import resolve_device
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.backend import Attention
from verifier_service.model.load import load_target
from verifier_service.model.target import TransformersTarget

QUESTIONS = (
    "What is the capital of France?",
    "List the numbers from one to twenty in words.",
    "Write a short story about a lighthouse.",
    "Explain why the sky is blue to a child.",
    "Translate 'good morning' into Spanish, French and German.",
    "Write a Python function that reverses a string.",
    "A train leaves at 3 pm and travels 120 km at 60 km/h. When does it arrive?",
    "Summarise the plot of Romeo and Juliet in three sentences.",
)
NGRAM = (SourcePlan("ngram", Plan(PlanKind.TREE, depth=6, width=2, nodes=12)),)
_NEAR_STEPS = 2.0


@dataclass(frozen=True)
class Run:
    """Texts of all prompts in one batch, and what they took."""

    ids: list[list[int]]
    took_s: float
    num_rounds: int


def engine_run(
    target: TransformersTarget,
    prompts: Sequence[Sequence[int]],
    plans: tuple[SourcePlan, ...],
    params: SamplingParams,
) -> Run:
    """All prompts through one engine; prompt i with seed i."""
    rows, facts = PagedRows(target), target.facts
    exchange = DraftExchange(TargetEnd(facts.vocab_size, facts.max_context, facts.digest), rows)
    exchange.add_local(build_drafter(DrafterSettings(kind="ngram", name="ngram")), "ngram")
    engine = Engine(target, exchange, StaticPlanner(plans), EngineSettings(), rows)
    out: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.submit(
            GenerationRequest(str(i), tuple(prompt), replace(params, seed=i)),
            lambda run: out[run.request_id].extend(run.ids),
        )
    began = time.perf_counter()
    while engine.step():
        pass
    took_s = time.perf_counter() - began
    num_steps = engine.stats().num_steps
    engine.close()
    target.free()
    return Run([out[str(i)] for i in range(len(prompts))], took_s, num_steps)


@torch.inference_mode()
def eager_ids(model: PreTrainedModel, prompt: Sequence[int], n: int) -> list[int]:
    """Greedy ids by transformers' own forward, ends ignored."""
    out: list[int] = []
    ids, cache = torch.tensor([list(prompt)]), None
    for _ in range(n):
        result = model(ids, cache=cache, use_cache=True)
        cache = result.past_key_values
        out.append(int(result.logits[0, -1].argmax()))
        ids = torch.tensor([out[-1:]])
    return out


@torch.inference_mode()
def first_difference(
    model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> tuple[int, float] | None:
    """(position, score gap in bf16 steps) by the CPU's own scores; None when equal."""
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            text = torch.tensor([[*prompt, *theirs[:at]]])
            scores = model(text).logits[0, -1].float()
            step = 2.0 ** (math.floor(math.log2(max(scores.abs().max().item(), 1e-6))) - 7)
            return at, abs(scores[a].item() - scores[b].item()) / step
    return None


def compare(
    name: str,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
) -> dict[str, object]:
    """Counts of equal texts and near-ties; `wide` lists what no near-tie explains."""
    found = [first_difference(model, *texts) for texts in zip(prompts, ours, theirs, strict=True)]
    differences = [d for d in found if d is not None]
    wide = [d for d in differences if d[1] > _NEAR_STEPS]
    print(
        f"{name}: {len(found) - len(differences)} of {len(found)} texts equal, "
        f"{len(differences) - len(wide)} begin to differ at a near-tie, {len(wide)} do not: {wide}"
    )
    return {"equal": len(found) - len(differences), "texts": len(found), "wide": wide}


def check(target_dir: Path, device: torch.device, tokens: int, questions: int) -> dict[str, object]:
    """Every comparison, as JSON."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        target_dir, dtype=torch.bfloat16, local_files_only=True
    ).eval()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
        )
        for q in QUESTIONS[:questions]
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    eager = [eager_ids(model, prompt, tokens) for prompt in prompts]
    began = time.perf_counter()
    target = load_target(target_dir, torch.bfloat16, device=device)
    print(f"{target.facts.fingerprint}: loaded in {time.perf_counter() - began:.1f} s")
    print(f"invariant: {target.facts.invariant} {target.facts.invariance_note}")
    plain = engine_run(target, prompts, (), greedy)
    drafted = engine_run(target, prompts, NGRAM, greedy)
    tiled = engine_run(
        load_target(target_dir, torch.bfloat16, device=device, attention=Attention.TILES),
        prompts,
        NGRAM,
        greedy,
    )
    for name, run in {"plain": plain, "drafted": drafted, "drafted, tiles": tiled}.items():
        rate = len(prompts) * tokens / run.took_s
        print(f"{name}: {rate:.1f} tokens/s over {len(prompts)} requests, {run.num_rounds} steps")
    report: dict[str, object] = {
        "device": str(device),
        "engine_vs_eager": compare("engine vs eager CPU", model, prompts, plain.ids, eager),
        "drafted_vs_plain": compare("drafted vs plain", model, prompts, drafted.ids, plain.ids),
        "tiles_vs_plain": compare("tiles vs plain", model, prompts, tiled.ids, plain.ids),
    }
    values = replace(greedy, temperature=0.8, top_p=0.9)
    sampled = [engine_run(target, prompts, plans, values).ids for plans in ((), NGRAM)]
    equal = sum(a == b for a, b in zip(*sampled, strict=True))
    # Near-ties of score plus noise are not told from faults here; most texts must agree.
    print(f"sampled, drafted vs plain: {equal} of {len(prompts)} texts equal")
    report["sampled_equal"], report["texts"] = equal, len(prompts)
    return report


def faults_of(report: dict[str, object]) -> list[str]:
    """Comparisons that no near-tie explains."""
    faults = [
        name for name, found in report.items() if isinstance(found, dict) and found.get("wide")
    ]
    equal, texts = report["sampled_equal"], report["texts"]
    assert isinstance(equal, int)
    assert isinstance(texts, int)
    return faults + ["sampled"] * (2 * equal < texts)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every difference begins at a near-tie, 1 when one does not, 3 without the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--target", type=Path, default=None)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--print-questions", action="store_true", help="as JSONL, and stop")
    args = parser.parse_args(argv)
    if args.print_questions:
        for question in QUESTIONS:
            print(json.dumps({"q": question}))
        return 0
    try:
        device = resolve_device(args.device)
    except ConfigError as error:
        print(f"ids were not compared: {error}")
        return 3
    target_dir = args.target
    if target_dir is None:
        from verifier_service.model.embedded import ensure_embedded_target

        target_dir = ensure_embedded_target()
    report = check(target_dir, device, args.tokens, args.questions)
    if args.json is not None:
        args.json.write_text(json.dumps(report) + "\n")
    faults = faults_of(report)
    print(f"faults: {', '.join(faults) or 'none'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
