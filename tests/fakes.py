"""Small, complete stand-ins for the ports of the verifier: targets, draft exchanges, planners.

`HashTarget` answers from a hash of the token path that it reads back out of its own slots, so a
row that lands in a wrong slot, or an accepted path that is not moved, changes the text.
`UncachedTarget` runs a real model over every row's whole path, without any cache: the plainest
truth there is. Drafts come from sources whose quality a test chooses. Nothing sleeps.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from protos.errors import OutriderError
from protos.exchange import Capabilities, Plan, PlanKind
from protos.features import DType
from protos.generation import GenerationRequest, Speculation, TokenRun
from protos.params import SamplingParams
from protos.tree import CandidateTree, chain
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import (
    Draft,
    DraftAsk,
    RoundOutcome,
    SequenceView,
    SourceInfo,
    SourcePlan,
)
from verifier_service.engine.settings import EngineSettings
from verifier_service.step import Span, TargetFacts

ALL_PLANS = (PlanKind.CHAIN, PlanKind.TREE)


class PathTarget:
    """A target that keeps (token, position) per slot and answers from each row's whole path.

    Subclasses give `path_logits`. Checks what a real target would silently get wrong: slots that
    overlap, history at a wrong position, scrap used for a token.
    """

    def __init__(
        self,
        vocab_size: int,
        max_context: int = 512,
        eos_token_ids: tuple[int, ...] = (),
        hidden_size: int = 4,
    ) -> None:
        self._facts = TargetFacts(
            name="fake",
            digest="fake",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=2,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            dtype=DType.FP32,
            bytes_per_slot=16,
            fingerprint="fake",
            invariant=True,
        )
        self.forwards: list[tuple[Span, ...]] = []
        self.fail_with: Exception | None = None
        self.tokens = np.zeros(0, dtype=np.int64)
        self.positions = np.zeros(0, dtype=np.int64)

    @property
    def facts(self) -> TargetFacts:
        return self._facts

    def path_logits(self, path: tuple[int, ...]) -> torch.Tensor:
        """Logits [V] after this path of tokens."""
        raise NotImplementedError

    def allocate(self, num_slots: int) -> None:
        self.tokens = np.full(num_slots, -1, dtype=np.int64)
        self.positions = np.full(num_slots, -1, dtype=np.int64)

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        if self.fail_with is not None:
            raise self.fail_with
        self.forwards.append(tuple(spans))
        written = [int(s) for span in spans for s in span.slots[span.start :]]
        assert len(set(written)) == len(written), "two rows share a slot"
        assert 0 not in written, "a token was given the scrap slot"
        rows = [logits for span in spans for logits in self._run(span)]
        return torch.stack(rows) if rows else torch.zeros(0, self._facts.vocab_size)

    def tree_parts(self, parents: Sequence[int], start: int, most: int) -> Sequence[int]:
        return [0] * len(parents)

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        read, write = source.numpy(), destination.numpy()
        for pool in (self.tokens, self.positions):
            pool[write] = pool[read].copy()

    def read_rows(self, key: str, slots: torch.Tensor) -> bytes:
        at = slots.numpy()
        row = np.stack([self.tokens[at], self.positions[at]], axis=1)
        return row.astype("<f4").tobytes()

    def row_width(self, key: str) -> int:
        return 2

    def row_dtype(self, key: str) -> DType:
        return DType.FP32

    def _run(self, span: Span) -> list[torch.Tensor]:
        slots = span.slots.numpy()
        if span.first_slot is not None:
            assert np.array_equal(slots, span.first_slot + np.arange(len(slots)))
        assert len(slots) == span.start + span.num_rows
        history = slots[: span.start]
        assert np.array_equal(self.positions[history], np.arange(span.start)), "history is broken"
        prefix = tuple(self.tokens[history].tolist())
        paths: list[tuple[int, ...]] = []
        for row, token in enumerate(span.token_ids):
            parent = row - 1 if span.parents is None else span.parents[row]
            before = paths[parent] if parent >= 0 else prefix
            paths.append((*before, token))
            self.tokens[slots[span.start + row]] = token
            self.positions[slots[span.start + row]] = len(before)
        return [self.path_logits(p) for p in paths[len(paths) - span.num_logits :]]


class HashTarget(PathTarget):
    """Logits from a hash of the path. `grain`: round them to this multiple, so that many tie."""

    def __init__(self, vocab_size: int = 97, grain: float = 0.0, **facts: Any) -> None:
        super().__init__(vocab_size, **facts)
        self._grain = grain
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def path_logits(self, path: tuple[int, ...]) -> torch.Tensor:
        if path not in self._known:
            digest = hashlib.blake2b(np.array(path, dtype=np.int64).tobytes(), digest_size=8)
            rng = np.random.default_rng(int.from_bytes(digest.digest(), "little"))
            values = 3.0 * rng.standard_normal(self.facts.vocab_size)
            if self._grain:
                values = np.round(values / self._grain) * self._grain
            self._known[path] = torch.tensor(values, dtype=torch.float32)
        return self._known[path]


class TableTarget(PathTarget):
    """The same distribution everywhere, or by last token: for exact probabilities."""

    def __init__(self, logits: Mapping[int, Sequence[float]] | Sequence[float], **facts: Any):
        table = logits if isinstance(logits, Mapping) else {-1: logits}
        super().__init__(len(next(iter(table.values()))), **facts)
        self._table = {token: torch.tensor(row) for token, row in table.items()}

    def path_logits(self, path: tuple[int, ...]) -> torch.Tensor:
        return self._table.get(path[-1], self._table.get(-1, next(iter(self._table.values()))))


class UncachedTarget(PathTarget):
    """A transformers causal LM run over each row's whole path, one path at a time."""

    def __init__(self, model: Any, **facts: Any) -> None:
        super().__init__(model.config.vocab_size, **facts)
        self._model = model

    def path_logits(self, path: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([path])
            return self._model(input_ids=ids, use_cache=False).logits[0, -1].float()


# Sources of drafts: (view, plan) -> tree.

Source = Callable[[SequenceView, Plan], CandidateTree]


def future_source(
    texts: Mapping[str, Sequence[int]], vocab_size: int, error_rate: float = 0.0, seed: int = 0
) -> Source:
    """Drafts the text that a request is known to become (prompt and output, by request id).

    Each depth is wrong with probability error_rate. In trees the right token stands among width
    wrong siblings, at a random place, and wrong branches go on.
    """
    rng = random.Random(seed)

    def draft(view: SequenceView, plan: Plan) -> CandidateTree:
        future = texts[view.request_id][view.base_len :]
        right = [
            rng.randrange(vocab_size) if rng.random() < error_rate else token
            for token in future[: plan.depth]
        ]
        if plan.kind is PlanKind.CHAIN:
            return chain(right, [-0.1 * (i + 1) for i in range(len(right))])
        return _bush(right, plan, vocab_size, rng)

    return draft


def random_source(vocab_size: int, seed: int = 0) -> Source:
    """Lies: random tokens in the shape asked for."""
    rng = random.Random(seed)

    def draft(view: SequenceView, plan: Plan) -> CandidateTree:
        tokens = [rng.randrange(vocab_size) for _ in range(plan.depth)]
        if plan.kind is PlanKind.CHAIN:
            return chain(tokens)
        return _bush(tokens, plan, vocab_size, rng)

    return draft


def constant_source(token: int) -> Source:
    """Always proposes a chain of one token: an EOS, for instance."""
    return lambda view, plan: chain([token] * plan.depth)


def fixed_children_source(children: Callable[[Sequence[int], int], Sequence[int]]) -> Source:
    """A full tree of plan.depth levels whose children a function of (path, width) names."""

    def draft(view: SequenceView, plan: Plan) -> CandidateTree:
        tokens: list[int] = []
        parents: list[int] = []
        level: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for _ in range(plan.depth):
            below: list[tuple[int, tuple[int, ...]]] = []
            for parent, path in level:
                for token in children([*view.tokens, *path], plan.width):
                    tokens.append(token)
                    parents.append(parent)
                    below.append((len(tokens), (*path, token)))
            level = below
        return CandidateTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens))

    return draft


