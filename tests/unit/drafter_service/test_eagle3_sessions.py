"""EAGLE-3 sessions: batching, cache, rows of both forms, missing and hostile rows."""

from dataclasses import replace

import pytest
import torch

from drafter_service.batcher import MAX_MISSING, draft_alone
from drafter_service.service import Job
from protos.exchange import ContextRows, DraftStatus, Plan, PlanKind
from protos.features import DType, FeatureForm
from protos.params import SamplingParams
from tests.unit.drafter_service.drafter_cases import ABSORB, GREEDY, opening, rows_of, work
from tests.unit.drafter_service.eagle3_cases import (
    HIDDEN,
    RAW_WIDTH,
    VOCAB,
    PlainDraft,
    eagle3_drafter,
    features_of,
    tiny_head,
    tokens_of,
)

SAMPLED = SamplingParams(temperature=0.8, seed=11, max_tokens=64)
FILTERED = SamplingParams(temperature=1.0, seed=-5, top_k=9, top_p=0.8, min_p=0.02, max_tokens=64)
CHAIN = Plan(kind=PlanKind.CHAIN, depth=5)
TREE = Plan(kind=PlanKind.TREE, depth=4, width=3, nodes=12)
RAW = opening(FeatureForm.RAW, RAW_WIDTH)
INCARNATION = 7


def opened(session_id, num_tokens, plan=TREE, params=GREEDY, num_rows=None, seed=0):
    """The work that opens a session with all its tokens and rows."""
    count = num_tokens - 1 if num_rows is None else num_rows
    return work(
        INCARNATION,
        tokens_of(num_tokens, seed),
        session_id=session_id,
        plan=plan,
        open=replace(RAW, params=params),
        rows=rows_of(features_of(num_tokens - 1, seed)[:count]) if count else None,
    )


def one(drafter, given):
    return drafter.handle([given])[0]


def assert_plain(result, head, num_tokens, plan, params, seed=0):
    plain = PlainDraft(head, tokens_of(num_tokens, seed), features_of(num_tokens - 1, seed), params)
    width = plan.width if plan.kind is PlanKind.TREE else 1
    nodes = plan.nodes if plan.kind is PlanKind.TREE else plan.depth
    expected = plain.tree(plan.depth, width, nodes)
    assert result.status is DraftStatus.OK
    assert list(zip(result.tree.tokens, result.tree.parents, strict=True)) == [
        (token, parent) for token, parent, _ in expected
    ]
    scores = torch.tensor([score for _, _, score in expected])
    torch.testing.assert_close(torch.tensor(result.tree.scores), scores, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "t0.8", "filters"])
@pytest.mark.parametrize("facts", [{}, {"norm_feedback": True, "fc_norm": True}])
def test_cached_draft_equals_full_recomputation(plan, params, facts):
    head = tiny_head(**facts)
    result = one(eagle3_drafter(head), opened(1, 9, plan, params))
    assert_plain(result, head, 9, plan, params)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rounds_that_extend_equal_full_recomputation(params):
    head = tiny_head()
    drafter = eagle3_drafter(head)
    tokens, features = tokens_of(20), features_of(19)
    first = work(
        INCARNATION,
        tokens[:6],
        plan=TREE,
        open=replace(RAW, params=params),
        rows=rows_of(features[:5]),
    )
    one(drafter, first)
    for start, end in [(6, 7), (7, 11), (11, 20)]:
        given = work(
            INCARNATION,
            tokens[start:end],
            token_start=start,
            plan=TREE,
            rows=rows_of(features[start - 1 : end - 1], start - 1),
        )
        result = one(drafter, given)
        plain = PlainDraft(head, tokens[:end], features[: end - 1], params)
        expected = plain.tree(TREE.depth, TREE.width, TREE.nodes)
        assert list(result.tree.tokens) == [token for token, _, _ in expected]
        assert list(result.tree.parents) == [parent for _, parent, _ in expected]


def mixed_works():
    plans = [CHAIN, TREE, replace(TREE, depth=2, width=5), replace(CHAIN, depth=1), ABSORB]
    params = [GREEDY, SAMPLED, FILTERED]
    return [
        opened(number, 4 + 3 * number, plans[number % 5], params[number % 3], seed=number)
        for number in range(10)
    ]


def test_batch_of_mixed_sessions_drafts_the_trees_of_each_alone():
    head = tiny_head()
    together = eagle3_drafter(head).handle(mixed_works())
    alone = [one(eagle3_drafter(head), given) for given in mixed_works()]
    assert together == alone


def test_plain_loop_over_sessions_is_the_reference_of_the_batch():
    head = tiny_head()
    drafters = [eagle3_drafter(head) for _ in range(2)]
    jobs = []
    for drafter in drafters:
        admitted = [drafter.sessions.admit(given, 0.0, set()) for given in mixed_works()]
        jobs.append(
            [
                Job(session, given.plan)
                for session, given in zip(admitted, mixed_works(), strict=True)
            ]
        )
    batched = drafters[0]._algorithm.batcher.run(jobs[0], lambda: False)
    looped = draft_alone(drafters[1]._algorithm.batcher, jobs[1], lambda: False)
    assert batched == looped


