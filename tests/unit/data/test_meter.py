"""Progress says what is done, how fast this run is and how long is left."""

import io

import pytest

from verifier_service.data.meter import Meter


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test sets."""
    now = [100.0]
    monkeypatch.setattr("verifier_service.data.meter.time.monotonic", lambda: now[0])
    return now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rate_and_time_left_are_of_this_run_alone(clock):
    stream = io.StringIO()
    meter = Meter("conversations", stream)
    meter.report(50, 100, 0)  # an earlier run did fifty
    clock[0] += 20
    meter.report(60, 100, 4000)
    assert stream.getvalue().split("\n")[:2] == [
        "50/100 conversations",
        "60/100 conversations  200 tokens/s  1 min 20 s left",
    ]


def test_a_first_report_with_tokens_counts_one(clock):
    stream = io.StringIO()
    meter = Meter("turns", stream)
    clock[0] += 2
    meter.report(50, 5453, 100)
    assert stream.getvalue() == "50/5453 turns  50 tokens/s  3 h 0 min left\n"


def test_lines_are_rare_without_a_terminal_and_the_last_one_comes(clock):
    stream = io.StringIO()
    meter = Meter("turns", stream)
    for done in range(1, 31):
        clock[0] += 1
        meter.report(done, 30, done)
    assert [line.split("/")[0] for line in stream.getvalue().split("\n")[:-1]] == [
        "1",
        "11",
        "21",
        "30",
    ]


def test_a_terminals_line_is_rewritten_and_ended(clock):
    stream = _Terminal()
    meter = Meter("turns", stream)
    meter.close()
    assert stream.getvalue() == ""
    for done in (1, 2):
        clock[0] += 1
        meter.report(done, 2, done)
    meter.close()
    assert stream.getvalue().count("\r\x1b[K") == 2
    assert stream.getvalue().endswith("left\n")
    assert stream.getvalue().count("\n") == 1
