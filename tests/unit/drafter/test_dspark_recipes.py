"""The recipe of DSpark: how a net begins and learns, is walked on held-out answers, is written."""

import pytest
import torch

from drafter_service.checkpoint.block_reader import read_block_net
from drafter_service.checkpoint.block_writer import write_block
from drafter_service.checkpoint.describe import describe
from drafter_service.dflash.config import BlockConfig, ConfidenceInput, Layout, Markov, MarkovKind
from drafter_service.dflash.net import BlockNet
from drafter_service.dflash.reference import greedy_chain, run_block
from drafter_service.training.block_start import block_config
from drafter_service.training.dspark import DsparkHeadSettings, start_small_heads
from drafter_service.training.dspark_calibration import Affine, calibrated, fitted, with_affine
from drafter_service.training.dspark_check import calibration_error, check_paths, joined, walk
from drafter_service.training.dspark_loss import DsparkLoss, DsparkShape
from drafter_service.training.first_weights import FROZEN
from drafter_service.training.trainer import OptimiserSettings, Trainer
from tests.unit.drafter.block_fakes import tiny_target
from tests.unit.drafter.test_block_recipes import TARGET
from tests.unit.drafter.test_dspark_losses import spark_block, whole_head
from tests.unit.drafter.training_fakes import VOCAB, tiny_batch, tiny_records


def trained_block(num_updates: int = 30) -> tuple[BlockNet, list[float]]:
    net, batch = spark_block(), tiny_batch(tiny_records(6), tuple(range(6)))
    start_small_heads(net, tiny_target().embed_tokens)
    loss = DsparkLoss(net, whole_head(tiny_target().lm_head), DsparkShape(1.0))
    trainer = Trainer(net, loss, OptimiserSettings(), torch.float32)
    return net, [trainer.update([batch], 0.01, number).loss for number in range(num_updates)]


def test_updates_lower_the_loss_train_all_heads_and_leave_the_target_s_weights_alone():
    before = spark_block()
    start_small_heads(before, tiny_target().embed_tokens)
    net, losses = trained_block()
    assert losses[-1] < 0.75 * losses[0]  # labels of one id against lists of six leave a rest
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name)) == (name in FROZEN), name


def test_small_heads_begin_without_a_say_and_hold_like_tokens_alike():
    net, embedding = spark_block(), torch.randn(VOCAB, 16)
    embedding[7] = embedding[9]
    start_small_heads(net, embedding)
    head = net.markov_head
    bias, _ = head.step(torch.arange(VOCAB), torch.zeros(VOCAB, 16), head.start(VOCAB))
    assert not bias.any()
    assert not net.confidence_head.logits(torch.randn(3, 16), torch.randn(3, 4)).any()
    torch.testing.assert_close(head.markov_w1.weight[7], head.markov_w1.weight[9])
    torch.testing.assert_close(head.markov_w1.weight.std(0), torch.full((4,), 0.5))


def test_a_walk_is_each_row_s_own_greedy_chain_up_to_its_first_miss():
    net, _ = trained_block()
    batch = tiny_batch(tiny_records(6), (4, 1, 5))
    found = walk(net, batch)
    misses = reached_last = 0
    for rows in batch.records:
        features = torch.cat([batch.prompt_features[rows.prompt], batch.features[rows.answer]])
        for row in range(rows.answer.start, rows.answer.stop):
            with torch.no_grad():
                fused = net.fuse(features[: int(batch.positions[row]) + 1])
                block = run_block(net, fused, int(batch.ids[row]))
                chain = greedy_chain(net, block, int(batch.ids[row]))
            on_path = True
            for draft, guess in enumerate(chain.target_ids):
                exists = row + draft < rows.answer.stop and int(batch.choices[row + draft]) >= 0
                reached = on_path and exists
                right = reached and guess == int(batch.choices[row + draft])
                assert bool(found.reached[draft, row]) == reached
                assert bool(found.agreed[draft, row]) == right
                if reached:
                    said = float(found.said[draft, row])
                    assert said == pytest.approx(chain.confidences[draft], abs=1e-4)
                misses += reached and not right
                reached_last += reached and draft == 3
                on_path = right
    assert misses > 0
    assert reached_last > 0


