"""The plain definition of a block drafter equals what the public implementations computed."""

import json

import pytest
import torch
from block_cases import Run, block_drafter
from block_golden import close, load_net, tensors_of, variant

from drafter_service.checkpoint.block_facts import default_aux_layers
from drafter_service.dflash.config import LayerMask, Layout
from drafter_service.dflash.masks import sight
from drafter_service.dflash.reference import confident_prefix, greedy_chain, run_block
from protos.exchange import Plan, PlanKind
from protos.features import FeatureForm

DSPARK = ("dspark_deepspec_vanilla", "dspark_deepspec_gated", "dspark_deepspec_conf_plain")


def test_v1_equals_the_public_code_in_every_state(golden_dir):
    directory = golden_dir / "dflash" / "dflash_v1_zlab"
    net, described = load_net(directory)
    io = tensors_of(directory)
    assert (described.kind, described.format) == ("dflash", "zlab-dflash")
    assert described.config.aux_layers == (1, 2, 4)
    close(net.fuse(io["r1.ctx_raw"]), io["r1.ctx_fused"], 1e-5)
    fused = net.fuse(torch.cat([io["r1.ctx_raw"], io["r2.ctx_raw"]]))
    for number, num_context in (("r1", 21), ("r2", 25)):
        block = run_block(net, fused[:num_context], int(io[f"{number}.block_ids"][0]))
        for layer, (keys, values) in enumerate(block.context):
            close(keys.transpose(0, 1), io[f"{number}.layer{layer}.k_ctx"], 1e-5)
            close(values.transpose(0, 1), io[f"{number}.layer{layer}.v_ctx"], 1e-5)
            close(block.states[layer], io[f"{number}.layer{layer}.out"])
        close(block.hidden, io[f"{number}.hidden"])
        close(block.logits, io[f"{number}.logits"])
        chain = greedy_chain(net, block, int(io[f"{number}.block_ids"][0]))
        assert chain.target_ids == io[f"{number}.draft_ids"].tolist()


@pytest.mark.parametrize("name", DSPARK)
def test_dspark_equals_the_public_code(golden_dir, name):
    directory = golden_dir / "dflash" / name
    net, described = load_net(directory)
    io = tensors_of(directory)
    report = json.loads((directory / "report.json").read_text())[name]
    assert (described.kind, described.format) == ("dspark", "deepspec")
    assert described.config.layout is Layout.ANCHOR_FIRST
    assert described.own_lm_head
    fused = net.fuse(torch.cat([io["r1.ctx_raw"], io["r2.ctx_raw"]]))
    for number, num_context in (("r1", 19), ("r2", 23)):
        anchor = int(io[f"{number}.block_ids"][0])
        block = run_block(net, fused[:num_context], anchor)
        chain = greedy_chain(net, block, anchor)
        close(block.logits, io[f"{number}.base_logits"])
        close(torch.stack(chain.scores), io[f"{number}.corrected_logits"])
        close(torch.tensor(chain.confidences), io[f"{number}.confidence_logits"])
        assert chain.target_ids == io[f"{number}.draft_ids"].tolist()
        for threshold, length in report[f"confident_prefix_length_{number}"].items():
            assert confident_prefix(chain.confidences, float(threshold)) == length


@pytest.mark.parametrize("name", DSPARK)
def test_dspark_heads_follow_any_given_path(golden_dir, name):
    directory = golden_dir / "dflash" / name
    net, _ = load_net(directory)
    io = tensors_of(directory)
    before, hidden = io["r1.forced_prev_ids"], io["r1.hidden"]
    bias, _ = net.markov_head.step(before, hidden, net.markov_head.start(len(before)))
    close(io["r1.base_logits"] + bias, io["r1.forced_corrected_logits"])
    rows = net.markov_head.token_rows(before)
    close(net.confidence_head.logits(hidden, rows), io["r1.forced_confidence_logits"])


@pytest.mark.parametrize("folder", ["", "with_embedding_layer"])
def test_dflash_of_deepspec_equals_the_public_code(golden_dir, folder):
    directory = golden_dir / "dflash" / "dflash_deepspec" / folder
    net, described = load_net(directory)
    io = tensors_of(directory)
    assert described.kind == "dflash"
    assert described.config.aux_layers == ((-1, 2, 4) if folder else (1, 2, 4))
    fused = net.fuse(torch.cat([io["r1.ctx_raw"], io["r2.ctx_raw"]]))
    for number, num_context in (("r1", 19), ("r2", 23)):
        anchor = int(io[f"{number}.block_ids"][0])
        block = run_block(net, fused[:num_context], anchor)
        close(block.logits, io[f"{number}.base_logits"])
        assert greedy_chain(net, block, anchor).target_ids == io[f"{number}.draft_ids"].tolist()


