"""What eight requests side by side and a long prompt cost: the second half of `bench engine`.

Questions: what does sampling (temperature 0.8 with top-p 0.95, and temperature 1 without filters)
add to a greedy step of eight requests; how long does the prompt of 2,000 tokens take beside
transformers' forward of it.

What would confound it: other texts (a step's cost does not depend on its tokens; lengths are
equal), ends (ignored), prompts in the timed part (a step counts from the moment all requests
decode), text found again (the engine has no prefix cache).
"""

import time
from collections.abc import Sequence
from typing import Final

import torch
from transformers import PreTrainedModel

from protos.errors import ConfigError
from protos.generation import GenerationRequest, Speculation, SpeculationMode, TokenRun
from protos.params import SamplingParams
from verifier_service.bench_figure import Figure
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange
from verifier_service.engine.loop import Engine
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.target import TransformersTarget

LONG_PROMPT: Final = 2000
BATCH: Final = 8
_PROMPT: Final = 64
_NEW_TOKENS: Final = 24
_SAMPLINGS: Final = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True),
    "sampled_over_greedy": SamplingParams(
        temperature=0.8, top_p=0.95, max_tokens=_NEW_TOKENS, ignore_eos=True
    ),
    "unfiltered_over_greedy": SamplingParams(
        temperature=1.0, max_tokens=_NEW_TOKENS, ignore_eos=True
    ),
}


def plain_engine(target: TransformersTarget, num_slots: int, max_running: int) -> Engine:
    """The real engine with nothing that drafts and nothing that remembers prompts."""
    facts, rows = target.facts, PagedRows(target)
    end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, {})
    settings = EngineSettings(num_slots=num_slots, max_running=max_running, prefix_cache=False)
    return Engine(target, DraftExchange(end, rows), StaticPlanner(), settings, rows)


def measure_batch(
    engine: Engine,
    model: PreTrainedModel,
    prompt: Sequence[int],
    repeats: int,
) -> dict[str, Figure]:
    """Sampled steps over greedy ones at BATCH requests; prefill as a speed over transformers'.

    prompt: ids, repeated to LONG_PROMPT or as far as the model's context goes.
    """
    steps: dict[str, list[float]] = {name: [] for name in _SAMPLINGS}
    ours: list[float] = []
    theirs: list[float] = []
    length = min(LONG_PROMPT, int(model.config.max_position_embeddings) - 1)
    long_prompt = (list(prompt) * (length // len(prompt) + 1))[:length]
    for repeat in range(repeats + 1):
        prompts = [prompt[index : index + _PROMPT] for index in range(BATCH)]
        taken = {name: step_ms(engine, prompts, params) for name, params in _SAMPLINGS.items()}
        prefilled = _prefill_ms(engine, long_prompt)
        forward = _forward_ms(model, long_prompt)
        if repeat:
            for name, one in taken.items():
                steps[name].append(one)
            ours.append(prefilled)
            theirs.append(forward)
    greedy = tuple(steps.pop("greedy"))
    figures = {name: Figure(tuple(times), greedy) for name, times in steps.items()}
    return figures | {"prefill_over_transformers": Figure(tuple(ours), tuple(theirs), True)}


def step_ms(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Milliseconds a step in which all prompts decode side by side, of all such steps.

    Raises: ConfigError where the first is over before the last one decodes.
    """
    counts = [0] * len(prompts)
    for index, prompt in enumerate(prompts):

        def emit(run: TokenRun, index: int = index) -> None:
            counts[index] += len(run.ids)

        engine.submit(_request(index, prompt, params), emit)
    while min(counts) == 0:
        engine.step()
    began, before = time.perf_counter(), sum(counts)
    while max(counts) < params.max_tokens:
        engine.step()
    taken = (time.perf_counter() - began) * 1000
    steps = (sum(counts) - before) / len(prompts)
    while engine.step():
        pass
    if steps < 1:
        raise ConfigError(f"{params.max_tokens} tokens are too few for {len(prompts)} requests")
    return taken / steps


def _prefill_ms(engine: Engine, prompt: Sequence[int]) -> float:
    ends: list[float] = []

    def emit(_run: TokenRun) -> None:
        ends.append(time.perf_counter())

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    engine.submit(_request(0, prompt, params), emit)
    while engine.step():
        pass
    return (ends[0] - began) * 1000


@torch.inference_mode()
def _forward_ms(model: PreTrainedModel, prompt: Sequence[int]) -> float:
    ids = torch.tensor([list(prompt)], device=model.device)
    began = time.perf_counter()
    output = model(ids, logits_to_keep=1, use_cache=True)
    output.logits[0, -1].argmax().item()
    return (time.perf_counter() - began) * 1000


def _request(index: int, prompt: Sequence[int], params: SamplingParams) -> GenerationRequest:
    off = Speculation(SpeculationMode.OFF)
    return GenerationRequest(f"bench-{index}", tuple(prompt), params, speculation=off)
