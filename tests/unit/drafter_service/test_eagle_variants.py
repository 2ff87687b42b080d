"""Every head of the EAGLE family through sessions: layers, windows, rotary kinds, masked rows."""

from dataclasses import replace

import pytest
import torch

from drafter_service.batcher import draft_alone
from drafter_service.eagle.head import EagleHead
from drafter_service.eagle3.config import LayerFacts, Rope
from drafter_service.eagle3.reference import masked_rows
from drafter_service.ranking import NodeRows, rank_children
from drafter_service.service import Job
from drafter_service.static_tree import STATIC_NODES
from protos.exchange import DraftStatus, Plan, PlanKind
from protos.features import FeatureForm
from protos.params import SamplingParams
from tests.unit.drafter_service.drafter_cases import GREEDY, opening, rows_of, work
from tests.unit.drafter_service.eagle3_cases import (
    HIDDEN,
    PlainDraft,
    eagle3_drafter,
    eagle_drafter,
    features_of,
    tiny_eagle_head,
    tiny_head,
    tokens_of,
)

SAMPLED = SamplingParams(temperature=0.8, seed=11, max_tokens=64)
CHAIN = Plan(kind=PlanKind.CHAIN, depth=5)
TREE = Plan(kind=PlanKind.TREE, depth=4, width=3, nodes=12)
STATIC = Plan(kind=PlanKind.STATIC, depth=5, nodes=STATIC_NODES)
LONG = Rope(
    10000.0,
    "longrope",
    original_max_positions=8,
    attention_factor=1.2,
    short_factors=(1.0, 1.1, 1.2, 1.5),
    long_factors=(1.0, 2.0, 3.0, 4.0),
)
THREE = {"num_layers": 3, "windows": (3, None, 4)}
WIDE = LayerFacts(HIDDEN, 4, 4, 16, 48, 1e-5, qkv_bias=True, mlp_bias=True)

HEADS = {
    "eagle": lambda: tiny_eagle_head(),
    "eagle, no bias": lambda: tiny_eagle_head(fc_bias=False),
    "eagle, two layers": lambda: tiny_eagle_head(layer=WIDE, num_layers=2),
    "three layers with windows": lambda: tiny_head(**THREE),
    "doubled layers": lambda: tiny_head(num_layers=2, windows=(None, None), doubled_layers=True),
    "window": lambda: tiny_head(windows=(5,), norm_before_residual=True),
    "biases": lambda: tiny_head(attention_bias=True, mlp_bias=True, fc_bias=True),
    "dynamic": lambda: tiny_head(rope=Rope(10000.0, "dynamic", 4.0, original_max_positions=8)),
    "longrope": lambda: tiny_head(rope=LONG),
    "final feature": lambda: tiny_head(aux_layers=(65535,), has_fc=False),
    "full vocabulary": lambda: tiny_head(draft_vocab_size=96),
}
MASKED = {
    "peagle": lambda: tiny_head(mask_token_id=3, num_layers=2, windows=(None, None)),
    "peagle, window": lambda: tiny_head(mask_token_id=95, windows=(4,), fc_norm=True),
}


def drafter_of(head):
    return eagle_drafter(head) if isinstance(head, EagleHead) else eagle3_drafter(head)


def width_of(head):
    return HIDDEN if isinstance(head, EagleHead) else head.config.feature_size


class PlainMasked(PlainDraft):
    """P-EAGLE's children do not depend on the path, only on its length."""

    def children(self, path, count):
        ids = torch.tensor(self.tokens[1:])
        num_levels = len(path) + 1
        with torch.inference_mode():
            logits = masked_rows(self.head, self.features, ids, num_levels).logits[-1:]
        group = NodeRows(1, self.params, len(self.tokens) + len(path))
        ranked = rank_children(logits, [group], self.head.target_ids, count)
        return list(zip(ranked.ids[0].tolist(), ranked.scores[0].tolist(), strict=True))


def plain_draft(head, tokens, features, params):
    masked = getattr(head.config, "mask_token_id", None) is not None
    draft = (PlainMasked if masked else PlainDraft)(head, tokens, features, params)
    draft.features = features
    return draft


def rounds(head, plans, params=GREEDY, cuts=(6, 7, 11, 20)):
    """(result, plain draft) of rounds that extend one session."""
    tokens, features = tokens_of(cuts[-1]), features_of(cuts[-1] - 1, width=width_of(head))
    drafter = drafter_of(head)
    start = 0
    for number, end in enumerate(cuts):
        first_row = max(start - 1, 0)
        given = work(
            7,
            tokens[start:end],
            token_start=start,
            plan=plans[number % len(plans)],
            open=None if start else opening(FeatureForm.RAW, width_of(head), params=params),
            rows=rows_of(features[first_row : end - 1], first_row),
        )
        result = drafter.handle([given])[0]
        assert result.status is DraftStatus.OK, result.detail
        yield result, plain_draft(head, tokens[:end], features[: end - 1], params)
        start = end


def assert_nodes(result, expected):
    assert list(zip(result.tree.tokens, result.tree.parents, strict=True)) == [
        (token, parent) for token, parent, _ in expected
    ]
    scores = torch.tensor([score for _, _, score in expected])
    torch.testing.assert_close(torch.tensor(result.tree.scores), scores, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "t0.8"])
@pytest.mark.parametrize("name", [*HEADS, *MASKED])
def test_rounds_of_every_head_equal_full_recomputation(name, params):
    head = (HEADS | MASKED)[name]()
    for result, plain in rounds(head, [TREE, CHAIN], params):
        is_tree = result.base_len in (6, 11)
        plan = TREE if is_tree else CHAIN
        nodes = plan.nodes if is_tree else plan.depth
        assert_nodes(result, plain.tree(plan.depth, plan.width, nodes))


