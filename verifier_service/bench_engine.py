"""What a step of the engine costs, beside transformers' own generate: `outrider bench engine`.

Questions: how fast is plain decoding at batch 1 (no drafter: the baseline of everything else)
against `transformers.generate` with the same weights, dtype and threads; and what do more rows in
one step cost, as a chain and as a branching tree, against a one-token step.

What would confound it: a busy machine (variants are interleaved, ratios are formed within one
repeat, spread is printed), first calls (warmed up), prefill (decoding alone is timed, from the
first new token to the last), the text (both sides decode the same prompt and ignore ends), rows
that return nothing (every row of a step returns logits), text found again (the prefix cache is
off). Invariance is on; the run says so. `bench_batch` asks what eight requests and a long prompt
cost.
"""

import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from protos.errors import ConfigError
from protos.generation import GenerationRequest, Speculation, SpeculationMode, TokenRun
from protos.params import SamplingParams
from verifier_service.bench_batch import measure_batch, plain_engine
from verifier_service.bench_figure import Figure
from verifier_service.device import describe_device
from verifier_service.engine.loop import Engine
from verifier_service.model.load import load_target
from verifier_service.model.target import TransformersTarget
from verifier_service.step import Span

_NUM_SLOTS = 8192
_TREE_WIDTH = 8
"""Nodes per level of the branching trees: five levels at 32 nodes, as an EAGLE-3 draft has."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure. new_tokens: decoded per repeat; steps: timed steps per variant and repeat.

    prompts: JSONL with `turns` or `q`; without it the prompt is drawn from the vocabulary.
    device: of both sides.
    """

    model: Path
    num_threads: int
    dtype: torch.dtype = torch.bfloat16
    prompts: Path | None = None
    contexts: tuple[int, ...] = (200, 1000)
    repeats: int = 5
    new_tokens: int = 32
    steps: int = 6
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class _Clock(BaseStreamer):  # type: ignore[misc]  # transformers is not typed for mypy
    """Notes when generate hands out each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then each new token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def measure(settings: BenchSettings) -> dict[str, object]:
    """All figures as one JSON-ready object, with the keys that `--json` writes."""
    target = load_target(
        settings.model, settings.dtype, num_threads=settings.num_threads, device=settings.device
    )
    model = AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=settings.dtype, local_files_only=True, attn_implementation="sdpa"
    )
    model = model.to(settings.device).eval()
    ids = _prompt_ids(settings, max(settings.contexts) + 64, target.facts.vocab_size)
    engine = plain_engine(target, _NUM_SLOTS, 8)
    plain = {c: _plain(engine, model, ids[:c], settings) for c in settings.contexts}
    batch = measure_batch(engine, model, ids, settings.repeats)
    del model, engine
    target.allocate(_NUM_SLOTS)
    steps = {c: _steps(target, ids, c, settings) for c in settings.contexts}
    return {
        "plain_over_transformers": {
            str(c): figure.as_json()["ratio"] for c, figure in plain.items()
        },
        # The keys without a context are the first context's.
        **{name: figure.as_json()["ratio"] for name, figure in steps[settings.contexts[0]].items()},
        **{name: figure.as_json()["ratio"] for name, figure in batch.items()},
        "batch": {name: figure.as_json() for name, figure in batch.items()},
        "plain": {str(c): figure.as_json() for c, figure in plain.items()},
        "steps": {
            str(c): {name: figure.as_json() for name, figure in figures.items()}
            for c, figures in steps.items()
        },
        "run": {
            "model": target.facts.name,
            "dtype": target.facts.dtype.value,
            "device": describe_device(settings.device) or settings.device.type,
            "threads": torch.get_num_threads(),
            "invariant": target.facts.invariant,
            "invariance_note": target.facts.invariance_note,
            "fingerprint": target.facts.fingerprint,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "repeats": settings.repeats,
        },
    }


def _plain(
    engine: Engine, model: PreTrainedModel, prompt: Sequence[int], settings: BenchSettings
) -> Figure:
    """Time per token of plain decoding, and of generate beside it."""
    ours: list[float] = []
    theirs: list[float] = []
    _engine_ms(engine, prompt, 3)
    _generate_ms(model, prompt, 3)
    for _ in range(settings.repeats):
        ours.append(_engine_ms(engine, prompt, settings.new_tokens))
        theirs.append(_generate_ms(model, prompt, settings.new_tokens))
    return Figure(tuple(ours), tuple(theirs), is_speed=True)


def _engine_ms(engine: Engine, prompt: Sequence[int], new_tokens: int) -> float:
    times: list[float] = []

    def emit(run: TokenRun) -> None:
        times.extend([time.perf_counter()] * len(run.ids))

    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    off = Speculation(SpeculationMode.OFF)
    engine.submit(GenerationRequest("bench", tuple(prompt), params, speculation=off), emit)
    while engine.step():
        pass
    return (times[-1] - times[0]) / (len(times) - 1) * 1000


def _generate_ms(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> float:
    clock = _Clock()
    ids = torch.tensor([list(prompt)], device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
    )
    times = clock.times[1:]
    return (times[-1] - times[0]) / (len(times) - 1) * 1000


def _steps(
    target: TransformersTarget, ids: Sequence[int], context: int, settings: BenchSettings
) -> dict[str, Figure]:
    """One step of 16 and 32 rows, as a chain and as a tree, over a one-token step."""
    slots = torch.arange(1, 1 + context + 64)

    def span(num_rows: int, branching: bool) -> Span:
        end = context + num_rows
        parents = _tree_parents(num_rows) if branching else None
        rows = tuple(ids[context:end])
        return Span(1, rows, context, slots[:end], parents, num_rows, first_slot=1)

    target.forward([Span(1, tuple(ids[:context]), 0, slots[:context], None, 1, 1)])
    spans = {
        "one": span(1, False),
        **{f"chain{n}_over_1": span(n, False) for n in (16, 32)},
        **{f"tree{n}_over_1": span(n, True) for n in (16, 32)},
    }
    times: dict[str, list[float]] = {name: [] for name in spans}
    for repeat in range(settings.repeats + 1):
        for name, one in spans.items():
            taken = _median_ms(lambda one=one: _step(target, one), settings.steps)  # type: ignore[misc]  # bound now
            if repeat:
                times[name].append(taken)
    return {
        name: Figure(tuple(times[name]), tuple(times["one"])) for name in spans if name != "one"
    }


def _step(target: TransformersTarget, span: Span) -> None:
    # Reading a value back waits for devices that work on their own.
    target.forward([span])[:1, :1].tolist()


def _median_ms(call: Callable[[], object], count: int) -> float:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        taken.append((time.perf_counter() - began) * 1000)
    return statistics.median(taken)


def _tree_parents(num_rows: int) -> tuple[int, ...]:
    """Levels of _TREE_WIDTH nodes; each node hangs below one of the level before."""
    rng = random.Random(num_rows)
    parents, level = [-1], [0]
    while len(parents) < num_rows:
        count = min(_TREE_WIDTH, num_rows - len(parents))
        first = len(parents)
        parents += sorted(rng.choice(level) for _ in range(count))
        level = list(range(first, first + count))
    return tuple(parents)


def _prompt_ids(settings: BenchSettings, count: int, vocab_size: int) -> list[int]:
    """`count` ids of the prompts' text, or drawn with a fixed seed."""
    if settings.prompts is None:
        rng = random.Random(0)
        return [rng.randrange(vocab_size) for _ in range(count)]
    tokenizer = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
    ids: list[int] = []
    for text in _read_prompts(settings.prompts):
        ids += tokenizer.encode(text + "\n\n")
        if len(ids) >= count:
            return ids[:count]
    raise ConfigError(f"--prompts: {len(ids)} tokens of text where {count} are needed")


def _read_prompts(path: Path) -> list[str]:
    texts: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        entry = json.loads(line)
        turns = entry.get("turns", [entry["q"]] if "q" in entry else None)
        if not turns:
            raise ConfigError(f"--prompts: line {number} has neither `turns` nor `q`")
        texts.append("\n".join(turns))
    return texts
