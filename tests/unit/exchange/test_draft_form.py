"""Which rows a drafter is sent, and which pairs are refused."""

import pytest

from protos.errors import IncompatiblePair
from protos.exchange import Capabilities, PlanKind
from protos.features import DType, FeatureForm
from verifier_service.engine.draft_form import RowForm, TargetEnd, choose_form

FUSED = RowForm(FeatureForm.FUSED, 8, DType.BF16, "d")
RAW = RowForm(FeatureForm.RAW, 24, DType.BF16, "d")


def drafter(**facts):
    return Capabilities("eagle3", "eagle3", 1, (PlanKind.CHAIN,), **{"digest": "d", **facts})


def target(*forms, digest="target"):
    return TargetEnd(100, 64, digest, {form.tap: form for form in forms})


def test_a_drafter_of_tokens_only_is_sent_no_rows():
    assert choose_form(drafter(digest=""), target()) == RowForm()


@pytest.mark.parametrize("kept", [FUSED, RAW])
def test_the_kept_form_is_sent(kept):
    taking_both = drafter(raw_width=24, fused_width=8)
    assert choose_form(taking_both, target(kept)) == kept


@pytest.mark.parametrize(
    ("facts", "kept"),
    [
        ({"raw_width": 24}, ()),
        ({"raw_width": 24, "digest": "other"}, (RAW,)),
        ({"raw_width": 25}, (RAW,)),
        ({"raw_width": 24}, (FUSED,)),
        ({"fused_width": 8}, (RAW,)),
    ],
    ids=["nothing kept", "another checkpoint", "another width", "only fused", "only raw"],
)
def test_rows_that_are_not_kept_are_refused(facts, kept):
    with pytest.raises(IncompatiblePair):
        choose_form(drafter(**facts), target(*kept))


def test_a_drafter_of_another_target_is_refused():
    with pytest.raises(IncompatiblePair, match="belongs to"):
        choose_form(drafter(target_digest="another"), target())
    assert choose_form(drafter(target_digest="target"), target()) == RowForm()
    assert choose_form(drafter(target_digest="any"), target(digest="")) == RowForm()


def test_a_smaller_vocabulary_is_refused():
    with pytest.raises(IncompatiblePair, match="ids"):
        choose_form(drafter(vocab_size=99), target())
    for size in (0, 100, 128):
        assert choose_form(drafter(vocab_size=size), target()) == RowForm()
