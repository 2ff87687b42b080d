"""Eagle3Head against tensors made by the public implementations (shared/golden/eagle)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.reference import draft_rows

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden" / "eagle"
TOLERANCE = 1e-4
TARGET_LAYERS = 8

SUPPORTED = (
    "eagle3_safeailab",
    "eagle3_safeailab_theta500k_fullvocab",
    "eagle3_specforge",
    "eagle3_specforge_headdim32_rope_llama3",
    "eagle3_specforge_no_rope_theta",
    "eagle3_1_specforge_fcnorm",
    "eagle3_speculators_nbr_false",
    "eagle3_speculators_nbr_true",
    "eagle3_speculators_rope_llama3_fullvocab",
    "eagle3_speculators_trainer_default_qwen3",
    "eagle3_1_speculators",
    "eagle3_deepspec",
    "eagle3_modelopt_neutral_input_norm",
    "eagle3_speculators_two_layers",
    "eagle3_speculators_sliding_window",
)
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden/eagle is not here")


def _load(case: str) -> tuple[Eagle3Head, dict[str, torch.Tensor]]:
    directory = GOLDEN / case
    target = directory / "target.safetensors"
    embedding = load_file(target)["model.embed_tokens.weight"]
    head = read_eagle3_head(directory, embedding, torch.float32, num_target_layers=TARGET_LAYERS)
    return head, load_file(directory / "io.safetensors")


def _close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", SUPPORTED)
def test_prefill_equals_the_public_implementation(case):
    head, io = _load(case)
    rows = draft_rows(head, io["prefill.features"], io["prefill.next_ids"], (), head.config.windows)
    _close(rows.fused, io["prefill.fused"])
    _close(rows.y, io["prefill.hidden"])
    _close(rows.logits, io["prefill.logits"])


@pytest.mark.parametrize("case", SUPPORTED)
def test_chain_equals_the_public_implementation(case):
    head, io = _load(case)
    if "chain.tokens" not in io:
        pytest.skip("the case has no chain")
    drafts = io["chain.tokens"].tolist()
    rows = draft_rows(
        head, io["prefill.features"], io["prefill.next_ids"], drafts, head.config.windows
    )
    _close(rows.y[-len(drafts) :], io["chain.hidden"])
    _close(rows.logits[-len(drafts) :], io["chain.logits"])
    if "chain.feedback" in io:
        _close(rows.feedback[-len(drafts) :], io["chain.feedback"])


@pytest.mark.parametrize("case", SUPPORTED)
def test_resume_on_true_features_equals_the_public_implementation(case):
    head, io = _load(case)
    if "resume.features" not in io:
        pytest.skip("the case has no resume")
    features = torch.cat([io["prefill.features"], io["resume.features"]])
    ids = torch.cat([io["prefill.next_ids"], io["resume.next_ids"]])
    rows = draft_rows(head, features, ids, (), head.config.windows)
    num_new = len(io["resume.next_ids"])
    if "resume.fused" in io:
        _close(rows.fused[-num_new:], io["resume.fused"])
    _close(rows.logits[-num_new:], io["resume.logits"])
    drafts = io["resume_chain.tokens"].tolist()
    rows = draft_rows(head, features, ids, drafts, head.config.windows)
    _close(rows.logits[-len(drafts) :], io["resume_chain.logits"])


def test_a_layer_of_doubled_input_everywhere_equals_the_training_forward():
    """DeepSpec's head of two layers has no inference of its own: step j of its training forward is
    a chain of known tokens from every row on."""
    head, io = _load("eagle3_deepspec_two_layers_train_only")
    num_steps = 3
    for record in range(2):
        features, ids = io["ttt.features"][record], io["ttt.input_ids"][record]
        valid = int(io["ttt.attention_mask"][record].sum())
        for row in range(valid - num_steps - 1):
            next_ids = ids[1 : row + 2]
            drafts = ids[row + 2 : row + 1 + num_steps].tolist()
            rows = draft_rows(head, features[: row + 1], next_ids, drafts, head.config.windows)
            for step in range(num_steps):
                _close(rows.y[row + step], io[f"ttt.hidden.{step}"][record, row])
                _close(rows.logits[row + step], io[f"ttt.logits.{step}"][record, row])


def test_target_weights_are_read_without_the_model(tmp_path):
    source = GOLDEN / "eagle3_1_speculators" / "target.safetensors"
    (tmp_path / "model.safetensors").symlink_to(source)
    weights = read_target_weights(tmp_path)
    assert weights.final_norm is not None
    assert torch.equal(weights.lm_head, load_file(source)["lm_head.weight"])