def test_replayed_tau_counts_the_drafts_accepted_in_a_row():
    net, _ = trained_block()
    batch = tiny_batch(tiny_records(6), (4,))
    found = check_paths(net, [(batch, (True,))], None)
    figures = found.figures
    assert found.score == pytest.approx(1.0 + sum(figures["accepted_by_depth"]))
    assert figures["num_rounds"] * found.score == pytest.approx(batch.num_rows, abs=4)
    assert found.score > 1.2
    assert check_paths(net, [(batch, (False,))], None).figures["num_rounds"] == 0


def test_honest_confidences_have_no_calibration_error_and_boasts_have_what_they_boast():
    said, agreed = torch.tensor([0.75] * 4 + [0.25] * 4), torch.tensor([1, 1, 1, 0, 1, 0, 0, 0])
    assert calibration_error(said, agreed) == pytest.approx(0.0)
    assert calibration_error(torch.full((8,), 0.9), agreed) == pytest.approx(0.4)


def test_a_fit_finds_the_scale_and_shift_that_rates_were_made_with():
    torch.manual_seed(0)
    said = torch.randn(40_000) * 2
    agreed = torch.rand(40_000) < (0.5 * said - 0.7).sigmoid()
    found = fitted(said, agreed)
    assert (found.scale, found.shift) == pytest.approx((0.5, -0.7), abs=0.05)
    nothing = torch.zeros(0)
    assert fitted(nothing, nothing.bool()) == Affine(1.0, 0.0)
    apart = fitted(torch.tensor([-1.0, 1.0]), torch.tensor([False, True]))
    assert 1.0 < apart.scale < 10.0


def test_a_folded_calibration_changes_the_confidence_and_nothing_else():
    net, _ = trained_block()
    batch = tiny_batch(tiny_records(6), (4, 1))
    before, after = walk(net, batch), walk(with_affine(net, Affine(0.5, -2.0)), batch)
    expected = torch.where(before.reached, before.said * 0.5 - 2.0, 0.0)
    torch.testing.assert_close(after.said, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(after.agreed, before.agreed)


@pytest.mark.parametrize("most", [2, None])
def test_calibration_fits_on_other_answers_than_it_is_measured_on(most):
    class Four:
        def held_out(self):
            for index in range(4):
                yield tiny_batch(tiny_records(6), (index, index + 1)), (True, True)

    net, _ = trained_block()
    with torch.no_grad():
        net.confidence_head.proj.bias.add_(4.0)
    changed, found = calibrated(net, Four(), most)
    assert found.affine.shift < 0 < found.num_drafts
    assert found.ece_after < found.ece_before
    batches = [batch for batch, _ in Four().held_out()]
    walks = [walk(changed, batch) for batch in (batches[0::2] if most is None else batches[:most])]
    whole = joined(walks, 4)
    measured = calibration_error(whole.said[whole.reached].sigmoid(), whole.agreed[whole.reached])
    assert measured == pytest.approx(found.ece_after, abs=1e-4)


def test_a_written_drafter_drafts_as_the_trained_one(tmp_path):
    net, _ = trained_block()
    target = tiny_target()
    write_block(tmp_path, net, 5, "some-target", None, torch.float32)
    described = describe(tmp_path)
    assert (described.kind, described.config.layout) == ("dspark", Layout.ANCHOR_FIRST)
    again = read_block_net(tmp_path, described, target.embed_tokens, target.lm_head, torch.float32)
    fused = torch.randn(5, 16)
    with torch.no_grad():
        chains = [greedy_chain(one, run_block(one, fused, 7), 7) for one in (net, again)]
    assert chains[0].target_ids == chains[1].target_ids
    assert chains[0].confidences == pytest.approx(chains[1].confidences, abs=1e-5)
    assert len(chains[0].target_ids) == 4


def test_the_shipped_shape_drafts_eight_and_takes_at_most_25_megabytes():
    config: BlockConfig = block_config(
        DsparkHeadSettings(),
        TARGET,
        Layout.ANCHOR_FIRST,
        Markov(MarkovKind.VANILLA, DsparkHeadSettings().markov_rank),
        ConfidenceInput.HIDDEN_AND_TOKEN,
    )
    with torch.device("meta"):
        net = BlockNet(config)
    size = sum(p.numel() * 2 for name, p in net.named_parameters() if name not in FROZEN)
    assert (config.num_drafts, config.num_layers) == (8, 2)
    assert size <= 25_000_000