@pytest.mark.parametrize("folder", ["", "scaled_softcap"])
def test_dflash2_equals_the_public_code(golden_dir, folder):
    directory = golden_dir / "dflash" / "dflash2_pypi" / folder
    net, described = load_net(directory)
    io = tensors_of(directory)
    assert (described.kind, described.format) == ("dflash", "zlab-dflash2")
    fused = net.fuse(torch.cat([io["r1.ctx_raw"], io["r2.ctx_raw"]]))
    for number, num_context in (("r1", 21), ("r2", 25)):
        anchor = int(io[f"{number}.block_ids"][0])
        block = run_block(net, fused[:num_context], anchor)
        for layer in range(2):
            close(block.states[layer], io[f"{number}.layer{layer}.out"])
        close(block.logits, io[f"{number}.logits"])
        chain = greedy_chain(net, block, anchor)
        assert chain.target_ids == io[f"{number}.greedy_path"].tolist()
        for slot, candidates in enumerate(chain.candidates):
            theirs = io[f"{number}.candidates"][slot]
            assert set(candidates.tolist()) == set(theirs.tolist())
            if number == "r1":
                ours = dict(zip(candidates.tolist(), chain.scores[slot].tolist(), strict=True))
                expected = io["r1.greedy_path_scores"][slot].tolist()
                got = [ours[token] for token in theirs.tolist()]
                close(torch.tensor(got), torch.tensor(expected))


@pytest.mark.parametrize("folder", ["", "scaled_softcap"])
def test_the_convolution_equals_the_public_code(golden_dir, folder):
    directory = golden_dir / "dflash" / "dflash2_pypi" / folder
    net, _ = load_net(directory)
    io = tensors_of(directory)
    conv = net.layers[0].attention_conv
    deltas = conv.deltas(io["conv0.in"])
    close(deltas[:, 1], io["conv0.out_side_delta"])
    close(conv.side(io["conv0.in"], deltas, 0, 8), io["conv0.prepared"])
    close(conv.side(io["conv0.finish_in"], deltas, 1, 8), io["conv0.finished"])


def test_selector_q_of_a_sampled_path_equals_the_public_code(golden_dir):
    directory = golden_dir / "dflash" / "dflash2_pypi"
    net, _ = load_net(directory)
    io = tensors_of(directory)
    anchor = int(io["r1.block_ids"][0])
    block = run_block(net, net.fuse(io["r1.ctx_raw"]), anchor)
    before = anchor
    for slot, token in enumerate(io["r1.T0.7.path"].tolist()):
        candidates = io["r1.T0.7.candidates"][slot]
        unary = block.logits[slot + 1][candidates]
        hidden = block.hidden[slot + 1]
        scores = net.candidate_selector.scores(unary, candidates, torch.tensor([before]), hidden)
        close((scores[0] / 0.7).softmax(-1), io["r1.T0.7.sparse_q"][slot])
        before = token


@pytest.mark.parametrize("name", ["default", "causal", "noncausal", "dense"])
def test_window_variants_equal_the_public_code(golden_dir, tmp_path, name):
    directory = golden_dir / "dflash" / "dflash_swa"
    suffix = "" if name == "default" else f"_{name}"
    config = json.loads((directory / f"config{suffix}.json").read_text())
    net, _ = load_net(variant(directory, tmp_path, config))
    io = tensors_of(directory)
    fused = net.fuse(torch.cat([io["ctx_raw_1"], io["ctx_raw_2"]]))
    for number, num_context in (("1", 24), ("2", 28)):
        block = run_block(net, fused[:num_context], int(io[f"block_ids_{number}"][0]))
        close(block.hidden, io[f"{name}.r{number}.hidden"])
        close(block.logits, io[f"{name}.r{number}.logits"])


def test_masks_equal_those_of_each_implementation(golden_dir):
    io = tensors_of(golden_dir / "dflash" / "dflash_swa")
    cases = {
        "v2_sliding_causal": LayerMask(True, 10),
        "v2_sliding_noncausal": LayerMask(False, 10),
        "speculators_sliding_causal": LayerMask(True, 10, True),
        "speculators_sliding_noncausal": LayerMask(False, 10, True),
        "specforge_sliding": LayerMask(True, 10),
        "specforge_full": LayerMask(),
    }
    for name, mask in cases.items():
        expected = io[f"mask.{name}"]
        context, block = expected[:, :24], expected[:, -8:]
        seen = torch.zeros(8, 32, dtype=torch.bool)
        got = sight(mask, 24, 24, 8)
        shown = torch.ones(8, 32 - got.first, dtype=torch.bool)
        seen[:, got.first :] = shown if got.hidden is None else ~got.hidden
        assert torch.equal(seen, torch.cat([context, block], dim=1)), name


def test_jetspec_equals_the_public_code(golden_dir):
    directory = golden_dir / "dflash" / "jetspec"
    net, described = load_net(directory)
    io = tensors_of(directory)
    assert described.format == "jetspec"
    assert all(mask.causal for mask in described.config.masks)
    fused = net.fuse(torch.cat([io["r1.ctx_raw"], io["verify.ctx_raw_all_rows"][:4]]))
    block = run_block(net, fused[:18], int(io["r1.block_ids"][0]))
    close(block.hidden, io["r1.hidden"])
    close(block.logits[1:], io["r1.draft_logits"])
    close(block.hidden[:4], io["r1.hidden_block_of_4"])
    close(run_block(net, fused, int(io["r2.anchor"][0])).logits[1:], io["r2.draft_logits"])


