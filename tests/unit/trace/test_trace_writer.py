"""Traces on disk: whole records, bounded space, names of their own, and no text is ever risked."""

import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trace_house import (
    MEGABYTE,
    file_tracer,
    header,
    made_records,
    run_traced,
    write_file,
)

from cluster.config import parse_config
from protos.errors import ConfigError
from tests.fakes import request
from verifier_service.config import TraceSection
from verifier_service.frames import read_frames
from verifier_service.trace.codec import Decoder, read_header
from verifier_service.trace.reading import TraceFolder
from verifier_service.trace.records import Lost, Opened, Record
from verifier_service.trace.writer import TraceWriter


def records_of(path: Path) -> list[Record | Lost]:
    decoder = Decoder()
    with path.open("rb") as stream:
        frames = [frame for frame, _ in read_frames(stream)]
    read_header(frames[0])
    return [r for frame in frames[1:] if (r := decoder.record(frame)) is not None]


def wait_until(claim: Callable[[], bool]) -> None:
    until = time.monotonic() + 20.0
    while not claim():
        assert time.monotonic() < until
        threading.Event().wait(0.005)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_was_written_is_read_back_the_same(tmp_path):
    records = made_records()
    path = write_file(tmp_path / "made" / "here", records)
    assert records_of(path) == records
    with path.open("rb") as stream:
        frames = [frame for frame, _ in read_frames(stream)]
    assert read_header(frames[0]) == header()
    # Three steps have records, and each is told once however many requests it had.
    assert [frame["kind"] for frame in frames[1:]].count("step") == 4


def test_a_record_that_cannot_be_understood_costs_itself_only(tmp_path):
    path = write_file(tmp_path, made_records())
    with path.open("rb") as stream:
        frames = [frame for frame, _ in read_frames(stream)]
    spoilt = 0
    for number, frame in enumerate(frames):
        for name in frame:
            decoder = Decoder()
            bad = {**frame, name: {"not": "this"}}
            for index, other in enumerate(frames):
                decoder.record(bad if index == number else other)
            del bad[name]
            spoilt += decoder.record(bad) is None
    assert spoilt > 40


def test_only_the_owner_may_read_traces(tmp_path):
    path = write_file(tmp_path / "traces", made_records())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_writers_of_one_folder_never_share_a_file(tmp_path):
    writers = [TraceWriter(tmp_path, header(f"0000000{n}"), MEGABYTE) for n in range(3)]
    for n, writer in enumerate(writers):
        writer.put(made_records(f"cmpl-{n}"))
    for writer in writers:
        writer.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 3
    for n, path in enumerate(paths):
        assert {r.request_id for r in records_of(path)} == {f"cmpl-{n}"}


def test_the_folder_stays_under_its_cap_and_the_newest_stay(tmp_path):
    cap = 200_000
    writer = TraceWriter(tmp_path, header(), cap)
    for n in range(400):
        writer.put(made_records(f"cmpl-{n:04}"))
    writer.close()
    assert writer.num_lost == 0
    paths = sorted(tmp_path.iterdir())
    assert len(paths) > 3
    assert sum(path.stat().st_size for path in paths) <= cap
    kept = [r.request_id for path in paths for r in records_of(path) if isinstance(r, Opened)]
    assert kept == [f"cmpl-{n:04}" for n in range(400 - len(kept), 400)]


def test_a_file_that_somebody_removed_is_followed_by_a_new_one(tmp_path):
    writer = TraceWriter(tmp_path, header(), MEGABYTE)
    writer.put(made_records("first"))
    wait_until(lambda: size_of(tmp_path) > 500)
    for path in tmp_path.iterdir():
        path.unlink()
    writer.put(made_records("second"))
    writer.close()
    (path,) = tmp_path.iterdir()
    assert {r.request_id for r in records_of(path)} == {"second"}


@pytest.mark.parametrize("obstacle", ["a file", "no permission"])
def test_a_folder_that_cannot_be_written_to_costs_the_trace_alone(tmp_path, caplog, obstacle):
    folder = tmp_path / "traces"
    if obstacle == "a file":
        folder.write_text("in the way")
    elif os.geteuid() == 0:
        pytest.skip("nothing is forbidden to the superuser")
    else:
        folder.mkdir(mode=0o500)
    asked = [request(f"r{n}", [n, 5], 20) for n in range(3)]
    plain = run_traced(None, asked).texts()
    with caplog.at_level(logging.WARNING):
        traced = file_tracer(folder)
        assert run_traced(traced, asked).texts() == plain
    told = [r.getMessage() for r in caplog.records if "traces cannot be written" in r.message]
    assert len(told) == 1


