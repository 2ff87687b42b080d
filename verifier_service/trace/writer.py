"""Writes trace records to files of its own, on a thread of its own.

    trace-<UTC time>-<writer>-<number>.msgpack      a header, then records; the newest grows

Several writers, on several machines, may share one folder. Knows no engine. Invariants: `put`
never blocks and never raises; a record is whole in one file or in none; a disk that is full, slow
or not there costs records, which are counted, and nothing else. The folder is kept under its cap
by removing the files that were not written to for longest, whoever wrote them.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from verifier_service.frames import pack_frame
from verifier_service.trace.codec import Encoder, header_frame
from verifier_service.trace.records import Header, Lost, Record

_log = logging.getLogger(__name__)

PATTERN: Final = "trace-*.msgpack"
MAX_BUFFERED_STEPS: Final = 1024
_RETRY_S: Final = 30.0
_CLOSE_S: Final = 5.0
_FILES_PER_CAP: Final = 8
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND


@dataclass(slots=True)
class _Open:
    """The file that grows. size: bytes of whole records in it."""

    path: Path
    descriptor: int
    size: int = 0


class TraceWriter:
    """Takes records in from one thread and writes them from another."""

    def __init__(
        self,
        folder: Path,
        header: Header,
        max_bytes: int,
        max_buffered: int = MAX_BUFFERED_STEPS,
        retry_s: float = _RETRY_S,
    ) -> None:
        """Starts the thread, which makes the folder. max_bytes: of all traces in the folder.

        max_buffered: steps that may wait for the disk. retry_s: pause after a failed write.
        """
        self._folder = folder
        self._header = header
        self._max_bytes = max_bytes
        self._file_bytes = max(max_bytes // _FILES_PER_CAP, 1)
        self._retry_s = retry_s
        self._max_buffered = max_buffered
        self._queue: SimpleQueue[tuple[Record, ...] | None] = SimpleQueue()
        self._num_turned_away = 0  # changed by the thread that puts, read by the one that writes
        self._num_told = 0
        self._num_failed = 0
        self._number = 0
        self._file: _Open | None = None
        self._is_failing = False
        self._has_lost = False
        self._rests_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Steps whose records were not kept so far."""
        return self._num_turned_away + self._num_failed

    def put(self, records: Sequence[Record]) -> None:
        """Take the records of one step; dropped and counted when the buffer is full."""
        # One thread puts, so that the queue cannot grow in between.
        if self._queue.qsize() >= self._max_buffered:
            self._num_turned_away += 1
        else:
            self._queue.put(tuple(records))

    def close(self) -> None:
        """Write what is buffered, for a few seconds at most."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        self._write(())  # at once, so that a folder that cannot be written to is told at start
        while (records := self._queue.get()) is not None:
            self._write(records)
        if self._file is not None:
            os.close(self._file.descriptor)

    def _write(self, records: Sequence[Record]) -> None:
        """The records of one step, whole or not at all; none begins a file."""
        num_steps = bool(records)
        if time.monotonic() < self._rests_until_s:
            self._num_failed += num_steps
            return
        missing = self.num_lost - self._num_told
        try:
            data = _pack((Lost(missing), *records) if missing else records)
        except (ValueError, OverflowError) as error:  # a number that no map holds, for one
            self._num_failed += num_steps
            _log.debug("a step cannot be recorded: %s", error)
            return
        try:
            _write_all(self._grown(len(data)), data)
        except OSError as error:
            self._fail(error.strerror or type(error).__name__, num_steps)
        else:
            if missing and not self._has_lost:
                _log.warning("%d steps were not recorded", missing)
            self._has_lost = self._has_lost or missing > 0
            self._is_failing = False
            self._num_told += missing

    def _grown(self, num_bytes: int) -> _Open:
        """The file to append to: the open one while it is there and has room, else a new one."""
        file = self._file
        if file is not None:
            is_there = os.fstat(file.descriptor).st_nlink > 0
            if is_there and file.size + num_bytes <= self._file_bytes:
                return file
            os.close(file.descriptor)
            self._file = None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tidy()
        self._number += 1
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._header.wall_s))
        path = self._folder / f"trace-{began}-{self._header.writer}-{self._number:04}.msgpack"
        # They hold what people asked and were told: for the owner's eyes.
        descriptor = os.open(path, _FLAGS, 0o600)
        self._file = _Open(path, descriptor)
        _write_all(self._file, pack_frame(header_frame(self._header), escape=True))
        return self._file

    def _tidy(self) -> None:
        """Remove the oldest traces until one more file fits under the cap."""
        found = []
        for path in self._folder.glob(PATTERN):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._max_bytes - self._file_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _fail(self, why: str, num_steps: int) -> None:
        """Leave the disk alone for a while; said once per outage."""
        if not self._is_failing:
            _log.warning("traces cannot be written to %s: %s", self._folder, why)
        self._is_failing = True
        self._num_failed += num_steps
        self._rests_until_s = time.monotonic() + self._retry_s
        file, self._file = self._file, None
        if file is None:
            return
        with contextlib.suppress(OSError):
            if file.size:
                os.ftruncate(file.descriptor, file.size)
            else:
                file.path.unlink()
        os.close(file.descriptor)


def _pack(records: Sequence[Record | Lost]) -> bytes:
    encoder = Encoder()
    frames = (frame for record in records for frame in encoder.frames(record))
    # An id or a name may be any text, and must not cost the step's other requests their records.
    return b"".join(pack_frame(frame, escape=True) for frame in frames)


def _write_all(file: _Open, data: bytes) -> None:
    """Append; OSError when not all of it could be."""
    left = memoryview(data)
    while left:
        left = left[os.write(file.descriptor, left) :]
    file.size += len(data)
