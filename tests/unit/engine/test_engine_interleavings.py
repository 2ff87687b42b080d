"""Any interleaving of submit, step, cancel, time, preemption and finish, with any drafts.

After every act: pages balance exactly, no counter went down, nobody is answered twice, and what was
said so far is the beginning of the text that plain loops give. In the end everybody has exactly one
last run, and whoever was neither cancelled nor late has the whole text.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from protos.errors import Overloaded
from protos.exchange import Plan, PlanKind
from protos.generation import FinishReason, GenerationRequest
from protos.options import LogitOptions
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    RandomPlanner,
    future_source,
    random_source,
    request,
    small_settings,
)
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.engine.stats import EngineCounters, EngineStats
from verifier_service.sampling.reference import choose_reference, shaped_reference

VOCAB = 41
EOS = 7
MAX_RUNNING, MAX_QUEUED = 4, 3
NUM_SLOTS = 80
"""Two or three requests fill it; one may have it all, so it is the context limit too."""
OPTIONS = (LogitOptions(), LogitOptions(), LogitOptions(repetition_penalty=1.5, min_tokens=1))
MAX_TOKENS = st.sampled_from([60, 30, 12, 1])
PLANS = [
    SourcePlan("good", Plan(PlanKind.CHAIN, depth=5)),
    SourcePlan("liar", Plan(PlanKind.TREE, depth=3, width=3, nodes=9)),
]
COUNTERS = tuple(
    field.name
    for field in fields(EngineStats)
    if field.name in {counter.name for counter in fields(EngineCounters)} | {"num_evicted_pages"}
    and field.type in ("int", "float", int, float)
)
SHARED_SCORES: dict[tuple[int, ...], torch.Tensor] = {}


class Target(HashTarget):
    """Scores are worked out once for all examples, and for the plain loops too."""

    def __init__(self) -> None:
        super().__init__(VOCAB, eos_token_ids=(EOS,))
        self._known = SHARED_SCORES


def plain_text(asked: GenerationRequest) -> tuple[int, ...]:
    """The text in plain loops: no engine, no cache, no drafts."""
    target, output = Target(), list[int]()
    most = min(asked.params.max_tokens, NUM_SLOTS - len(asked.prompt_ids))
    while len(output) < most and (not output or output[-1] != EOS):
        path = (*asked.prompt_ids, *output)
        logits = target.path_logits(path)
        if not asked.options.changes_nothing:
            logits = shaped_reference(logits, asked.options, asked.prompt_ids, output, (EOS,))
        token = choose_reference(logits, asked.params, len(path))
        assert token is not None
        output.append(token)
    return tuple(output)


class Interleaving(RuleBasedStateMachine):
    """`seen` adds up what all examples met, so that a test can say that nothing was left out."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        seed=st.integers(0, 2**16),
        prefix_cache=st.sampled_from([True, True, False]),
    )
    def begin(self, page_size: int, seed: int, prefix_cache: bool) -> None:
        self.now_s = 0.0
        self.seed = seed
        self.asked: list[GenerationRequest] = []
        self.texts: dict[str, tuple[int, ...]] = {}
        self.wholes: dict[str, tuple[int, ...]] = {}
        good = future_source(self.wholes, VOCAB, error_rate=0.2, seed=seed)
        sources = {"good": good, "liar": random_source(VOCAB, seed)}
        self.drafting = FakeDrafting(sources, lag=seed % 2 == 0, fail_every=7 * (seed % 3 == 1))
        self.engine = Engine(
            Target(),
            self.drafting,
            RandomPlanner(seed) if seed % 4 == 0 else StaticPlanner(PLANS),
            small_settings(
                page_size=page_size,
                num_slots=NUM_SLOTS,
                max_running=MAX_RUNNING,
                max_queued=MAX_QUEUED,
                max_prefill_chunk=9,
                max_prefill_while_decoding=5,
                prefix_cache=prefix_cache,
            ),
            clock=lambda: self.now_s,
        )
        self.client = Client(self.engine)
        self.before = self.engine.stats()

    @rule(
        num_prompt=st.sampled_from([1, 3, 9, 17, 40]),
        max_tokens=MAX_TOKENS,
        timeout_s=st.sampled_from([None, 1.0, 3.0]),
    )
    def submit(self, num_prompt: int, max_tokens: int, timeout_s: float | None) -> None:
        prompt = [(self.seed + j * num_prompt) % VOCAB for j in range(num_prompt)]
        self._submit(prompt, max_tokens, timeout_s)

    @rule(which=st.integers(0, 20), num_more=st.integers(1, 3), max_tokens=MAX_TOKENS)
    def go_on(self, which: int, num_more: int, max_tokens: int) -> None:
        """The next turn after an earlier text: its pages may be found."""
        if which < len(self.asked):
            earlier = self.asked[which]
            text = [*earlier.prompt_ids, *self.client.ids(earlier.request_id)]
            self._submit([*text[:60], *[self.seed % VOCAB] * num_more], max_tokens, None)

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        """Late, double and unknown ones too."""
        if which % 4 == 0:
            self.engine.cancel(1000 + which)
        elif self.asked:
            newest = self.asked[-1 - which % min(len(self.asked), 4)]
            self.engine.cancel(self.client.keys[newest.request_id])

    @rule(times=st.sampled_from([1, 2, 5, 12]))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @rule(passed_s=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_time(self, passed_s: float) -> None:
        self.now_s += passed_s

    @invariant()
    def pages_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_balance()

    @invariant()
    def counters_never_go_down(self) -> None:
        if hasattr(self, "engine"):
            now = self.engine.stats()
            assert all(getattr(now, name) >= getattr(self.before, name) for name in COUNTERS)
            old, new = Counter(dict(self.before.finished)), Counter(dict(now.finished))
            assert old <= new
            self.before = now

    @invariant()
    def what_is_said_is_the_beginning_of_the_text(self) -> None:
        for asked in getattr(self, "asked", ()):
            name = asked.request_id
            said = self.client.ids(name)
            assert said == self.texts[name][: len(said)]
            assert not any(run.finish_reason for run in self.client.runs[name][:-1])

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.client.finish()
        self.engine.check_idle()
        assert self.drafting.sessions == set()
        reasons = Counter[str]()
        for asked in self.asked:
            name = asked.request_id
            last = [run for run in self.client.runs[name] if run.finish_reason is not None]
            assert len(last) == 1
            reason = last[0].finish_reason
            reasons[reason.value] += 1
            if reason not in (FinishReason.CANCELLED, FinishReason.DEADLINE):
                assert self.client.ids(name) == self.texts[name]
        stats = self.engine.stats()
        assert Counter(dict(stats.finished)) == reasons
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_pages == stats.num_pages
        assert stats.num_cached_tokens <= stats.num_looked_up_tokens
        self.seen.update(reasons)
        for name in ("num_preemptions", "num_cached_tokens", "num_accepted", "num_evicted_pages"):
            self.seen[name] += getattr(stats, name)

    def _submit(self, prompt: Sequence[int], max_tokens: int, timeout_s: float | None) -> None:
        name = str(len(self.asked))
        made = request(name, prompt, max_tokens, temperature=0.9, seed=len(prompt))
        options = OPTIONS[len(prompt) % len(OPTIONS)]
        if options.min_tokens > max_tokens:
            options = LogitOptions()
        asked = replace(made, options=options, timeout_s=timeout_s)
        num_active = sum(
            not any(run.finish_reason for run in runs) for runs in self.client.runs.values()
        )
        if num_active >= MAX_RUNNING + MAX_QUEUED:
            with pytest.raises(Overloaded):
                self.engine.submit(asked, lambda run: pytest.fail("nobody was let in"))
            self.seen["refused"] += 1
            return
        self.texts[name] = plain_text(asked)
        self.wholes[name] = (*prompt, *self.texts[name])
        self.asked.append(asked)
        self.client.submit(asked)


def test_everything_balances_after_any_interleaving():
    Interleaving.seen.clear()
    sizes = settings(
        max_examples=50,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(Interleaving, settings=sizes)
    met = {"stop", "length", "cancelled", "deadline", "refused", "num_preemptions"}
    met |= {"num_cached_tokens", "num_accepted", "num_evicted_pages"}
    assert {name for name, count in Interleaving.seen.items() if count} >= met