def test_speculators_with_a_reduced_vocabulary_equals_the_public_code(golden_dir):
    directory = golden_dir / "dflash" / "dflash_speculators"
    net, described = load_net(directory)
    io = tensors_of(directory)
    assert described.format == "speculators"
    assert described.own_lm_head
    assert described.config.aux_layers == (1, 2, 4)
    fused = net.fuse(io["r1.ctx_raw"])
    close(fused, io["r1.ctx_fused"])
    anchor = int(io["r1.anchor"][0])
    block = run_block(net, fused, anchor)
    close(block.hidden, io["r1.hidden"])
    close(block.logits, io["r1.draft_vocab_logits"])
    chain = greedy_chain(net, block, anchor)
    assert chain.target_ids == io["r1.draft_ids_target_vocab"].tolist()


def test_default_layer_ids_equal_the_public_formula(golden_dir):
    table = json.loads((golden_dir / "dflash" / "layer_ids.json").read_text())["table"]
    assert table
    for depth, rows in table.items():
        for num_layers, expected in rows.items():
            assert list(default_aux_layers(int(depth), int(num_layers))) == expected


SERVED = {
    "dflash_v1_zlab": ("draft_ids", 21),
    "dflash2_pypi": ("greedy_path", 21),
    "dflash2_pypi/scaled_softcap": ("greedy_path", 21),
    "dspark_deepspec_vanilla": ("draft_ids", 19),
    "dspark_deepspec_gated": ("draft_ids", 19),
    "dspark_deepspec_conf_plain": ("draft_ids", 19),
    "dflash_deepspec": ("draft_ids", 19),
}


@pytest.mark.parametrize("form", [FeatureForm.RAW, FeatureForm.FUSED])
@pytest.mark.parametrize("name", SERVED)
def test_two_rounds_through_a_session_draft_what_the_public_code_drafts(golden_dir, name, form):
    directory = golden_dir / "dflash" / name
    net, _ = load_net(directory)
    io = tensors_of(directory)
    drafts, prompt_len = SERVED[name]
    # What was accepted after the first round: three drafts and the second round's anchor.
    accepted = io["verify.ids"][:4].tolist()
    tokens = [*io["prompt_ids"].tolist(), *accepted, int(io["r2.block_ids"][0])]
    rows = torch.cat([io["r1.ctx_raw"], io["r2.ctx_raw"]])
    run = Run(net, block_drafter(net), tokens, rows, form=form)
    plan = Plan(PlanKind.BLOCK, net.config.num_drafts)
    for number, base_len in (("r1", prompt_len + 1), ("r2", prompt_len + 5)):
        result = run.draft(base_len, plan)
        assert list(result.tree.tokens) == io[f"{number}.{drafts}"].tolist()
        if net.confidence_head is not None:
            said = io[f"{number}.confidence_logits"].sigmoid()
            close(torch.tensor(result.confidences), said, 1e-3)


def test_a_window_keeps_what_the_public_cache_keeps(golden_dir):
    """The last window - 1 context rows are all that is ever read of them."""
    directory = golden_dir / "dflash" / "dflash2_pypi"
    net, _ = load_net(directory)
    io = tensors_of(directory)
    block = run_block(net, net.fuse(io["r1.ctx_raw"]), int(io["r1.block_ids"][0]))
    for layer, (keys, values) in enumerate(block.context):
        first = sight(net.config.masks[layer], 21, 21, 8).first
        close(keys[first:].transpose(0, 1), io[f"r1.layer{layer}.k_ctx_kept"], 1e-5)
        close(values[first:].transpose(0, 1), io[f"r1.layer{layer}.v_ctx_kept"], 1e-5)


@pytest.mark.parametrize("mistake", ["earlier", "reversed", "causal", "dropped row", "shifted"])
def test_every_usual_mistake_moves_the_logits_by_more_than_one(golden_dir, tmp_path, mistake):
    directory = golden_dir / "dflash" / "dflash_v1_zlab"
    changes = {"is_causal": True} if mistake == "causal" else {}
    net, _ = load_net(variant(directory, tmp_path, **changes))
    io = tensors_of(directory)
    raw, anchor_id, anchor = io["r1.ctx_raw"], int(io["r1.block_ids"][0]), 21
    if mistake == "earlier":
        raw = raw.roll(64, dims=1)
    if mistake == "reversed":
        raw = torch.cat(raw.chunk(3, dim=1)[::-1], dim=1)
    if mistake == "dropped row":
        raw = raw[:-1]
    if mistake == "shifted":
        anchor += 1
    wrong = run_block(net, net.fuse(raw), anchor_id, anchor).logits
    assert float((wrong - io["r1.logits"]).abs().max()) > 1.0
