"""`outrider train --workers`: one run in several processes on real Ray, hard to kill.

The tiny target is in float32, so that sums over workers differ from one worker's by rounding only.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from drafter_service.training.cli import main
from drafter_service.training.run_log import read_run_log
from tests.e2e.live import wait_for
from tests.tiny_training import tiny_training

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
WORKER_TITLE = "ray::RayTrainWorker"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of a short run, with the target's states recorded."""
    root = tmp_path_factory.mktemp("training")
    path = tiny_training(root, compute_dtype="float32", epochs=3)
    assert main(["eagle3", "--config", str(path), "--stage", "features"]) == 0
    return path


def train_there(config: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    """Two workers on a cluster of their own."""
    words = ["train", "eagle3", "--config", str(config), "--set", f"run={run}", "--stage", "train"]
    words += ["--workers", "2", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.tools.cli", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train_workers(command: subprocess.Popen[str]) -> list[psutil.Process]:
    """Processes of training workers, by the titles that Ray gives them."""
    found = []
    for process in psutil.Process(command.pid).children(recursive=True):
        try:
            if process.cmdline() and process.cmdline()[0].startswith(WORKER_TITLE):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def starts(run: Path) -> list[dict[str, object]]:
    """The log's lines that tell of a start."""
    path = run / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if "started" in line]


def test_two_workers_give_the_losses_of_one(config: Path, tmp_path: Path):
    there = train_there(config, tmp_path / "two")
    alone = ["eagle3", "--config", str(config), "--set", f"run={tmp_path / 'one'}"]
    try:
        assert main([*alone, "--stage", "train"]) == 0
        output = there.communicate(timeout=TIMEOUT_S)[0]
    finally:
        there.kill()
    assert there.returncode == 0, output
    assert "acceptance by step" in output
    one, two = (read_run_log(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    (expected,), (found,) = one.reports, two.reports
    assert len(expected.update_losses) >= 6
    assert found.update_losses == pytest.approx(expected.update_losses, rel=1e-5)
    assert found.rates == expected.rates
    assert starts(tmp_path / "two")[0]["workers"] == 2
    told = json.loads((tmp_path / "two" / "provenance.json").read_text())
    assert told["starts"][0]["hardware"]["workers"] == 2


def test_a_killed_worker_is_replaced_and_ctrl_c_saves_the_run(config: Path, tmp_path: Path):
    run = tmp_path / "run"
    endless = ("--set", "epochs=1000000", "--set", "checkpoint_every_s=0.1")
    there = train_there(config, run, *endless)
    try:
        wait_for((run / "state.safetensors").exists, "a first state is saved", TIMEOUT_S)
        train_workers(there)[-1].send_signal(signal.SIGKILL)
        wait_for(lambda: len(starts(run)) == 2, "the group has started again", TIMEOUT_S)
        workers = train_workers(there)
        assert len(workers) == 2
        there.send_signal(signal.SIGINT)
        output = there.communicate(timeout=TIMEOUT_S)[0]
    finally:
        there.kill()
    assert there.returncode == 130, output
    restart = starts(run)[1]
    assert restart["update"] > 0
    assert f"goes on after update {restart['update']}" in output
    reports = read_run_log(run / "log.jsonl").reports
    last = reports[-1].update
    assert f"stopped after update {last}; the same command goes on" in output
    assert sum(len(report.update_losses) for report in reports) == last
    assert not any(worker.is_running() for worker in workers)
    assert os.path.getsize(run / "state.safetensors") > 0