def test_fused_rows_draft_the_same_as_raw_rows():
    head = tiny_head(fc_norm=True)
    raw = one(eagle3_drafter(head), opened(1, 12))
    with torch.inference_mode():
        fused = head.fuse(features_of(11))
    given = replace(
        opened(1, 12), open=opening(FeatureForm.FUSED, HIDDEN), rows=rows_of(fused.clone())
    )
    assert one(eagle3_drafter(head), given) == raw


def test_rows_over_context_draft_the_same_as_rows_in_the_work():
    head = tiny_head()
    inline = one(eagle3_drafter(head), opened(1, 30))
    drafter = eagle3_drafter(head)
    one(drafter, opened(1, 30, plan=ABSORB, num_rows=0))
    features = features_of(29)
    for start in (0, 10, 20):
        piece = rows_of(features[start : start + 10], start)
        ack = drafter.absorb([ContextRows(1, INCARNATION, piece)])[0]
        assert (ack.held_rows, ack.lost) == (min(start + 10, 29), False)
    assert one(drafter, work(INCARNATION, [], token_start=30, plan=TREE)) == inline


def test_long_prompts_are_absorbed_in_several_forwards_with_the_same_result():
    head = tiny_head()
    result = one(eagle3_drafter(head, cache_bytes=1 << 22), opened(1, 600, CHAIN))
    assert_plain(result, head, 600, replace(CHAIN, depth=5), GREEDY)


def test_bf16_head_takes_rows_of_any_type():
    head = tiny_head(dtype=torch.bfloat16)
    for dtype, name in [
        (torch.float32, DType.FP32),
        (torch.bfloat16, DType.BF16),
        (torch.float16, DType.FP16),
    ]:
        given = replace(
            opened(1, 9),
            open=opening(FeatureForm.RAW, RAW_WIDTH, name),
            rows=rows_of(features_of(8, dtype=dtype)),
        )
        result = one(eagle3_drafter(head), given)
        assert result.status is DraftStatus.OK
        assert result.tree.num_nodes == TREE.nodes


def test_few_missing_rows_are_replaced_by_the_drafters_own():
    head = tiny_head()
    drafter = eagle3_drafter(head)
    tokens, features = tokens_of(12), features_of(11)
    result = one(drafter, opened(1, 12, CHAIN, num_rows=8))
    assert (result.status, result.held_rows) == (DraftStatus.OK, 8)
    # PlainDraft feeds its own y wherever features end, just so.
    plain = PlainDraft(head, tokens, features[:8], GREEDY)
    assert list(result.tree.tokens) == [token for token, _, _ in plain.tree(5, 1, 5)]
    # True rows that come later win over what was guessed.
    late = work(INCARNATION, [], token_start=12, plan=CHAIN, rows=rows_of(features[8:], 8))
    assert one(drafter, late) == one(eagle3_drafter(head), opened(1, 12, CHAIN))


def test_many_missing_rows_are_not_ready_and_tell_what_is_held():
    drafter = eagle3_drafter(tiny_head())
    result = one(drafter, opened(1, 12 + MAX_MISSING, num_rows=10))
    assert (result.status, result.held_rows) == (DraftStatus.NOT_READY, 10)
    assert one(drafter, opened(2, 4, num_rows=0)).status is DraftStatus.NOT_READY


def test_a_gap_in_the_rows_is_not_absorbed():
    drafter = eagle3_drafter(tiny_head())
    one(drafter, opened(1, 12, num_rows=4))
    piece = rows_of(features_of(11)[6:], 6)
    ack = drafter.absorb([ContextRows(1, INCARNATION, piece)])[0]
    assert (ack.held_rows, ack.lost) == (4, False)


def test_asking_twice_for_one_prefix_drafts_the_same():
    drafter = eagle3_drafter(tiny_head())
    first = one(drafter, opened(1, 12))
    assert one(drafter, work(INCARNATION, [], token_start=12, plan=TREE)) == first


