"""Replays refuse what cannot be replayed, and count texts that a trainer holds as tensors."""

from dataclasses import replace

import pytest
import torch

from drafter_service.build import build_drafter
from drafter_service.config import DrafterSettings
from drafter_service.replay import Source, replay, replay_drafter
from drafter_service.replay_counts import ReplayCounts, total
from drafter_service.replay_texts import text_of
from protos.errors import ConfigError, IncompatiblePair, MalformedRows, OutriderError, ProtocolError
from protos.exchange import DraftStatus, Plan, PlanKind
from protos.params import Acceptance, SamplingParams
from protos.tree import chain
from tests.unit.drafter_service.eagle3_cases import (
    RAW_WIDTH,
    eagle3_drafter,
    features_of,
    tiny_head,
    tokens_of,
)

CHAIN4 = Plan(PlanKind.CHAIN, 4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def text(seed=0, length=30, width=RAW_WIDTH, params=GREEDY, **more):
    rows = features_of(length - 1, seed, width)
    return text_of(tokens_of(length, seed), 10, rows, params, **more)


class Puppet:
    """Answers with what a test says."""

    def __init__(self, change):
        self.inner, self.change = eagle3_drafter(tiny_head()), change
        self.capabilities = self.inner.capabilities

    def handle(self, works):
        return [self.change(result) for result in self.inner.handle(works)]


def test_texts_of_tensors_are_replayed_to_their_ends():
    texts = [text(seed, 20 + seed) for seed in range(5)]
    counts = replay_drafter(eagle3_drafter(tiny_head()), texts, CHAIN4)
    assert counts.num_committed == sum(len(t.tokens) - 11 for t in texts)
    assert counts.num_committed == counts.num_accepted + counts.num_rounds
    assert counts.num_draft_rounds == counts.num_rounds - 5 + _ends_early(texts)


def _ends_early(texts):
    """Texts whose last token came as a bonus of a drafted round."""
    drafter = eagle3_drafter(tiny_head())
    counts = replay(texts, [Source("head", drafter)], CHAIN4)
    return sum(one.num_draft_rounds == one.num_rounds for one in counts)


def test_bfloat16_rows_pass_unchanged():
    rows = features_of(12, dtype=torch.bfloat16)
    raw = text_of(tokens_of(13), 4, rows, GREEDY).rows((0, 1, 2))
    assert torch.equal(
        torch.frombuffer(bytearray(raw.data), dtype=torch.bfloat16).view(12, -1), rows
    )


def test_counts_are_summed_text_by_text():
    one = ReplayCounts(3, 2, 8, 4, 7, (3, 1), (("a", 4),))
    other = ReplayCounts(2, 2, 4, 1, 3, (1,), (("b", 1),))
    both = total([one, other])
    assert both == ReplayCounts(5, 4, 12, 5, 10, (4, 1), (("a", 4), ("b", 1)))
    assert both.tau == 2.0
    assert both.acceptance_by_depth == (0.8, 0.2)
    assert total([]) == ReplayCounts()


def test_a_text_of_another_target_is_refused():
    drafter = eagle3_drafter(tiny_head(), target_digest="a" * 32)
    with pytest.raises(IncompatiblePair, match="belongs to target"):
        replay_drafter(drafter, [replace(text(), target_digest="b" * 32)], CHAIN4)


def test_rows_of_another_width_are_refused():
    with pytest.raises(IncompatiblePair, match=f"rows of {RAW_WIDTH}"):
        replay_drafter(eagle3_drafter(tiny_head()), [text(width=7)], CHAIN4)


def test_too_few_rows_are_refused():
    short = replace(text(), rows=text(length=20).rows)
    with pytest.raises(ConfigError, match="30 tokens"):
        replay_drafter(eagle3_drafter(tiny_head()), [short], CHAIN4)


def test_a_drafter_of_projected_rows_only_is_refused():
    puppet = Puppet(lambda result: result)
    puppet.capabilities = replace(puppet.capabilities, raw_width=0)
    with pytest.raises(ConfigError, match="projected rows only"):
        replay([text()], [Source("head", puppet)], CHAIN4)


def test_a_plan_that_nobody_drafts_is_refused():
    ngram = build_drafter(DrafterSettings(kind="ngram"))
    silent = Puppet(lambda result: result)
    silent.capabilities = replace(silent.capabilities, plan_kinds=(PlanKind.BLOCK,))
    with pytest.raises(ConfigError, match="drafts no chain"):
        replay([text()], [Source("silent", silent)], CHAIN4)
    assert replay([text()], [Source("n", ngram), Source("silent", silent)], CHAIN4)
    with pytest.raises(ConfigError, match="nobody"):
        replay([text()], [], CHAIN4)


def test_texts_made_by_rejection_are_refused():
    params = SamplingParams(acceptance=Acceptance.REJECTION)
    with pytest.raises(ConfigError, match="rejection"):
        replay_drafter(eagle3_drafter(tiny_head()), [text(params=params)], CHAIN4)


@pytest.mark.parametrize("status", [DraftStatus.REFUSED, DraftStatus.NOT_READY, DraftStatus.LOST])
def test_a_drafter_that_does_not_draft_ends_the_replay_and_keeps_no_session(status):
    puppet = Puppet(lambda result: replace(result, status=status, detail="because"))
    with pytest.raises(OutriderError, match=rf"head answered {status} at token 11: because"):
        replay([text(), text(1)], [Source("head", puppet)], CHAIN4)
    assert len(puppet.inner.sessions) == 0


def test_a_draft_larger_than_its_plan_is_refused():
    puppet = Puppet(lambda result: replace(result, tree=chain(range(1, 7))))
    with pytest.raises(ProtocolError, match="asked for 4 nodes"):
        replay([text()], [Source("head", puppet)], CHAIN4)


@pytest.mark.parametrize(("prompt_len", "length"), [(0, 9), (9, 9), (10, 9)])
def test_a_text_needs_a_prompt_and_an_answer(prompt_len, length):
    with pytest.raises(MalformedRows, match="prompt"):
        text_of(tokens_of(length), prompt_len, features_of(length), GREEDY)


def test_rows_must_be_a_table_of_floats():
    broken = text_of(tokens_of(12), 4, torch.zeros(11, dtype=torch.int64), GREEDY)
    with pytest.raises(MalformedRows, match=r"\[N, A\]"):
        broken.rows(())
