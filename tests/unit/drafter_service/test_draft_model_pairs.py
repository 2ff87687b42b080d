"""Which directories serve as draft model of which target: vocabularies, files, families."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from drafter_service.config import DrafterSettings
from drafter_service.draft_model.load import load_draft_model
from protos.errors import CheckpointError, ConfigError, IncompatiblePair
from protos.exchange import DraftStatus, Plan, PlanKind
from protos.params import Acceptance, SamplingParams
from tests.tiny import byte_tokenizer, tiny_llama_dir, write_tiny
from tests.unit.drafter_service.draft_model_cases import load_tiny, one, open_work, text

TREE = Plan(PlanKind.TREE, 3, 8, 64)
CHAIN = Plan(PlanKind.CHAIN, 3)
GREEDY = SamplingParams(temperature=0.0)


def tiny(path, rows, tokens=None, **changes):
    """A one-layer model with `rows` embedding rows and a tokenizer of `tokens` ids."""
    tiny_llama_dir(path, vocab=rows, hidden=32, layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink(missing_ok=True)
    if tokens is not None:
        byte_tokenizer(tokens).save_pretrained(path)
    if changes:
        edit(path / "config.json", lambda config: config.update(changes))
    return path


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def all_drafted(drafter):
    """Every id that drafts of many shapes and requests hold."""
    found: set[int] = set()
    asks = [(GREEDY, TREE), (SamplingParams(temperature=2.0, seed=3), TREE)]
    asks.append((SamplingParams(temperature=2.0, acceptance=Acceptance.REJECTION), CHAIN))
    for number, (params, plan) in enumerate(asks):
        result = one(drafter, open_work(text(number, 12), params, plan, number + 1))
        assert result.status is DraftStatus.OK
        found.update(result.tree.tokens, *result.ranked_ids, *(q.ids for q in result.q))
    return found


def test_padding_of_the_draft_model_is_never_drafted(tmp_path):
    draft = tiny(tmp_path / "draft", 448, 384)
    with torch.no_grad():
        drafter = load_tiny(draft, tiny(tmp_path / "target", 384, 384))
        # Padding rows that would win by far if they were looked at.
        drafter._algorithm._model._model.lm_head.weight[384:] *= 50.0
    assert drafter.capabilities.vocab_size == 384
    assert max(all_drafted(drafter)) < 384


def test_padding_of_the_target_is_tolerated_and_refused_as_a_token(tmp_path):
    drafter = load_tiny(tiny(tmp_path / "draft", 384, 384), tiny(tmp_path / "target", 448, 384))
    # As large as the target's, or the verifier would take it for another vocabulary.
    assert drafter.capabilities.vocab_size == 448
    assert max(all_drafted(drafter)) < 384
    refused = one(drafter, open_work([5, 400, 7], GREEDY, CHAIN, 9))
    assert refused.status is DraftStatus.REFUSED
    assert "400" in refused.detail


def test_one_real_extra_token_is_refused_naming_both_sizes(tmp_path):
    draft, target = tiny(tmp_path / "draft", 448, 385), tiny(tmp_path / "target", 384, 384)
    with pytest.raises(IncompatiblePair, match=r"385 tokens.*384; 1 differ"):
        load_tiny(draft, target)


def test_tokens_that_mean_something_else_are_refused_by_name(tmp_path):
    draft, target = tiny(tmp_path / "draft", 384, 384), tiny(tmp_path / "target", 384, 384)

    def swap(document):
        vocab = document["model"]["vocab"]
        names = sorted(vocab, key=vocab.get)
        for a, b in zip(names[100:200], names[200:300], strict=True):
            vocab[a], vocab[b] = vocab[b], vocab[a]

    edit(draft / "tokenizer.json", swap)
    with pytest.raises(IncompatiblePair, match=r"200 differ, such as .*: id 100 there, 200"):
        load_tiny(draft, target)


def test_without_a_tokenizer_sizes_must_do_and_the_log_says_so(tmp_path, caplog):
    target = tiny(tmp_path / "target", 384, 384)
    with caplog.at_level(logging.WARNING):
        drafter = load_tiny(tiny(tmp_path / "bare", 448), target)
    assert "cannot be compared" in caplog.text
    assert max(all_drafted(drafter)) < 384
    for rows in (2000, 320):
        with pytest.raises(IncompatiblePair, match=rf"{rows} ids, the target 384"):
            load_tiny(tiny(tmp_path / f"bare{rows}", rows), target)


def test_other_begin_and_end_ids_are_said_aloud(tmp_path, caplog):
    draft = tiny(tmp_path / "draft", 384, 384, eos_token_id=7)
    with caplog.at_level(logging.WARNING):
        load_tiny(draft, tiny(tmp_path / "target", 384, 384))
    assert "eos_token_id: 7 for the draft model, 2 for the target" in caplog.text


def test_files_that_cannot_be_used_are_refused_by_name(tmp_path):
    draft = tiny(tmp_path / "draft", 384, 384)
    pickled = shutil.copytree(draft, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        load_tiny(pickled)
    quantised = shutil.copytree(draft, tmp_path / "quantised")
    edit(
        quantised / "config.json",
        lambda config: config.update(quantization_config={"quant_method": "gptq", "bits": 4}),
    )
    with pytest.raises(CheckpointError, match="quantised"):
        load_tiny(quantised)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_tiny(tmp_path / "empty")
    for checkpoint in ("", str(tmp_path / "absent")):
        settings = DrafterSettings(kind="draft_model", checkpoint=checkpoint)
        with pytest.raises(ConfigError, match="checkpoint"):
            load_draft_model(settings, None, 1)


def test_weights_that_are_not_there_are_never_made_up(tmp_path, caplog):
    draft = tiny(tmp_path / "draft", 384, 384)
    weights = load_file(draft / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    broken = {
        "lacks": weights | {},
        "size": weights | {name: torch.zeros(3, 3)},
        "stray": weights | {"model.layers.0.stray.weight": torch.zeros(3)},
    }
    del broken["lacks"][name]
    for case, tensors in broken.items():
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        if case == "stray":
            with caplog.at_level(logging.WARNING):
                load_tiny(draft)
            assert "model.layers.0.stray.weight" in caplog.text
            continue
        with pytest.raises(CheckpointError, match="up_proj"):
            load_tiny(draft)
    (draft / "model.safetensors").write_bytes(b"\x08" + bytes(40))
    with pytest.raises(CheckpointError):
        load_tiny(draft)
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(weights, "model-00002-of-00002.safetensors"),
    }
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    (draft / "model.safetensors").rename(draft / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="00002-of-00002"):
        load_tiny(draft)


def test_a_quantised_target_does_not_matter(tmp_path):
    target = tiny(tmp_path / "target", 384, 384, quantization_config={"quant_method": "gptq"})
    assert all_drafted(load_tiny(tiny(tmp_path / "draft", 384, 384), target))


def test_drafting_ends_where_the_draft_models_own_positions_end(tmp_path):
    path = tiny_llama_dir(tmp_path / "short", hidden=32, layers=1, max_context=64)
    assert load_tiny(path).capabilities.max_context == 64
    assert load_tiny(path, max_context=48).capabilities.max_context == 48


def test_rotary_scaling_that_looks_at_the_batch_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    with pytest.raises(CheckpointError, match="dynamic"):
        load_tiny(write_tiny(config, tmp_path / "dynamic", 0))
