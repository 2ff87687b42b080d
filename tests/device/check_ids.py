"""Question: does the engine on a GPU give the same ids as eager transformers on the CPU?

bf16 kernels differ between the two, so a first difference is allowed where the CPU's two candidate
scores lie within two bf16 steps of each other (a near-tie); anything wider is a fault. Confounded
by nothing but the weights' own ties: greedy, one thread of control, fixed prompts. Also compares
plain decoding with n-gram drafts on the device itself, by the same rule.

    python tests/device/check_ids.py [--device cuda] [--target DIR] [--tokens 64] [--json FILE]

`--device cpu` runs the same comparison without a GPU.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter_service.build import build_drafter
from drafter_service.config import DrafterSettings
from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest
from protos.params import SamplingParams
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.load import load_target

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


def engine_ids(
    target_dir: Path, device: str, prompts: list[list[int]], plans: tuple[SourcePlan, ...], n: int
) -> list[list[int]]:
    """Greedy ids of every prompt, all prompts in one batch."""
    torch.set_default_device(device)
    try:
        target = load_target(target_dir, torch.bfloat16)
        rows = PagedRows(target)
        facts = target.facts
        exchange = DraftExchange(TargetEnd(facts.vocab_size, facts.max_context, facts.digest), rows)
        exchange.add_local(build_drafter(DrafterSettings(kind="ngram", name="ngram")), "ngram")
        engine = Engine(target, exchange, StaticPlanner(plans), EngineSettings(), rows)
        out: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.submit(
                GenerationRequest(str(i), tuple(prompt), params),
                lambda run: out[run.request_id].extend(run.ids),
            )
        while engine.step():
            pass
        engine.close()
    finally:
        torch.set_default_device("cpu")
    return [out[str(i)] for i in range(len(prompts))]


@torch.inference_mode()
def eager_ids(model: torch.nn.Module, prompt: list[int], n: int) -> list[int]:
    """Greedy ids by transformers' own forward, ends ignored."""
    out: list[int] = []
    ids, cache = torch.tensor([prompt]), None
    for _ in range(n):
        result = model(ids, cache=cache, use_cache=True)
        cache = result.past_key_values
        out.append(int(result.logits[0, -1].argmax()))
        ids = torch.tensor([out[-1:]])
    return out


def first_difference(
    model: torch.nn.Module, prompt: list[int], ours: list[int], theirs: list[int]
) -> tuple[int, float] | None:
    """(position, score gap in bf16 steps) by the CPU's own scores; None when equal."""
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            with torch.inference_mode():
                scores = model(torch.tensor([prompt + theirs[:at]])).logits[0, -1].float()
            step = 2.0 ** (math.floor(math.log2(max(scores.abs().max().item(), 1e-6))) - 7)
            return at, abs(scores[a].item() - scores[b].item()) / step
    return None


def compare(
    name: str,
    model: torch.nn.Module,
    prompts: list[list[int]],
    ours: list[list[int]],
    theirs: list[list[int]],
) -> dict[str, object]:
    """Counts of equal texts and near-ties; `wide` lists what no near-tie explains."""
    found = [first_difference(model, *texts) for texts in zip(prompts, ours, theirs, strict=True)]
    differences = [d for d in found if d is not None]
    wide = [d for d in differences if d[1] > 2.0]
    print(
        f"{name}: {len(found) - len(differences)} of {len(found)} texts equal, "
        f"{len(differences) - len(wide)} begin to differ at a near-tie, {len(wide)} do not: {wide}"
    )
    return {"equal": len(found) - len(differences), "texts": len(found), "wide": wide}


def main() -> int:
    """0 when every difference begins at a near-tie."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", type=Path, default=None)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--print-questions", action="store_true", help="as JSONL, and stop")
    args = parser.parse_args()
    if args.print_questions:
        for question in QUESTIONS:
            print(json.dumps({"q": question}))
        return 0
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU here: ids were not compared")
        return 3
    target_dir = args.target
    if target_dir is None:
        from verifier_service.model.embedded import ensure_embedded_target

        target_dir = ensure_embedded_target()
    tokenizer = AutoTokenizer.from_pretrained(target_dir, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        target_dir, dtype=torch.bfloat16, local_files_only=True
    ).eval()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
        )
        for q in QUESTIONS
    ]
    eager = [eager_ids(model, prompt, args.tokens) for prompt in prompts]
    ngram = (SourcePlan("ngram", Plan(PlanKind.CHAIN, depth=8)),)
    plain = engine_ids(target_dir, args.device, prompts, (), args.tokens)
    drafted = engine_ids(target_dir, args.device, prompts, ngram, args.tokens)
    report = {
        "device": args.device,
        "engine_vs_eager": compare("engine vs eager CPU", model, prompts, plain, eager),
        "drafted_vs_plain": compare("drafted vs plain", model, prompts, drafted, plain),
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report) + "\n")
    wide = [*report["engine_vs_eager"]["wide"], *report["drafted_vs_plain"]["wide"]]
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