def test_shortened_session_drafts_again_once_its_rows_are_sent_again():
    head = tiny_head()
    drafter = eagle3_drafter(head)
    one(drafter, opened(1, 12))
    tokens, features = tokens_of(12), features_of(11)
    short = work(INCARNATION, tokens[5:8], token_start=5, plan=TREE, open=RAW)
    result = one(drafter, short)
    assert result.status is DraftStatus.NOT_READY
    held = result.held_rows
    again = work(INCARNATION, [], token_start=8, plan=TREE, rows=rows_of(features[held:7], held))
    assert one(drafter, again) == one(eagle3_drafter(head), opened(1, 8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("place", [0, 10])
def test_rows_that_are_not_finite_end_their_session_alone(value, place):
    head = tiny_head()
    drafter = eagle3_drafter(head)
    bad_features = features_of(11)
    bad_features[place] = value
    works = [opened(1, 12), replace(opened(2, 12), rows=rows_of(bad_features)), opened(3, 9)]
    first, bad, third = drafter.handle(works)
    assert bad.status is DraftStatus.REFUSED
    assert drafter.load().num_sessions == 2
    assert first == one(eagle3_drafter(head), works[0])
    assert third == one(eagle3_drafter(head), works[2])
    # Slots that held the bad session's rows are used again without harm.
    later = replace(opened(4, 30, seed=4), incarnation=INCARNATION)
    assert one(drafter, later) == one(eagle3_drafter(head), later)


def test_context_rows_that_are_not_finite_lose_their_session():
    drafter = eagle3_drafter(tiny_head())
    one(drafter, opened(1, 12, plan=ABSORB, num_rows=0))
    piece = rows_of(torch.full((4, RAW_WIDTH), float("nan")))
    assert drafter.absorb([ContextRows(1, INCARNATION, piece)])[0].lost
    assert drafter.load().num_sessions == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"rows": rows_of(torch.zeros(3, RAW_WIDTH + 1))},
        {"rows": rows_of(torch.zeros(3, RAW_WIDTH, dtype=torch.bfloat16))},
        {"open": opening(FeatureForm.RAW, RAW_WIDTH + 1)},
        {"open": opening(FeatureForm.NONE, 0)},
        {"tokens": (VOCAB, *range(11))},
    ],
    ids=["width", "dtype", "open width", "no rows", "id"],
)
def test_malformed_sessions_are_refused_beside_good_ones(bad):
    drafter = eagle3_drafter(tiny_head())
    refused, good = drafter.handle([replace(opened(1, 12), **bad), opened(2, 12)])
    assert (refused.status, good.status) == (DraftStatus.REFUSED, DraftStatus.OK)
    assert refused.detail
    assert drafter.load().num_sessions == 1


def test_tiny_byte_budget_evicts_idle_sessions_and_they_are_lost():
    head = tiny_head()
    row_bytes = 2 * 2 * 8 * 4
    drafter = eagle3_drafter(head, cache_bytes=row_bytes * 64 * 3)
    for session_id in range(4):
        assert one(drafter, opened(session_id, 12, seed=session_id)).status is DraftStatus.OK
    assert drafter.load().num_sessions == 3
    tail = {"token_start": 12, "plan": TREE}
    assert one(drafter, work(INCARNATION, [], session_id=0, **tail)).status is DraftStatus.LOST
    kept = one(drafter, work(INCARNATION, [], session_id=3, **tail))
    assert kept.tree == one(eagle3_drafter(head), opened(3, 12, seed=3)).tree


def test_session_that_never_fits_is_refused_and_others_survive():
    head = tiny_head()
    row_bytes = 2 * 2 * 8 * 4
    drafter = eagle3_drafter(head, cache_bytes=row_bytes * 64)
    assert one(drafter, opened(1, 100)).status is DraftStatus.REFUSED
    assert one(drafter, opened(2, 12)).status is DraftStatus.OK


def test_growing_sessions_move_inside_the_slab_without_a_change():
    head = tiny_head()
    drafter = eagle3_drafter(head)
    tokens, features = tokens_of(300), features_of(299)
    one(drafter, opened(2, 12, seed=2))
    held = 1
    for end in (40, 70, 150, 300):
        given = work(
            INCARNATION,
            tokens[held if held > 1 else 0 : end],
            token_start=held if held > 1 else 0,
            plan=CHAIN,
            open=RAW if held == 1 else None,
            rows=rows_of(features[held - 1 : end - 1], held - 1),
        )
        result = one(drafter, given)
        held = end
    plain = PlainDraft(head, tokens, features, GREEDY)
    assert list(result.tree.tokens) == [token for token, _, _ in plain.tree(5, 1, 5)]
    other = one(drafter, work(INCARNATION, [], session_id=2, token_start=12, plan=TREE))
    assert other.tree == one(eagle3_drafter(head), opened(2, 12, seed=2)).tree


def test_dropped_sessions_give_their_slots_back():
    drafter = eagle3_drafter(tiny_head())
    slab = drafter._algorithm.slab
    for session_id in range(5):
        one(drafter, opened(session_id, 100 * (session_id + 1), CHAIN))
    assert slab.num_free < slab.num_slots
    drafter.handle([work(INCARNATION, [], session_id=i, close=True) for i in (3, 0, 4, 1, 2)])
    assert slab.num_free == slab.num_slots
    assert slab.reserve(None, 0, slab.num_slots) is not None


def test_ranked_ids_are_the_best_after_the_best_path():
    head = tiny_head()
    result = one(eagle3_drafter(head), opened(1, 9))
    plain = PlainDraft(head, tokens_of(9), features_of(8), GREEDY)
    path = []
    for ids in result.ranked_ids:
        assert list(ids) == [token for token, _ in plain.children(path, 8)]
        path.append(ids[0])
    assert len(result.ranked_ids) >= 2


def test_sampled_drafts_change_with_the_seed_and_not_from_run_to_run():
    head = tiny_head()
    drafts = [
        one(eagle3_drafter(head), opened(1, 9, CHAIN, replace(SAMPLED, seed=seed))).tree
        for seed in (1, 1, 2, 3)
    ]
    assert drafts[0] == drafts[1]
    assert len({draft.tokens for draft in drafts}) > 1