def static_places():
    """The public shape as paths of ranks, in order of level."""
    paths = ["0", "1", "2", "3", "00", "01", "02", "10", "11", "20", "21", "30"]
    paths += ["000", "001", "002", "010", "011", "020", "021", "100"]
    return [*paths, "0000", "0001", "0002", "00000", "00001"]


@pytest.mark.parametrize("name", ["eagle", "three layers with windows", "peagle"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "t0.8"])
def test_the_static_tree_holds_the_ranks_of_its_places(name, params):
    head = (HEADS | MASKED)[name]()
    places = static_places()
    assert len(places) == STATIC_NODES == 25
    for result, plain in rounds(head, [STATIC], params):
        tokens = {"": ()}
        expected = []
        for place in places:
            path = tokens[place[:-1]]
            token, score = plain.children(list(path), 4)[int(place[-1])]
            tokens[place] = (*path, token)
            parent = 0 if len(place) == 1 else places.index(place[:-1]) + 1
            before = expected[parent - 1][2] if parent else 0.0
            expected.append((token, parent, before + score))
        assert_nodes(result, expected)
        assert len(result.ranked_ids) == 5


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_static_tree_of_fewer_levels_or_nodes_is_cut(depth):
    full = next(rounds(tiny_eagle_head(), [STATIC]))[0].tree
    cut = next(rounds(tiny_eagle_head(), [replace(STATIC, depth=depth)]))[0].tree
    assert cut.depth == depth
    assert full.tokens[: cut.num_nodes] == cut.tokens
    few = next(rounds(tiny_eagle_head(), [replace(STATIC, nodes=9)]))[0].tree
    assert (few.tokens, few.parents) == (full.tokens[:9], full.parents[:9])


@pytest.mark.parametrize("name", [*HEADS, *MASKED])
def test_a_batch_drafts_what_each_session_drafts_alone(name):
    head = (HEADS | MASKED)[name]()
    plans = [CHAIN, TREE, STATIC, replace(CHAIN, depth=1)]
    drafters = [drafter_of(head) for _ in range(2)]
    jobs = []
    for drafter in drafters:
        batch = []
        for number in range(8):
            count = 4 + 3 * number
            params = SAMPLED if number % 2 else GREEDY
            rows = features_of(count - 1, number, width_of(head))
            # Sessions 3 and 6 wait for their last rows.
            rows = rows[: count - 1 - (number % 3 == 0) * (number > 0)]
            given = work(
                7,
                tokens_of(count, number),
                session_id=number + 1,
                plan=plans[number % 4],
                open=opening(FeatureForm.RAW, width_of(head), params=params),
                rows=rows_of(rows),
            )
            session = drafter.sessions.admit(given, 0.0, set())
            batch.append(Job(session, given.plan))
        jobs.append(batch)
    together = drafters[0]._algorithm.run(jobs[0], lambda: False)
    alone = draft_alone(drafters[1]._algorithm.batcher, jobs[1], lambda: False)
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.tree.tokens, ours.tree.parents) == (theirs.tree.tokens, theirs.tree.parents)
        assert ours.ranked_ids == theirs.ranked_ids
        # A product of another number of rows may round otherwise in its last bit.
        scores = torch.tensor(ours.tree.scores), torch.tensor(theirs.tree.scores)
        torch.testing.assert_close(*scores, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["three layers with windows", "biases", "peagle"])
def test_fused_rows_draft_the_same_as_raw_ones(name):
    head = (HEADS | MASKED)[name]()
    raw = next(rounds(head, [TREE]))[0]
    with torch.inference_mode():
        fused = head.fuse(features_of(5)).clone()
    given = work(
        7,
        tokens_of(20)[:6],
        plan=TREE,
        open=opening(FeatureForm.FUSED, HIDDEN),
        rows=rows_of(fused),
    )
    assert drafter_of(head).handle([given])[0].tree == raw.tree


@pytest.mark.parametrize("name", ["eagle", "window", "peagle"])
@pytest.mark.parametrize("what", ["dropped", "swapped", "shifted"])
def test_wrong_rows_show_in_the_draft(name, what):
    """Otherwise a lost row, or one of another token or layer, could never be noticed."""
    head = (HEADS | MASKED)[name]()
    features = features_of(9, width=width_of(head))
    spoiled = features.clone()
    if what == "dropped":
        spoiled[5] = 0
    elif what == "swapped":
        spoiled[[5, 6]] = features[[6, 5]]
    else:
        spoiled = features.roll(HIDDEN // 2, dims=-1)
    drafts = []
    for rows in (features, spoiled):
        given = work(
            7,
            tokens_of(10),
            plan=TREE,
            open=opening(FeatureForm.RAW, width_of(head)),
            rows=rows_of(rows),
        )
        drafts.append(drafter_of(head).handle([given])[0].tree)
    assert drafts[0] != drafts[1]


def test_absorbing_and_drafting_masked_rows_is_one_forward():
    head = MASKED["peagle"]()
    drafter = drafter_of(head)
    steps = []
    step = drafter._algorithm.batcher._head.step

    def counted(*given):
        steps.append(len(given[0]))
        return step(*given)

    drafter._algorithm.batcher._head.step = counted
    given = work(
        7,
        tokens_of(10),
        plan=replace(CHAIN, depth=7),
        open=opening(FeatureForm.RAW, width_of(head)),
        rows=rows_of(features_of(9, width=width_of(head))),
    )
    assert drafter.handle([given])[0].tree.num_nodes == 7
    assert steps == [9 + 6]