def test_a_full_disk_loses_whole_records_and_tells_how_many_steps(tmp_path, monkeypatch, caplog):
    is_full = threading.Event()
    written = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if is_full.is_set():
            written(descriptor, data[:10])
            raise OSError(28, "No space left on device")
        return written(descriptor, data)

    writer = TraceWriter(tmp_path, header(), MEGABYTE, retry_s=0.0)
    monkeypatch.setattr("verifier_service.trace.writer.os.write", write)

    with caplog.at_level(logging.WARNING):
        writer.put(made_records("before"))
        wait_until(lambda: size_of(tmp_path) > 500)
        is_full.set()
        for number in range(1, 4):
            writer.put(made_records("lost"))
            wait_until(lambda most=number: writer.num_lost == most)
        is_full.clear()
        writer.put(made_records("after"))
        writer.close()
    records = [r for path in sorted(tmp_path.iterdir()) for r in records_of(path)]
    names = dict.fromkeys(r.request_id for r in records if not isinstance(r, Lost))
    assert list(names) == ["before", "after"]
    assert sum(r.num_steps for r in records if isinstance(r, Lost)) == writer.num_lost == 3
    for path in tmp_path.iterdir():
        with path.open("rb") as stream:
            *_, (_, end) = read_frames(stream)
        assert end == path.stat().st_size
    assert sum("cannot be written" in r.message for r in caplog.records) == 1


def test_a_slow_disk_never_holds_the_thread_that_steps(tmp_path, monkeypatch):
    may_go_on, written = threading.Event(), os.write

    def write(descriptor: int, data: memoryview) -> int:
        may_go_on.wait(10)
        return written(descriptor, data)

    monkeypatch.setattr("verifier_service.trace.writer.os.write", write)
    writer = TraceWriter(tmp_path, header(), MEGABYTE, max_buffered=5)
    for n in range(30):
        writer.put(made_records(f"cmpl-{n}"))
    assert writer.num_lost == 25
    may_go_on.set()
    writer.close()
    records = [r for path in tmp_path.iterdir() for r in records_of(path)]
    assert len({r.request_id for r in records if not isinstance(r, Lost)}) == 5
    assert sum(r.num_steps for r in records if isinstance(r, Lost)) == 25


def test_an_id_that_is_no_unicode_costs_nobody_a_record(tmp_path):
    writer = TraceWriter(tmp_path, header(), MEGABYTE)
    together = [made_records("cmpl-\ud800x\udcff", 4), made_records("cmpl-good")]
    for of_a_step in zip(*together, strict=True):
        writer.put(of_a_step)
    writer.close()
    (path,) = tmp_path.iterdir()
    assert writer.num_lost == 0
    read = records_of(path)
    assert [r for r in read if r.request_id == "cmpl-good"] == together[1]
    assert [r for r in read if r.key == 4] == made_records("cmpl-\\ud800x\\udcff", 4)


def test_any_name_of_a_request_or_a_verifier_may_be_no_unicode(tmp_path):
    opened = Opened("x", 1, 0.0, 3, 0, (("drafters", "\udc80"),), "auto")
    path = write_file(tmp_path, [opened], target="/models/\udcff")
    (told,) = records_of(path)
    assert told == replace(opened, settings=(("drafters", "\\udc80"),))
    (file,) = TraceFolder(tmp_path).files
    assert file.header.target == "/models/\\udcff"


def test_a_number_that_no_file_holds_costs_its_own_step(tmp_path):
    writer = TraceWriter(tmp_path, header(), MEGABYTE)
    writer.put(made_records("cmpl-odd", 2**70))
    writer.put(made_records("cmpl-good"))
    writer.close()
    (path,) = tmp_path.iterdir()
    lost, *kept = records_of(path)
    assert lost == Lost(1)
    assert kept == made_records("cmpl-good")


def test_without_traces_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_traced(None, [request("r", [1, 2], 9)])
    assert list(tmp_path.iterdir()) == []
    assert not any(thread.name == "trace" for thread in threading.enumerate())


def test_the_folder_must_be_an_absolute_path():
    with pytest.raises(ValueError, match="absolute path"):
        TraceSection(dir="traces")
    assert TraceSection(dir="~/traces").share == 1.0
    with pytest.raises(ConfigError, match=r"verifier\.traces\.dir"):
        parse_config({"verifier": {"traces": {"dir": "traces"}}})
