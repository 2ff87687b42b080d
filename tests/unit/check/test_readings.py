"""Checkpoints whose files leave something open: every reading is scored with its own rows."""

from dataclasses import dataclass, replace

import pytest
import torch

from cluster.fleet.pairs import (
    Reading,
    TriedReading,
    best_reading,
    readings_of,
    taps_of,
    try_readings,
)
from drafter_service.kinds import PlainDescription
from protos.errors import CheckpointError
from protos.exchange import Capabilities, DraftResult, DraftStatus, PlanKind
from protos.tree import chain
from tests.tiny import tiny_llama_dir
from verifier_service.model.load import load_target
from verifier_service.pairs.probe import PairScore
from verifier_service.pairs.text import read_text, text_ids


@dataclass(frozen=True)
class Open:
    """A description with two readings of its layer ids."""

    label: str = ""
    aux_layers: tuple[int, ...] = (0, 1)
    digest: str = "d"
    projection: None = None
    is_open: bool = True

    @property
    def variants(self):
        return (Open("low", (0, 1)), Open("high", (1, 2))) if self.is_open else ()

    def choose(self, label):
        found = {"": self, "low": Open("low", (0, 1)), "high": Open("high", (1, 2))}.get(label)
        if found is None:
            raise CheckpointError(label)
        return replace(found, is_open=False)


def test_clear_files_have_one_reading_and_tokens_only_none_of_rows():
    assert readings_of(None) == [Reading()]
    plain = readings_of(PlainDescription("d", (1, 2)))
    assert [r.tap.aux_layers for r in plain] == [(1, 2)]


def test_open_files_have_all_readings_unless_the_configuration_names_one():
    both = readings_of(Open())
    assert [(r.label, r.tap.aux_layers) for r in both] == [("low", (0, 1)), ("high", (1, 2))]
    assert [r.label for r in readings_of(Open(), "high")] == ["high"]
    with pytest.raises(CheckpointError):
        readings_of(Open(), "other")


def test_readings_with_the_same_layers_share_their_rows():
    low, high = readings_of(Open())
    assert len(taps_of([low, high, replace(low, label="again"), Reading("tokens")])) == 2


class RowReader:
    """Guesses right only where the rows it is sent are those of `layers`."""

    def __init__(self, text, rows):
        self.capabilities = Capabilities("rows", "rows", 1, (PlanKind.CHAIN,), "d", raw_width=128)
        self.text, self.rows, self.is_right = text, rows, True

    def handle(self, works):
        return [self._draft(work) for work in works if not work.close]

    def _draft(self, work):
        if work.rows is not None:
            size = work.rows.width * work.rows.dtype.num_bytes
            expected = self.rows.data[work.rows.start * size : work.rows.end * size]
            self.is_right = self.is_right and work.rows.data == expected
        choice = self.text.choices[work.base_len - 1] if self.is_right else 0
        result = DraftResult(work.session_id, 1, work.base_len, DraftStatus.OK)
        return replace(result, tree=chain([choice])) if work.plan.depth else result


def test_the_reading_whose_rows_are_right_scores_best(tmp_path):
    readings = readings_of(Open())
    directory = tiny_llama_dir(tmp_path / "target")
    target = load_target(directory, torch.float32, taps_of(readings))
    keys = [tap.key for tap in taps_of(readings)]
    text = read_text(target, text_ids(directory, target.facts.vocab_size), keys)
    high = text.rows[readings[1].tap.key]
    tried = try_readings(target, directory, readings, lambda label: RowReader(text, high))
    assert [one.score.num_agreed for one in tried][1] == 64
    assert best_reading(tried).reading.label == "high"


def test_the_likelier_reading_wins_a_tie():
    tried = [TriedReading(Reading(name), PairScore(3, 3, 64)) for name in ("first", "second")]
    assert best_reading(tried).reading.label == "first"
