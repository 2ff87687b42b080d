"""How long does a draft take, and how does it grow with the number of sessions?

Question: median time of one round (extend by two tokens with their rows, draft) for 1, 4 and 16
sessions drafted together, for every kind, beside a plain loop over the same sessions and beside
`ngram`; and what one block of a block drafter costs beside a chain of 4.
Confounders: other processes on the cores (variants are interleaved and the spread is printed), the
context length (fixed), text (random ids and rows: time does not depend on what is drafted).

`python -m drafter_service.bench [--checkpoint DIR --target DIR] [--json FILE]`. Without a
checkpoint random drafters for a target of the embedded default's size are timed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_service.bench_drafters import (
    VOCAB,
    random_block,
    random_draft_model,
    random_eagle,
    random_eagle3,
    random_ngram,
    shipped_eagle3,
)
from drafter_service.drafter import Drafter
from protos.exchange import DraftStatus, DraftWork, Plan, PlanKind, SessionOpen
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
BLOCK7 = Plan(PlanKind.BLOCK, depth=7)
TREE31 = Plan(PlanKind.TREE, depth=6, width=4, nodes=31)
CASES = (
    Case("ngram", "chain8", Plan(PlanKind.CHAIN, depth=8)),
    Case("draft_model", "chain4", CHAIN4),
    Case("eagle", "chain4", CHAIN4),
    Case("peagle", "chain4", CHAIN4),
    Case("dflash", "block7", BLOCK7),
    Case("dspark", "block7", BLOCK7),
    Case("eagle3", "chain4", CHAIN4),
    Case("eagle3", "tree31", TREE31),
    Case("eagle3", "chain4_sampled", CHAIN4, SAMPLED),
)


MAKERS: dict[str, Callable[[], Drafter]] = {
    "ngram": random_ngram,
    "draft_model": random_draft_model,
    "eagle": random_eagle,
    "eagle3": random_eagle3,
    "peagle": lambda: random_eagle3(mask_token_id=VOCAB - 1),
    "dflash": random_block,
    "dspark": lambda: random_block(dspark=True),
}
"""One drafter of each kind; P-EAGLE is an EAGLE-3 head that drafts in parallel."""


class Rounds:
    """Some sessions of one drafter, extended round by round."""

    def __init__(self, drafter: Drafter, case: Case, num_sessions: int, context: int) -> None:
        self._drafter = drafter
        self._case = case
        self._incarnation = drafter.capabilities.incarnation
        record = drafter.capabilities
        self._width = record.fused_width or record.raw_width
        self._form = FeatureForm.FUSED if record.fused_width else FeatureForm.RAW
        generator = torch.Generator().manual_seed(num_sessions)
        vocab = drafter.capabilities.vocab_size or 1000
        self._ids = torch.randint(0, vocab, (num_sessions, context), generator=generator).tolist()
        self._base_len = 0
        self._generator = generator
        opens = [self._work(number, context, Plan()) for number in range(num_sessions)]
        self._drafter.handle(opens)
        self._base_len = context
        # A long prompt may be computed in shares.
        asked = [self._work(number, context, case.plan) for number in range(num_sessions)]
        while any(r.status is not DraftStatus.OK for r in self._drafter.handle(asked)):
            pass

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
            ids.append(ids[len(ids) * 7 % min(len(ids), 50)])
        start = self._base_len
        return DraftWork(
            session_id=number + 1,
            incarnation=self._incarnation,
            base_len=end,
            token_start=start,
            tokens=tuple(ids[start:end]),
            plan=plan,
            open=self._open() if start == 0 else None,
            rows=self._rows(max(start - 1, 0), end - 1) if self._width and end > start else None,
        )

    def _open(self) -> SessionOpen:
        if not self._width:
            return SessionOpen("bench", self._case.params)
        return SessionOpen("bench", self._case.params, self._form, self._width, DType.BF16)

    def _rows(self, start: int, end: int) -> FeatureRows:
        values = torch.randn(end - start, self._width, generator=self._generator)
        data = values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        return FeatureRows(start, end - start, self._width, DType.BF16, data)


def measure(
    drafters: Mapping[str, Drafter], cases: Sequence[Case], context: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Median and quartiles of a round in ms by `kind/shape/sessions[/loop]`.

    All cases take turns `repeats` times, so that a slow spell of the machine hits all of them.
    """
    times: dict[str, list[float]] = {}
    variants = {
        f"{count}{suffix}": (count, suffix == "")
        for count in SESSIONS
        for suffix in ("", "/loop")
        if count > 1 or not suffix
    }
    for _ in range(repeats):
        for case in cases:
            for label, (count, together) in variants.items():
                rounds = Rounds(drafters[case.kind], case, count, context)
                rounds.run(together)
                spent = [rounds.run(together) for _ in range(5)]
                rounds.close()
                times.setdefault(f"{case.name}/{label}", []).extend(spent)
    return {name: _summary(values) for name, values in times.items()}


def ratios(
    table: dict[str, dict[str, float]], cases: Sequence[Case]
) -> dict[str, dict[str, float]]:
    """16 sessions over 1 by kind, the plain loop over the batch, a block over a chain of 4."""
    over_one: dict[str, float] = {}
    loop_over_batch: dict[str, float] = {}
    for case in cases:
        sixteen = table[f"{case.name}/16"]["median_ms"]
        over_one[case.name] = sixteen / table[f"{case.name}/1"]["median_ms"]
        loop_over_batch[case.name] = table[f"{case.name}/16/loop"]["median_ms"] / sixteen
    by_kind: dict[str, float] = {}
    for case in cases:
        by_kind.setdefault(case.kind, over_one[case.name])
    block_over_chain = {
        str(count): table[f"dflash/block7/{count}"]["median_ms"]
        / table[f"eagle3/chain4/{count}"]["median_ms"]
        for count in (1, 16)
        if f"dflash/block7/{count}" in table and f"eagle3/chain4/{count}" in table
    }
    return {
        "sixteen_over_one": by_kind,
        "dflash_block_over_eagle3_chain4": block_over_chain,
        "sixteen_over_one_by_shape": over_one,
        "loop_over_batch": loop_over_batch,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for people and, with --json, one object for machines."""
    parser = argparse.ArgumentParser("outrider bench draft", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--target", default="")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", default="", help=f"some of {','.join(MAKERS)}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    kinds = options.kinds.split(",") if options.kinds else list(MAKERS)
    drafters = {kind: MAKERS[kind]() for kind in kinds}
    if options.checkpoint and "eagle3" in drafters:
        target = Path(options.target) if options.target else None
        drafters["eagle3"] = shipped_eagle3(options.checkpoint, target)
    cases = [case for case in CASES if case.kind in drafters]
    table = measure(drafters, cases, options.context, options.repeats)
    report = {
        "context": options.context,
        "threads": options.threads,
        "torch": torch.__version__,
        "rounds_ms": table,
        **ratios(table, cases),
    }
    for name, row in table.items():
        print(f"{name:32} {row['median_ms']:9.3f} ms  [{row['low_ms']:.3f}, {row['high_ms']:.3f}]")
    for name in ("sixteen_over_one_by_shape", "loop_over_batch", "dflash_block_over_eagle3_chain4"):
        for case, value in report[name].items():
            print(f"{name} {case}: {value:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _summary(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median_ms": 1e3 * median, "low_ms": 1e3 * low, "high_ms": 1e3 * high}


if __name__ == "__main__":
    raise SystemExit(main())
