"""A verifier's own configuration: every bad key is named, defaults fit, budgets become slots."""

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from protos.errors import ConfigError, IncompatiblePair
from protos.exchange import Capabilities, PlanKind, Projection
from protos.features import DType, FeatureForm
from verifier_service.build import DEFAULT_NUM_SLOTS, engine_settings
from verifier_service.config import (
    EngineSection,
    VerifierSettings,
    load_settings,
    parse_settings,
)
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.stats import EngineStats
from verifier_service.metrics import snapshot
from verifier_service.model.embedded import ensure_target
from verifier_service.pairing import row_form, tap_for


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"targte": "x"}, "targte"),
        ({"dtype": "fp8"}, "dtype"),
        ({"num_threads": -1}, "num_threads"),
        ({"engine": {"page_size": 0}}, "engine.page_size"),
        ({"engine": {"num_slots": 1000, "kv_mb": 10}}, "not both"),
        ({"engine": {"max_running": 9, "max_tokens_per_step": 8}}, "max_running"),
        ({"engine": {"max_draft_wait_s": 0}}, "max_draft_wait_s"),
        ({"engine": {"max_draft_wait_s": "abc"}}, "max_draft_wait_s"),
        ({"traces": {"dir": "traces"}}, r"traces\.dir: .*absolute"),
        ({"traces": {"dir": "~no-such-user/x"}}, r"traces\.dir: .*home"),
        ({"drafters": [{"name": "A_b", "address": "x:1"}]}, "drafters.0.name"),
        ({"drafters": [{"name": "a", "address": "x:1"}] * 2}, "a stands twice"),
        ({"drafters": [{"name": "a", "address": "x:1", "kind": "q"}]}, "drafters.0.kind"),
    ],
)
def test_bad_settings_are_refused_by_name(values: dict[str, object], named: str):
    with pytest.raises(ConfigError, match=named):
        parse_settings(values)


def test_all_faults_of_a_file_are_named_at_once(tmp_path: Path):
    path = tmp_path / "verifier.yaml"
    path.write_text("dtype: fp8\nengine: {page_size: -3}\nnonsense: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert all(word in str(caught.value) for word in ("dtype", "engine.page_size", "nonsense"))


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "\x00"])
def test_files_that_are_no_settings_are_refused(tmp_path: Path, text: str):
    path = tmp_path / "verifier.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_settings(path)


def test_every_field_says_what_it_is():
    for section in (VerifierSettings, EngineSection):
        assert all(field.description for field in section.model_fields.values())


def test_the_token_is_not_shown():
    assert "hush" not in repr(parse_settings({"token": "hush"}))


def test_a_memory_budget_becomes_slots_with_the_scrap_page_paid():
    made = engine_settings(EngineSection(kv_mb=1, page_size=16), bytes_per_slot=1024)
    assert made.num_slots == 1024 - 16
    assert engine_settings(EngineSection(), 1024).num_slots == DEFAULT_NUM_SLOTS
    with pytest.raises(ConfigError, match="kv_mb"):
        engine_settings(EngineSection(kv_mb=1, page_size=64), bytes_per_slot=2**20)


@pytest.mark.parametrize(
    "values",
    [
        {"page_size": 0},
        {"max_running": 0},
        {"max_prefill_chunk": 0},
        {"max_queued": -1},
        {"max_running": 10, "max_tokens_per_step": 9},
        {"num_slots": 3, "page_size": 4},
        {"max_draft_wait_s": -0.1},
    ],
)
def test_engine_sizes_that_cannot_work_are_refused(values: dict[str, int]):
    with pytest.raises(ConfigError):
        EngineSettings(**values)


def test_a_target_that_is_no_directory_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        ensure_target(str(tmp_path))
    with pytest.raises(ConfigError, match="home that nobody has"):
        ensure_target("~no-such-user/target")


def drafter(**changes: object) -> Capabilities:
    values = {
        "kind": "eagle3",
        "name": "e",
        "incarnation": 1,
        "plan_kinds": (PlanKind.TREE,),
        "digest": "d" * 32,
        "aux_layers": (0, 1),
        "raw_width": 128,
        "fused_width": 64,
        "projection": Projection(fc="fc.weight"),
    }
    return Capabilities(**(values | changes))


def test_rows_are_kept_raw_without_a_checkpoint_and_not_at_all_without_need():
    tap = tap_for(drafter(), None)
    assert tap is not None
    assert tap.projection is None
    assert tap.key == "d" * 32
    assert row_form(tap, 128, DType.BF16).form is FeatureForm.RAW
    assert tap_for(drafter(aux_layers=()), None) is None


def test_a_checkpoint_that_the_drafter_does_not_run_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(IncompatiblePair, match="digest"):
        tap_for(drafter(), tmp_path)


def test_a_stray_file_is_no_part_of_a_checkpoint(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"fc.weight": torch.zeros(2, 6)}, tmp_path / "model.safetensors")
    both = (tmp_path / "config.json", tmp_path / "model.safetensors")
    digest = sha256(b"".join(path.read_bytes() for path in both)).hexdigest()[:32]
    save_file({"fc.weight": torch.ones(9, 9)}, tmp_path / "extra.safetensors")
    tap = tap_for(drafter(digest=digest), tmp_path)
    assert tap is not None
    assert tap.projection is not None
    assert Path(tap.projection.file).name == "model.safetensors"


def test_metrics_are_flat_sums_with_labels():
    stats = EngineStats(
        num_steps=3, accepted_by_depth=(5, 2), accepted_by_source=(("ngram", 7),), step_s=0.5
    )
    values = snapshot(stats, {})
    assert values["num_steps"] == 3.0
    assert values["step_s"] == 0.5
    assert values['accepted{depth="1"}'] == 5.0
    assert values['accepted{source="ngram"}'] == 7.0
    assert "last_step_s" not in values


def test_prompts_take_less_of_a_step_in_which_others_decode_where_nothing_is_said():
    assert EngineSettings().max_prefill_chunk > EngineSettings().prefill_rows == 256
    assert EngineSettings(max_prefill_chunk=64).prefill_rows == 64
    assert EngineSettings(max_prefill_while_decoding=400).prefill_rows == 400
