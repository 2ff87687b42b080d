"""How a step is laid out: merged drafts, spans whose rows are nodes, accepted paths made whole."""

import pytest

from protos.tree import CandidateTree, chain
from tests.fakes import request
from verifier_service.engine.asking import fair_cut
from verifier_service.engine.batch import (
    MergedDraft,
    build_batch,
    is_draft_usable,
    merge_drafts,
    moves,
)
from verifier_service.engine.ports import Draft
from verifier_service.engine.request import Ends, RunningRequest
from verifier_service.engine.scheduler import Share
from verifier_service.sampling.walk import WalkEnd

#        anchor
#        /    \
#       7      8
#      / \     |
#     1   2    3
BUSH = CandidateTree((7, 8, 1, 2, 3), (0, 0, 1, 1, 2), (-0.1, -0.5, -0.3, -0.9, -0.6))


def decoding(prompt_len: int = 6, pages: tuple[int, ...] = (1, 2, 3, 4)) -> RunningRequest:
    ends = Ends(512, frozenset())
    one = RunningRequest(3, request("a", range(prompt_len), 50), ends, lambda run: None, 0.0)
    one.grant(pages, page_size=4)
    one.computed_len = prompt_len - 1
    return one


def draft(source: str, tree: CandidateTree, base_len: int = 6) -> Draft:
    return Draft(source, base_len, tree)


def test_equal_children_become_one_node_with_both_proposers():
    merged = merge_drafts([draft("a", chain([7, 1])), draft("b", BUSH), draft("a", BUSH)], 9)
    assert set(zip(merged.tree.tokens, merged.sources, strict=True)) == {
        (7, ("a", "b")),
        (1, ("a", "b")),
        (8, ("b", "a")),
        (2, ("b", "a")),
        (3, ("b", "a")),
    }


def test_levels_past_the_last_token_that_may_be_committed_are_left_out():
    merged = merge_drafts([draft("a", BUSH)], 1)
    assert merged.tree.tokens == (7, 8)
    assert merged.sources == (("a",), ("a",))
    assert merge_drafts([draft("a", BUSH)], 0).tree.num_nodes == 0


def test_cutting_a_draft_keeps_each_nodes_proposers():
    merged = merge_drafts([draft("a", chain([7, 1])), draft("b", BUSH)], 9)
    for count in range(6):
        cut = merged.cut_to(merged.tree.best(count))
        assert cut.tree.num_nodes == len(cut.sources) == count
        for token, names in zip(cut.tree.tokens, cut.sources, strict=True):
            assert names == (("a", "b") if token in (7, 1) else ("b",))


@pytest.mark.parametrize(
    ("given", "is_usable"),
    [
        (draft("a", BUSH), True),
        (draft("a", CandidateTree()), True),
        (draft("a", BUSH, base_len=5), False),
        (draft("a", chain([10])), False),
        (draft("a", chain([-1])), False),
    ],
)
def test_only_drafts_for_this_prefix_and_vocabulary_are_usable(given: Draft, is_usable: bool):
    assert is_draft_usable(given, base_len=6, vocab_size=10) is is_usable


def test_rows_of_a_decoding_span_are_the_nodes_of_its_tree():
    one = decoding()
    batch = build_batch([Share(one, 1)], {3: MergedDraft(BUSH, (("a",),) * 5)})
    (span,) = batch.spans
    assert span.token_ids == (5, *BUSH.tokens)
    assert span.parents == (-1, 0, 0, 1, 1, 2)
    assert span.start == 5
    assert span.num_logits == 6
    assert span.slots.tolist() == list(range(4, 15))
    assert span.first_slot == 4
    assert batch.num_branching == batch.num_rows == 6
    assert batch.context == 5


def test_chains_and_anchors_need_no_parents():
    for tree in (CandidateTree(), chain([1, 2])):
        (span,) = build_batch([Share(decoding(), 1)], {3: MergedDraft(tree)}).spans
        assert span.parents is None


def test_prompt_chunks_ask_for_logits_only_at_their_end():
    one = decoding(prompt_len=10)
    one.computed_len = 2
    (first,) = build_batch([Share(one, 5)], {}).spans
    assert first.token_ids == (2, 3, 4, 5, 6)
    assert first.num_logits == 0
    (last,) = build_batch([Share(one, 8)], {}).spans
    assert last.num_logits == 1


def test_walks_start_at_the_rows_of_their_own_logits():
    prompt, first, second = decoding(10), decoding(), decoding()
    prompt.computed_len, second.key = 2, 4
    shares = [Share(first, 1), Share(prompt, 3), Share(second, 1)]
    batch = build_batch(shares, {3: MergedDraft(BUSH), 4: MergedDraft(chain([1]))})
    assert [None if w is None else w.first_row for w in batch.walks] == [0, None, 6]
    assert batch.walks[0] is not None
    assert batch.walks[0].base_len == 6


def test_only_nodes_out_of_line_are_moved():
    one = decoding(pages=(1, 9, 3, 4))
    slots = one.slots(16).tolist()
    assert moves(one, WalkEnd((), (4,))) is None
    assert moves(one, WalkEnd((1, 2), (7, 1, 0))) is None
    pair = moves(one, WalkEnd((1, 4, 5), (7, 2, 3, 0)))
    assert pair is not None
    assert pair[0].tolist() == [slots[5 + 4], slots[5 + 5]]
    assert pair[1].tolist() == [slots[5 + 2], slots[5 + 3]]


def test_room_is_shared_evenly_when_trees_do_not_fit():
    trees = [chain(range(10)), chain(range(2)), chain(range(10))]
    assert [t.num_nodes for t in fair_cut(trees, 30)] == [10, 2, 10]
    assert [t.num_nodes for t in fair_cut(trees, 12)] == [5, 2, 5]
    assert [t.num_nodes for t in fair_cut(trees, 2)] == [1, 0, 1]
    assert [t.num_nodes for t in fair_cut(trees, 0)] == [0, 0, 0]
    assert fair_cut([], 5) == []
