"""The answers file: torn ends, other settings, totals; and the sampling of its answers."""

import msgpack
import pytest

from protos.errors import ConfigError
from verifier_service.data.answers_file import Answer, AnswersFile, make_header, read_answers
from verifier_service.data.conversations import Sampler

A, B, C = (Answer((1, 2, i), (3, i)) for i in range(3))


def _header(vocab: int = 1000, **facts: object):
    return make_header("tiny", vocab, facts)


def test_records_come_back_as_written(tmp_path):
    store = AnswersFile(tmp_path / "a.msgpack", _header())
    store.append([A, B])
    store.append([C])
    header, answers = read_answers(tmp_path / "a.msgpack")
    assert answers == [A, B, C]
    assert header["ids"] == "uint16 little-endian"
    assert "records" not in header


def test_a_finished_file_names_its_totals(tmp_path):
    store = AnswersFile(tmp_path / "a.msgpack", _header())
    store.append([A, B])
    store.seal()
    header, answers = read_answers(tmp_path / "a.msgpack")
    assert (header["records"], header["answer_tokens"]) == (2, 4)
    assert answers == [A, B]


def test_the_format_is_what_trainers_read(tmp_path):
    store = AnswersFile(tmp_path / "a.msgpack", _header())
    store.append([A])
    store.seal()
    with (tmp_path / "a.msgpack").open("rb") as stream:
        header, record = msgpack.Unpacker(stream)
    assert header["format"] == "outrider-answers"
    assert record == {"p": b"\x01\0\x02\0\0\0", "r": b"\x03\0\0\0"}


def test_large_vocabularies_take_four_bytes_and_say_so(tmp_path):
    big = Answer((70_000,), (150_000, 2))
    store = AnswersFile(tmp_path / "a.msgpack", _header(151_936))
    store.append([big])
    header, answers = read_answers(tmp_path / "a.msgpack")
    assert header["ids"] == "uint32 little-endian"
    assert answers == [big]


def test_every_torn_end_is_cut_back_to_whole_records(tmp_path):
    path = tmp_path / "a.msgpack"
    AnswersFile(path, _header()).append([A])
    whole = path.stat().st_size
    AnswersFile(path, _header()).append([B])
    data = path.read_bytes()
    for size in range(whole, len(data)):
        path.write_bytes(data[:size])
        store = AnswersFile(path, _header())
        assert store.answers == [A]
        store.append([B])
        assert path.read_bytes() == data


def test_damage_inside_a_file_is_refused_and_loses_nothing(tmp_path):
    path = tmp_path / "a.msgpack"
    store = AnswersFile(path, _header())
    store.append([A])
    end = path.stat().st_size
    store.append([B, C])
    data = bytearray(path.read_bytes())
    data[end] = 0xC1  # what msgpack never writes
    path.write_bytes(data)
    for open_it in (lambda: AnswersFile(path, _header()), lambda: read_answers(path), store.seal):
        with pytest.raises(ConfigError, match=f"damaged behind byte {end}"):
            open_it()
        assert path.read_bytes() == data


def test_a_file_appears_with_its_whole_header_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.msgpack"

    def killed(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(path), "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            AnswersFile(path, _header())
    assert not path.exists()
    AnswersFile(path, _header()).append([A])
    assert read_answers(path)[1] == [A]


def test_a_run_with_other_settings_is_refused_by_name(tmp_path):
    AnswersFile(tmp_path / "a", _header(sampling="one")).append([A])
    with pytest.raises(ConfigError, match="sampling"):
        AnswersFile(tmp_path / "a", _header(sampling="two"))


def test_other_files_are_not_overwritten(tmp_path):
    path = tmp_path / "precious.txt"
    path.write_text("not an answers file")
    with pytest.raises(ConfigError, match="no answers file"):
        AnswersFile(path, _header())
    assert path.read_text() == "not an answers file"


def test_a_finished_file_can_be_gone_on_with(tmp_path):
    store = AnswersFile(tmp_path / "a", _header())
    store.append([A])
    store.seal()
    again = AnswersFile(tmp_path / "a", _header())
    again.append([B])
    again.seal()
    header, answers = read_answers(tmp_path / "a")
    assert header["records"] == 2
    assert answers == [A, B]


def test_sampling_mixes_temperatures_and_never_shares_a_seed():
    sampler = Sampler((0.0, 1.0), 64, 256, 7)
    params = [sampler.params(i, turn) for i in range(50) for turn in range(2)]
    assert {p.temperature for p in params} == {0.0, 1.0}
    assert len({p.seed for p in params}) == 100
    assert sampler.params(3, 1) == params[7]
