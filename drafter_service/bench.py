"""How long does a draft take, and how does it grow with the number of sessions?

Question: median time of one round (extend by two tokens with their rows, draft) for 1, 4 and 16
sessions drafted together, beside a plain loop over the same sessions and beside `ngram`.
Confounders: other processes on the cores (variants are interleaved and the spread is printed), the
context length (fixed), text (random ids and rows: time does not depend on what is drafted).

`python -m drafter_service.bench [--checkpoint DIR --target DIR] [--json FILE]`. Without a
checkpoint a random head of the embedded default's size is timed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_service.build import build_drafter, fresh_incarnation
from drafter_service.config import DrafterSettings
from drafter_service.drafter import Drafter
from drafter_service.eagle3.config import Eagle3Config, Rope
from drafter_service.eagle3.drafter import Eagle3
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.service import SessionDrafter
from protos.exchange import Capabilities, DraftStatus, DraftWork, Plan, PlanKind, SessionOpen
from protos.features import DType, FeatureForm, FeatureRows
from protos.params import SamplingParams

SESSIONS = (1, 4, 16)
GROWTH = 2
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, seed=1)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    kind: str
    shape: str
    plan: Plan
    params: SamplingParams = GREEDY

    @property
    def name(self) -> str:
        """kind/shape."""
        return f"{self.kind}/{self.shape}"


CHAIN4 = Plan(PlanKind.CHAIN, depth=4)
TREE31 = Plan(PlanKind.TREE, depth=6, width=4, nodes=31)
CASES = (
    Case("ngram", "chain8", Plan(PlanKind.CHAIN, depth=8)),
    Case("eagle3", "chain4", CHAIN4),
    Case("eagle3", "tree31", TREE31),
    Case("eagle3", "chain4_sampled", CHAIN4, SAMPLED),
)


class Rounds:
    """Some sessions of one drafter, extended round by round."""

    def __init__(self, drafter: Drafter, case: Case, num_sessions: int, context: int) -> None:
        self._drafter = drafter
        self._case = case
        self._incarnation = drafter.capabilities.incarnation
        self._width = drafter.capabilities.fused_width
        generator = torch.Generator().manual_seed(num_sessions)
        vocab = drafter.capabilities.vocab_size or 1000
        self._ids = torch.randint(0, vocab, (num_sessions, context), generator=generator).tolist()
        self._base_len = 0
        self._generator = generator
        opens = [self._work(number, context, Plan()) for number in range(num_sessions)]
        self._drafter.handle(opens)
        self._base_len = context

    def run(self, together: bool) -> float:
        """Seconds of one round of all sessions."""
        count = len(self._ids)
        works = [
            self._work(number, self._base_len + GROWTH, self._case.plan) for number in range(count)
        ]
        batches = [works] if together else [[work] for work in works]
        started_s = time.perf_counter()
        results = [result for batch in batches for result in self._drafter.handle(batch)]
        spent_s = time.perf_counter() - started_s
        bad = [result.detail for result in results if result.status is not DraftStatus.OK]
        assert not bad, bad
        self._base_len += GROWTH
        return spent_s

    def close(self) -> None:
        """Leave the drafter empty."""
        self._drafter.handle(
            [
                DraftWork(number + 1, self._incarnation, 0, 0, (), close=True)
                for number in range(len(self._ids))
            ]
        )

    def _work(self, number: int, end: int, plan: Plan) -> DraftWork:
        ids = self._ids[number]
        while len(ids) < end:
            ids.append(ids[len(ids) * 7 % 50])
        start = self._base_len
        return DraftWork(
            session_id=number + 1,
            incarnation=self._incarnation,
            base_len=end,
            token_start=start,
            tokens=tuple(ids[start:end]),
            plan=plan,
            open=self._open() if start == 0 else None,
            rows=self._rows(max(start - 1, 0), end - 1) if self._width else None,
        )

    def _open(self) -> SessionOpen:
        if not self._width:
            return SessionOpen("bench", self._case.params)
        return SessionOpen("bench", self._case.params, FeatureForm.FUSED, self._width, DType.BF16)

    def _rows(self, start: int, end: int) -> FeatureRows:
        values = torch.randn(end - start, self._width, generator=self._generator)
        data = values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        return FeatureRows(start, end - start, self._width, DType.BF16, data)


def measure(
    drafters: dict[str, Drafter], context: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Median and quartiles of a round in ms by `kind/shape/sessions[/loop]`; interleaved."""
    times: dict[str, list[float]] = {}
    for case in CASES:
        drafter = drafters[case.kind]
        variants = {
            f"{count}{suffix}": (count, suffix == "")
            for count in SESSIONS
            for suffix in ("", "/loop")
            if count > 1 or not suffix
        }
        for _ in range(repeats):
            for label, (count, together) in variants.items():
                rounds = Rounds(drafter, case, count, context)
                rounds.run(together)
                spent = [rounds.run(together) for _ in range(5)]
                rounds.close()
                times.setdefault(f"{case.name}/{label}", []).extend(spent)
    return {name: _summary(values) for name, values in times.items()}


