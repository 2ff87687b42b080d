"""Ctrl-C ends a training after the update in hand; the same command goes on from there."""

import os
import signal
import threading
import time

import pytest

from drafter_service.training.cli import main
from drafter_service.training.facts_file import read_facts
from drafter_service.training.run_log import read_run_log
from drafter_service.training.stopping import stop_wish
from tests.tiny_training import tiny_training

TIMEOUT_S = 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with stop_wish() as wish:
        assert not wish.is_set()
        signal.raise_signal(number)
        assert wish.is_set()
        assert signal.getsignal(number) == signal.SIG_DFL
    assert signal.getsignal(number) == before


def test_outside_the_main_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with stop_wish() as wish:
            seen.append((signal.getsignal(signal.SIGINT), wish.is_set()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_a_stopped_training_is_saved_and_exports_nothing(tmp_path, capsys):
    config = str(tiny_training(tmp_path, epochs=1_000_000, num_records=8))
    command = ["eagle3", "--config", config, "--output", str(tmp_path / "head")]
    log = tmp_path / "run" / "log.jsonl"

    def interrupt_when_it_runs() -> None:
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            if log.exists() and "rates" in log.read_text():
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=interrupt_when_it_runs)
    thread.start()
    assert main(command) == 130
    thread.join()
    last = read_run_log(log).reports[-1].update
    assert f"stopped after update {last}; the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "head").exists()
    assert main([*command, "--set", f"epochs={(last + 2) / 2}", "--set", "threads=1"]) == 0
    starts = read_facts(tmp_path / "head")["starts"]
    assert [start["from"]["update"] for start in starts] == [0, last]
