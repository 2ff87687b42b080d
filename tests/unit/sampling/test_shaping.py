"""Logit options follow design 4's order: equal to plain loops, per node, whatever the batch."""

import random

import pytest
import torch

from protos.errors import InvalidRequest
from protos.options import LogitOptions
from protos.params import Acceptance, SamplingParams
from protos.sparse import SparseQ
from protos.tree import CandidateTree, chain
from tests.unit.sampling.test_choice import random_params
from verifier_service.sampling.choice import ChoiceRow, choose
from verifier_service.sampling.choice_batch import choose_batch
from verifier_service.sampling.history import History, Past
from verifier_service.sampling.reference import choose_reference, shaped_reference
from verifier_service.sampling.rejection import Proposal
from verifier_service.sampling.shaping import shape_logits
from verifier_service.sampling.walk import WalkStart, walk

V = 40
ENDS = frozenset((3, 7))


def random_options(rng: random.Random) -> LogitOptions:
    biased = rng.sample(range(V), rng.choice((0, 0, 1, 5)))
    return LogitOptions(
        allowed_token_ids=tuple(rng.sample(range(V), 25)) if rng.random() < 0.3 else (),
        min_tokens=rng.choice((0, 0, 4, 30)),
        logit_bias=tuple((token, rng.choice((-100.0, -1.3, 0.7, 100.0))) for token in biased),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3, 0.8, 10.0)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.7, -1.1, 2.0)),
        presence_penalty=rng.choice((0.0, 0.0, 0.3, -2.0)),
    )


def random_ids(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(V // 2) for _ in range(rng.randint(0, most))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pick", [choose, choose_batch])
def test_rows_with_options_equal_the_plain_loops_among_any_neighbours(pick, dtype: torch.dtype):
    rng = random.Random(1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        logits = (4.0 * torch.randn(6, V, generator=generator)).to(dtype)
        logits[0, 5] = float("-inf")
        rows: list[ChoiceRow] = []
        expected: list[int | None] = []
        for _ in range(8):
            row, params, options = rng.randrange(6), random_params(rng), random_options(rng)
            prompt, output, path = [1, *random_ids(rng, 9)], random_ids(rng, 9), random_ids(rng, 5)
            position = len(prompt) + len(output) + len(path)
            if rng.random() < 0.3:
                rows.append(ChoiceRow(row, params, position))
                expected.append(choose_reference(logits[row], params, position))
                continue
            past = Past(History(options, prompt + output, len(prompt), ENDS), tuple(path))
            rows.append(ChoiceRow(row, params, position, past=past))
            shaped = shaped_reference(logits[row], options, prompt, output + path, tuple(ENDS))
            own = shape_logits(logits, [row], [past], [position])
            assert torch.equal(own[0], shaped)
            expected.append(choose_reference(shaped, params, position))
        assert pick(logits, rows) == expected


def test_a_history_follows_its_growing_text_and_keeps_paths_apart():
    options = LogitOptions(frequency_penalty=1.0)
    tokens = [4, 4, 9]
    history = History(options, tokens, 2, ENDS)

    def counts(path: tuple[int, ...]) -> dict[int, float]:
        seen = history.seen(path)
        return dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))

    assert counts(()) == {4: 0.0, 9: 1.0}
    assert counts((9, 5, 5)) == {4: 0.0, 9: 2.0, 5: 2.0}
    tokens += [4, 6]
    assert counts(()) == {4: 1.0, 9: 1.0, 6: 1.0}
    assert counts((6,)) == {4: 1.0, 9: 1.0, 6: 2.0}


def test_every_node_of_a_tree_is_chosen_with_the_tokens_of_its_own_path():
    logits = torch.zeros(5, V)
    logits[:, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    options = LogitOptions(frequency_penalty=2.0, presence_penalty=2.0)
    greedy = SamplingParams(temperature=0.0)
    tree = CandidateTree((0, 1, 1, 2), (0, 0, 1, 3), (0.0,) * 4)
    start = WalkStart(tree, 0, greedy, 3, history=History(options, [9, 9, 9], 2, frozenset()))
    for pick in (choose, choose_batch):
        (end,) = walk([start], lambda rows, pick=pick: pick(logits, rows))
        assert end.choices == (0, 1, 2, 3)
        assert end.nodes == (1, 3, 4)


def test_end_ids_cannot_be_chosen_before_min_tokens():
    logits = torch.zeros(1, V)
    logits[0, 7], logits[0, 2] = 9.0, 5.0
    history = History(LogitOptions(min_tokens=2), [1, 1, 1], 3, ENDS)
    greedy = SamplingParams(temperature=0.0)
    rows = [ChoiceRow(0, greedy, position, past=Past(history)) for position in (3, 4, 5)]
    assert choose(logits, rows) == choose_batch(logits, rows) == [2, 2, 7]


def test_rejection_tests_a_draft_against_the_changed_distribution():
    logits = torch.zeros(1, V)
    params = SamplingParams(acceptance=Acceptance.REJECTION)
    history = History(LogitOptions(allowed_token_ids=(2, 3)), [1], 1, frozenset())
    banned, allowed = (Proposal(t, SparseQ((t,), (1.0,))) for t in (9, 2))
    chosen = set()
    for position in range(1, 60):
        (out,) = choose(logits, [ChoiceRow(0, params, position, banned, Past(history))])
        assert out in (2, 3)
        chosen |= {*choose(logits, [ChoiceRow(0, params, position, allowed, Past(history))])}
    assert chosen == {2, 3}


def test_rejection_walks_with_the_history_of_the_chain():
    logits = torch.zeros(4, V)
    logits[:, :2] = torch.tensor([80.0, 60.0])
    options = LogitOptions(frequency_penalty=2.0, repetition_penalty=2.0)
    params = SamplingParams(acceptance=Acceptance.REJECTION)
    history = History(options, [30], 1, frozenset())
    q = tuple(SparseQ((t,), (1.0,)) for t in (0, 1, 0))
    start = WalkStart(chain([0, 1, 0]), 0, params, 1, q, history)
    (end,) = walk([start], lambda rows: choose(logits, rows))
    assert end.choices[:3] == (0, 1, 0)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,) * 20_000}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"logit_bias": tuple((i, 1.0) for i in range(2000))}, "logit_bias"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(values: dict, param: str):
    with pytest.raises(InvalidRequest) as caught:
        LogitOptions(**values)
    assert caught.value.param == param


def test_options_that_a_model_cannot_keep_are_refused_by_name():
    for options, param in (
        (LogitOptions(allowed_token_ids=(V,)), "allowed_token_ids"),
        (LogitOptions(logit_bias=((V, 1.0),)), "logit_bias"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            options.check_ids(V)
        assert caught.value.param == param
    for options in (
        LogitOptions(min_tokens=6),
        LogitOptions(min_tokens=1, allowed_token_ids=(3, 7)),
    ):
        with pytest.raises(InvalidRequest) as caught:
            options.check_ends(5, ENDS, V)
        assert caught.value.param == "min_tokens"
    LogitOptions(min_tokens=5, allowed_token_ids=(3, 7, 8)).check_ends(5, ENDS, V)