def _bush(right: Sequence[int], plan: Plan, vocab_size: int, rng: random.Random) -> CandidateTree:
    """A tree around one path: at every depth `width` children under a random node of the last."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    on_path = 0
    for depth, token in enumerate(right, 1):
        if len(tokens) >= plan.nodes:
            break
        others = rng.sample(range(vocab_size), min(plan.width, vocab_size))
        family = [t for t in others if t != token][: plan.width - 1]
        family.insert(rng.randrange(len(family) + 1), token)
        first = len(tokens)
        for sibling in family:
            tokens.append(sibling)
            parents.append(on_path)
            scores.append(-float(depth) - (sibling != token))
        if on_path and first and rng.random() < 0.5:
            aside = rng.randrange(1, first + 1)
            extra = rng.randrange(vocab_size)
            taken = {t for t, p in zip(tokens, parents, strict=True) if p == aside}
            if aside != on_path and extra not in taken:
                tokens.append(extra)
                parents.append(aside)
                scores.append(-9.0)
        on_path = first + family.index(token) + 1
    return CandidateTree(tuple(tokens), tuple(parents), tuple(scores)).best(plan.nodes)


@dataclass
class FakeDrafting:
    """A draft exchange over in-process sources. `fail_every`: every n-th exchange raises.

    `lag`: sources answer the view of the exchange before, re-rooted; such drafts are late.
    `sessions`: keys that were shown and not yet forgotten.
    """

    drafters: dict[str, Source] = field(default_factory=dict)
    fail_every: int = 0
    lag: bool = False
    alter: Callable[[Draft], Draft] = lambda draft: draft
    sessions: set[int] = field(default_factory=set)
    asked: list[tuple[DraftAsk, ...]] = field(default_factory=list)
    is_closed: bool = False
    _waiting: dict[tuple[int, str], tuple[int, CandidateTree]] = field(default_factory=dict)

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    def sources(self) -> Sequence[SourceInfo]:
        return [
            SourceInfo(
                name,
                Capabilities(kind="fake", name=name, incarnation=1, plan_kinds=ALL_PLANS),
                local=True,
            )
            for name in self.drafters
        ]

    def exchange(self, asks: Sequence[DraftAsk], deadline_s: float) -> dict[int, list[Draft]]:
        self.asked.append(tuple(asks))
        self.sessions |= {ask.view.key for ask in asks}
        if self.fail_every and len(self.asked) % self.fail_every == 0:
            raise OutriderError("the exchange failed on purpose")
        answers: dict[int, list[Draft]] = {}
        for ask in asks:
            for wanted in ask.plans:
                if wanted.plan.kind is PlanKind.NONE:
                    continue
                tree = self.drafters[wanted.source](ask.view, wanted.plan)
                draft = self._deliver(ask.view, wanted.source, tree)
                if draft is not None:
                    answers.setdefault(ask.view.key, []).append(self.alter(draft))
        return answers

    def forget(self, key: int) -> None:
        self.sessions.discard(key)

    def close(self) -> None:
        self.is_closed = True

    def _deliver(self, view: SequenceView, source: str, tree: CandidateTree) -> Draft | None:
        if not self.lag:
            return Draft(source, view.base_len, tree)
        last = self._waiting.get((view.key, source))
        self._waiting[view.key, source] = (view.base_len, tree)
        if last is None or last[0] > view.base_len:
            return None
        rooted = last[1].reroot(tuple(view.tokens[last[0] : view.base_len]))
        return Draft(source, view.base_len, rooted, was_late=True)


class RandomPlanner:
    """Any plan for any view, and any closed subset of nodes admitted: the worst adviser."""

    def __init__(self, seed: int = 0, max_depth: int = 6) -> None:
        self._rng = random.Random(seed)
        self._max_depth = max_depth
        self.outcomes: list[RoundOutcome] = []
        self.steps: list[tuple[int, int, int]] = []
        self.forgotten: list[int] = []

    def plan(
        self, views: Sequence[SequenceView], sources: Sequence[SourceInfo]
    ) -> tuple[list[tuple[SourcePlan, ...]], float]:
        return [self._one(sources) for _ in views], self._rng.random()

    def _one(self, sources: Sequence[SourceInfo]) -> tuple[SourcePlan, ...]:
        rng = self._rng
        return tuple(
            SourcePlan(
                source.name,
                Plan(
                    rng.choice(ALL_PLANS),
                    depth=rng.randint(1, self._max_depth),
                    width=rng.randint(1, 4),
                    nodes=rng.randint(1, 16),
                ),
            )
            for source in sources
            if rng.random() < 0.8
        )

    def admit(
        self,
        views: Sequence[SequenceView],
        trees: Sequence[CandidateTree],
        room: int,
        sources: Sequence[tuple[tuple[str, ...], ...]] = (),
    ) -> list[CandidateTree]:
        admitted = []
        for tree in trees:
            kept: list[int] = []
            for node, parent in enumerate(tree.parents, 1):
                if (parent == 0 or parent in kept) and self._rng.random() < 0.9:
                    kept.append(node)
            cut = tree.keep(kept[:room])
            room -= cut.num_nodes
            admitted.append(cut)
        return admitted

    def observe_round(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)

    def observe_step(
        self,
        num_rows: int,
        num_branching: int,
        context: int,
        verify_s: float,
        wait_s: float,
        other_s: float = 0.0,
    ) -> None:
        self.steps.append((num_rows, num_branching, context))

    def forget(self, key: int) -> None:
        self.forgotten.append(key)


class Client:
    """Submits requests to an engine and collects what comes out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runs: dict[str, list[TokenRun]] = {}
        self.keys: dict[str, int] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Queue one request; its id must be new."""
        runs = self.runs[request.request_id] = []
        self.keys[request.request_id] = self.engine.submit(request, runs.append)

    def finish(self, max_steps: int = 5000) -> dict[str, tuple[int, ...]]:
        """Step until idle; output ids by request id."""
        for _ in range(max_steps):
            if not self.engine.step():
                return self.texts()
        raise AssertionError(f"still busy after {max_steps} steps")

    def texts(self) -> dict[str, tuple[int, ...]]:
        """Output so far by request id."""
        return {name: self.ids(name) for name in self.runs}

    def ids(self, name: str) -> tuple[int, ...]:
        """Output so far of one request."""
        return tuple(token for run in self.runs[name] for token in run.ids)

    def last(self, name: str) -> TokenRun:
        """The newest run of one request."""
        return self.runs[name][-1]


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 24,
    output: Sequence[int] = (),
    speculation: Speculation | None = None,
    **sampling: Any,
) -> GenerationRequest:
    """A generation request; greedy unless a temperature is given."""
    params = SamplingParams(**({"temperature": 0.0} | sampling), max_tokens=max_tokens)
    return GenerationRequest(
        name, tuple(prompt), params, tuple(output), speculation or Speculation()
    )


def small_settings(**changes: Any) -> EngineSettings:
    """Settings in which pages, chunks and budgets end often."""
    values = {
        "page_size": 4,
        "num_slots": 1024,
        "max_tokens_per_step": 64,
        "max_prefill_chunk": 16,
        "max_running": 8,
        "max_queued": 64,
    }
    return EngineSettings(**(values | changes))