def ratios(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """16 sessions over 1, and the plain loop over the batch, by `kind/shape`."""
    over_one: dict[str, float] = {}
    loop_over_batch: dict[str, float] = {}
    for case in CASES:
        sixteen = table[f"{case.name}/16"]["median_ms"]
        over_one[case.name] = sixteen / table[f"{case.name}/1"]["median_ms"]
        loop_over_batch[case.name] = table[f"{case.name}/16/loop"]["median_ms"] / sixteen
    by_kind = {"ngram": over_one["ngram/chain8"], "eagle3": over_one["eagle3/chain4"]}
    return {
        "sixteen_over_one": by_kind,
        "sixteen_over_one_by_shape": over_one,
        "loop_over_batch": loop_over_batch,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for people and, with --json, one object for machines."""
    parser = argparse.ArgumentParser("bench draft", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--target", default="")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    drafters = {
        "ngram": build_drafter(DrafterSettings(kind="ngram")),
        "eagle3": _eagle3(options.checkpoint, options.target),
    }
    table = measure(drafters, options.context, options.repeats)
    report = {
        "context": options.context,
        "threads": options.threads,
        "torch": torch.__version__,
        "rounds_ms": table,
        **ratios(table),
    }
    for name, row in table.items():
        print(f"{name:32} {row['median_ms']:9.3f} ms  [{row['low_ms']:.3f}, {row['high_ms']:.3f}]")
    for name in ("sixteen_over_one_by_shape", "loop_over_batch"):
        for case, value in report[name].items():
            print(f"{name} {case}: {value:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _eagle3(checkpoint: str, target: str) -> Drafter:
    if checkpoint:
        return build_drafter(DrafterSettings(kind="eagle3", checkpoint=checkpoint, target=target))
    config = Eagle3Config(
        hidden_size=576,
        target_hidden_size=576,
        aux_layers=(1, 14, 26),
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rope=Rope(theta=100000.0),
        norm_eps=1e-5,
        vocab_size=49152,
        draft_vocab_size=8192,
    )
    head = Eagle3Head(config, torch.arange(8192) * 6).to(torch.bfloat16)
    capabilities = Capabilities(
        kind="eagle3",
        name="random",
        incarnation=fresh_incarnation(),
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE),
        raw_width=config.feature_size,
        fused_width=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=8192,
        max_sessions=64,
        max_depth=16,
        max_width=10,
        max_nodes=64,
    )
    return SessionDrafter(capabilities, Eagle3(head, 64 << 20, 8300), idle_s=3600.0)


def _summary(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median_ms": 1e3 * median, "low_ms": 1e3 * low, "high_ms": 1e3 * high}


if __name__ == "__main__":
    raise SystemExit(main())
