"""The unrolled head against the training code of EAGLE, SpecForge, speculators, DeepSpec and
Model-Optimizer (shared/golden/eagle): logits, losses and the gradient of fc of every variant."""

from pathlib import Path

import pytest
import torch

from drafter_service.training.loss import restricted_loss
from drafter_service.training.ttt import unroll
from tests.unit.drafter.golden_ttt import STEPS, load_case
from tests.unit.drafter.training_fakes import one_record_batch

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden" / "eagle"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden/eagle is not here")
CASES = [
    "eagle3_safeailab",
    "eagle3_safeailab_theta500k_fullvocab",
    "eagle3_specforge",
    "eagle3_specforge_no_rope_theta",
    "eagle3_specforge_headdim32_rope_llama3",
    "eagle3_1_specforge_fcnorm",
    "eagle3_speculators_nbr_false",
    "eagle3_speculators_nbr_true",
    "eagle3_speculators_trainer_default_qwen3",
    "eagle3_1_speculators",
    "eagle3_speculators_two_layers",
    "eagle3_speculators_rope_llama3_fullvocab",
    "eagle3_speculators_sliding_window",
    "eagle3_deepspec",
    "eagle3_deepspec_two_layers_train_only",
    "eagle3_modelopt_neutral_input_norm",
]


def _padded(values, num=STEPS):
    return torch.cat([values, values.new_zeros(num, *values.shape[1:])])


def _entropy(probs):
    return -(probs * probs.clamp_min(1e-30).log()).sum(-1)


@pytest.mark.parametrize("name", CASES)
def test_steps_losses_and_gradient_equal_the_public_training_code(name):
    case = load_case(GOLDEN / name)
    losses = [torch.zeros(()) for _ in range(STEPS)]
    for text in case.texts:
        num_rows = len(text.ids)
        features, ids, probs = _padded(text.features), _padded(text.ids), _padded(text.probs)
        batch = one_record_batch(features, ids, torch.zeros(len(ids), 1), torch.zeros_like(ids))

        def after(output, text=text, num_rows=num_rows, probs=probs):
            logits = case.head.logits(output.y[:num_rows])
            expected = text.logits[output.step]
            comparable = ~expected.isnan().any(-1)
            assert comparable.sum() > 3
            torch.testing.assert_close(logits[comparable], expected[comparable], atol=1e-4, rtol=0)
            targets = probs[output.target_rows[:num_rows]]
            rows = restricted_loss(logits, targets)
            if case.kl:
                rows = rows - _entropy(targets)
            losses[output.step] = losses[output.step] + (rows * text.weights[output.step]).sum()

        unroll(case.head, batch, STEPS, after)
    told = case.step_losses
    torch.testing.assert_close(torch.stack(losses).detach(), told, atol=1e-4, rtol=1e-5)
    total = sum(case.decay**step * loss for step, loss in enumerate(losses))
    torch.testing.assert_close(total.detach(), case.total, atol=1e-3, rtol=1e-5)
    (gradient,) = torch.autograd.grad(total, (case.head.fc.weight,))
    scale = case.fc_gradient.abs().max()
    torch.testing.assert_close(gradient / scale, case.fc_gradient / scale, atol=1e-3, rtol=0)
