"""Trees and chains of the public EAGLE code, reproduced through sessions, cache and batcher."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter_service.attention import Part, attend_over, causal_tail
from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.eagle3_reader import SharedWeights, head_of, read_eagle3_head
from drafter_service.checkpoint.eagle_reader import eagle_head_of
from drafter_service.eagle.head import EagleHead
from protos.exchange import DraftStatus, Plan, PlanKind
from protos.features import FeatureForm
from tests.unit.drafter_service.drafter_cases import opening, rows_of, work
from tests.unit.drafter_service.eagle3_cases import eagle3_drafter, eagle_drafter

TREES = [(16, 3, 4), (60, 5, 10)]


CASES = ["eagle3_safeailab", "eagle3_safeailab_theta500k_fullvocab", "eagle1_safeailab_bias"]


@pytest.fixture(scope="module", params=CASES)
def case(request, golden_dir: Path):
    directory = golden_dir / "eagle" / request.param
    io = load_file(directory / "io.safetensors")
    target = load_file(directory / "target.safetensors")
    shared = SharedWeights(target["model.embed_tokens.weight"], target["lm_head.weight"])
    described = describe(directory, 8)
    read = eagle_head_of if described.kind == "eagle" else head_of
    return io, read(described, directory, shared, torch.float32)


def drafter_of(head):
    return eagle_drafter(head) if isinstance(head, EagleHead) else eagle3_drafter(head)


def plan_of(total, depth, top_k):
    """EAGLE counts the root in `total`, and expansions after level 1 in `depth`."""
    return Plan(kind=PlanKind.TREE, depth=depth + 1, width=top_k, nodes=total - 1)


def session_round(drafter, ids, features, start, plan, fused_by=None):
    rows = features if fused_by is None else fused_by.fuse(features)
    form = FeatureForm.RAW if fused_by is None else FeatureForm.FUSED
    given = work(
        drafter.capabilities.incarnation,
        ids,
        token_start=0 if start == 0 else start + 1,
        plan=plan,
        open=opening(form, rows.shape[1]) if start == 0 else None,
        rows=rows_of(rows, start),
    )
    result = drafter.handle([given])[0]
    assert result.status is DraftStatus.OK, result.detail
    return result


def assert_tree_equals(tree, io, name):
    expected_tokens = io[f"{name}.draft_tokens"].tolist()
    assert list(tree.tokens) == expected_tokens[1:]
    assert list(tree.parents) == io[f"{name}.parents"].tolist()[1:]
    scores = torch.tensor(tree.scores)
    torch.testing.assert_close(scores, io[f"{name}.kept_scores"], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("form", ["raw", "fused"])
def test_two_rounds_of_trees_equal_the_public_code(case, shape, form):
    io, head = case
    name = "tree_{}_{}_{}".format(*shape)
    if f"{name}.round1.draft_tokens" not in io:
        pytest.skip(f"this case has no {name}")
    fused_by = head if form == "fused" else None
    if fused_by is not None and isinstance(head, EagleHead):
        pytest.skip("rows of this head cannot be fused ahead")
    drafter = drafter_of(head)
    ids = io["tree.input_ids"].tolist()
    features = io["tree.features"]
    plan = plan_of(*shape)
    first = session_round(drafter, ids, features, 0, plan, fused_by)
    assert_tree_equals(first.tree, io, f"{name}.round1")
    more = io["tree.round2.features"]
    round2_ids = io[f"{name}.round2.input_ids"].tolist()
    assert round2_ids[: len(ids)] == ids
    given = session_round(drafter, round2_ids[len(ids) :], more, len(features), plan, fused_by)
    assert_tree_equals(given.tree, io, f"{name}.round2")


@pytest.mark.parametrize("shape", TREES)
def test_first_rounds_of_the_real_loop_draft_the_same_trees(golden_dir, shape):
    """The committed text of a whole run, round by round, with the trees that were stored."""
    directory = golden_dir / "eagle" / "e2e_safeailab"
    io = load_file(directory / "io.safetensors")
    embedding = load_file(directory / "target.safetensors")["model.embed_tokens.weight"]
    head = read_eagle3_head(directory, embedding, torch.float32, num_target_layers=8)
    name = "tree_{}_{}_{}".format(*shape)
    for prompt in range(3):
        drafter = eagle3_drafter(head)
        held_tokens, held_rows = 0, 0
        for number in range(4):
            base = f"prompt{prompt}.{name}.round{number}"
            ids = io[f"{base}.input_ids"].tolist()
            features = io[f"{base}.features"]
            given = work(
                drafter.capabilities.incarnation,
                ids[held_tokens:],
                token_start=held_tokens,
                plan=plan_of(*shape),
                open=opening(FeatureForm.RAW, features.shape[1]) if number == 0 else None,
                rows=rows_of(features, held_rows),
            )
            result = drafter.handle([given])[0]
            assert result.status is DraftStatus.OK
            assert list(result.tree.tokens) == io[f"{base}.draft_tokens"].tolist()[1:]
            held_tokens, held_rows = len(ids), held_rows + len(features)
            assert (result.held_tokens, result.held_rows) == (held_tokens, held_rows)


def test_cached_chain_and_resume_equal_the_public_code(case):
    """Fixed tokens fed back step by step, thrown away, then true rows and a second chain."""
    io, head = case
    slab = drafter_of(head)._algorithm.slab
    segment = slab.reserve(None, 0, 64)

    def step(ids, g, positions, cached_len):
        part = Part(segment.start, cached_len, len(ids), causal_tail(len(ids)))
        return head.step(ids, g, positions, attend_over(slab, [part]))

    def chain(name, y, cached_len):
        for number, token in enumerate(io[f"{name}.tokens"]):
            position = io[f"{name}.position_ids"][number : number + 1]
            y = step(token[None], head.feedback(y), position, cached_len + number)
            close(y[0], io[f"{name}.hidden"][number])
            close(head.logits(y)[0], io[f"{name}.logits"][number])

    def close(ours, theirs):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)

    with torch.inference_mode():
        num_rows = len(io["prefill.features"])
        g = head.fuse(io["prefill.features"])
        y = step(io["prefill.next_ids"], g, io["prefill.position_ids"], 0)
        close(head.logits(y), io["prefill.logits"])
        close(slab.read(segment.start, num_rows)[0], io["prefill.k_cache"])
        chain("chain", y[-1:], num_rows)
        g = head.fuse(io["resume.features"])
        y = step(io["resume.next_ids"], g, io["resume.position_ids"], num_rows)
        close(y, io["resume.hidden"])
        close(head.logits(y), io["resume.logits"])
        chain("resume_chain", y[-1:], num_rows + len(g))
