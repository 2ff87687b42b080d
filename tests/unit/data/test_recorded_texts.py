"""Recorded texts: made once, kept, added to, and refused when they are damaged or another's."""

from dataclasses import replace

import pytest
import torch

from protos.errors import ConfigError, ContextTooLong
from protos.features import DType
from protos.recorded import NUM_BEYOND
from tests.tiny import tiny_llama_dir
from verifier_service.data.recorded import RecordSettings, TextRecorder
from verifier_service.data.recording_engine import RecordingTarget, engine_around, taps_of
from verifier_service.model.load import load_target

PROMPTS = tuple(tuple(3 + (13 * n + 5 * j) % 250 for j in range(4 + 9 * n)) for n in range(5))
MAX_NEW = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        tiny_llama_dir(tmp_path_factory.mktemp("target")), torch.float32, taps_of((0, 1, 2, 65535))
    )


@pytest.fixture(scope="module")
def asked(target):
    return RecordSettings(target.facts.digest, DType.FP32, seed=7, max_new=MAX_NEW)


class Maker:
    """Makes engines and counts them."""

    def __init__(self, target, batch=3):
        self.target, self.batch, self.layers = target, batch, []

    def __call__(self, layers, longest):
        self.layers.append(tuple(layers))
        return engine_around(self.target, layers, self.batch, longest)


def refuse(layers, longest):
    raise AssertionError("nothing was missing, yet the target was asked for")


def test_texts_and_rows_are_made_once(target, asked, tmp_path):
    first = TextRecorder(tmp_path, asked).texts(PROMPTS, (0, 2), Maker(target))
    again = TextRecorder(tmp_path, asked).texts(PROMPTS, (2, 0), refuse)
    assert [text.tokens for text in again] == [text.tokens for text in first]
    assert again[2].rows((0, 2)) == first[2].rows((0, 2))
    for prompt, text in zip(PROMPTS, first, strict=True):
        assert text.tokens[: text.prompt_len] == prompt
        assert text.end <= text.max_len == len(prompt) + MAX_NEW
        rows = text.rows((0, 2))
        assert (rows.start, rows.end) == (0, text.end - 1)
        assert rows.width == 2 * target.facts.hidden_size


def test_a_layer_or_prompt_that_is_missing_is_added_without_making_the_rest(
    target, asked, tmp_path
):
    few, maker = TextRecorder(tmp_path, asked), Maker(target)
    before = few.texts(PROMPTS[:2], (0,), maker)
    row = before[1].rows((0,))
    done = []
    after = few.texts(PROMPTS[:3], (0,), maker, lambda *numbers: done.append(numbers))
    assert [number[:2] for number in done] == [(1, 1)]
    added = few.texts(PROMPTS[:3], (1, 65535), maker)
    assert maker.layers == [(0,), (0,), (1, 65535)]
    assert [text.tokens for text in added] == [text.tokens for text in after]
    assert added[1].rows((0,)) == row
    fresh = TextRecorder(tmp_path / "other", asked).texts(PROMPTS[:3], (0, 1, 65535), Maker(target))
    for text, expected in zip(added, fresh, strict=True):
        assert text.rows((0, 1, 65535)) == expected.rows((0, 1, 65535))


def test_a_broken_run_goes_on_with_what_is_missing(target, asked, tmp_path):
    class Killed(Exception):
        pass

    def kill(done, every, tokens):
        raise Killed

    recorder = TextRecorder(tmp_path, asked)
    with pytest.raises(Killed):
        recorder.texts(PROMPTS, (0,), Maker(target, batch=1), kill)
    assert len(recorder.missing(PROMPTS, (0,))) == len(PROMPTS) - 1
    texts = recorder.texts(PROMPTS, (0,), Maker(target))
    whole = TextRecorder(tmp_path / "whole", asked).texts(PROMPTS, (0,), Maker(target))
    assert [text.tokens for text in texts] == [text.tokens for text in whole]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.8},
        {"seed": 8},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"max_new": 5},
        {"dtype": DType.BF16},
        {"target_digest": "0" * 32},
    ],
    ids=str,
)
def test_other_settings_are_other_texts(target, asked, tmp_path, change):
    TextRecorder(tmp_path, asked).texts(PROMPTS[:1], (), Maker(target))
    other = TextRecorder(tmp_path, replace(asked, **change))
    assert other.missing(PROMPTS[:1], ()) == [PROMPTS[0]]
    if {"dtype", "target_digest"} & change.keys():
        with pytest.raises(ConfigError, match="cannot be made by"):
            other.texts(PROMPTS[:1], (), Maker(target))


def test_a_prompts_seed_depends_on_the_prompt_and_not_on_its_place(target, asked, tmp_path):
    warm = replace(asked, temperature=1.0)
    forth = TextRecorder(tmp_path / "a", warm).texts(PROMPTS, (), Maker(target))
    back = TextRecorder(tmp_path / "b", warm).texts(PROMPTS[::-1], (), Maker(target, 5))
    assert [text.tokens for text in forth] == [text.tokens for text in back[::-1]]
    assert len({text.params.seed for text in forth}) == len(PROMPTS)


def test_a_text_that_ends_is_continued_for_drafts_that_foresee_the_end(
    target, asked, tmp_path, monkeypatch
):
    long = replace(asked, max_new=60)
    plain = TextRecorder(tmp_path / "plain", long).texts(PROMPTS[:2], (0,), Maker(target))
    token = plain[0].tokens[plain[0].prompt_len + 9]
    monkeypatch.setattr(target, "facts", replace(target.facts, eos_token_ids=(token,)))
    ended = TextRecorder(tmp_path / "ended", long).texts(PROMPTS[:2], (0,), Maker(target))
    text = ended[0]
    assert text.tokens[text.end - 1] == token
    assert token not in text.tokens[text.prompt_len : text.end - 1]
    assert text.tokens == plain[0].tokens[: text.end + NUM_BEYOND]
    assert text.max_len == plain[0].max_len
    added = TextRecorder(tmp_path / "ended", long).texts(PROMPTS[:2], (0, 1), Maker(target))
    assert added[0].rows((0,)) == text.rows((0,))
    assert added[0].rows((1,)).count == text.end - 1


def damaged(recorder, tmp_path, change):
    path = next((tmp_path / recorder_folder(tmp_path)).glob("*.safetensors"))
    path.write_bytes(change(path.read_bytes()))
    return path.name


def recorder_folder(tmp_path):
    return next(path.name for path in tmp_path.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    "change",
    [lambda data: data[:-100], lambda data: data[:20], lambda data: b"", lambda data: data[8:]],
    ids=["torn", "header", "empty", "shifted"],
)
def test_a_torn_file_is_refused_by_name_and_not_made_again(target, asked, tmp_path, change):
    recorder = TextRecorder(tmp_path, asked)
    recorder.texts(PROMPTS[:1], (0,), Maker(target))
    name = damaged(recorder, tmp_path, change)
    with pytest.raises(ConfigError, match=f"{name}.*delete it"):
        recorder.texts(PROMPTS[:1], (0,), refuse)


def test_a_file_torn_after_it_was_found_is_refused_when_rows_are_read(target, asked, tmp_path):
    (text,) = TextRecorder(tmp_path, asked).texts(PROMPTS[:1], (0,), Maker(target))
    damaged(None, tmp_path, lambda data: data[:-100])
    with pytest.raises(ConfigError, match="cannot be read"):
        text.rows((0,))


def test_a_layer_that_was_not_recorded_is_refused(target, asked, tmp_path):
    (text,) = TextRecorder(tmp_path, asked).texts(PROMPTS[:1], (0,), Maker(target))
    with pytest.raises(ConfigError, match=r"layer\.1"):
        text.rows((0, 1))


def test_no_prompts_and_prompts_without_room_are_refused(target, asked, tmp_path):
    recorder = TextRecorder(tmp_path, asked)
    with pytest.raises(ConfigError, match="no prompts"):
        recorder.texts([], (0,), refuse)
    with pytest.raises(ContextTooLong):
        recorder.texts([tuple([5] * 3000)], (0,), Maker(target))


def test_a_target_is_loaded_once_for_equal_layers(tmp_path, tmp_path_factory, monkeypatch):
    directory = tiny_llama_dir(tmp_path)
    loads = []

    def count(directory, dtype, taps, **more):
        loads.append([tap.aux_layers for tap in taps])
        return load_target(directory, dtype, taps, **more)

    monkeypatch.setattr("verifier_service.data.recording_engine.load_target", count)
    target = RecordingTarget(directory, DType.FP32, batch=2)
    for layers in ((0,), (0,), (0, 1)):
        target.engine(layers, 40)
    assert loads == [[(0,)], [(0,), (1,)]]
