"""Data runs on a real Ray cluster: two replicas, killed in the middle, write one engine's file."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verifier_service.data.cli import main

pytestmark = pytest.mark.timeout(600)

ENGINE = ["--dtype", "fp32", "--threads", "1", "--batch", "2", "--top-k", "0"]
CLUSTER = ["--replicas", "2", "--cpus-per-replica", "0.1", "--block", "2"]


def _start(words: list[str], log: Path) -> subprocess.Popen:
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "cluster.tools.cli", "data", *words],
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def _finish(process: subprocess.Popen, log: Path) -> str:
    status = process.wait(timeout=240)
    text = log.read_text()
    assert status == 0, text[-4000:]
    return text


def test_a_killed_job_ends_in_the_single_engines_file(live, tiny_target, tmp_path):
    chat = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "old"}] * 2
    entries = [{"id": "a", "conversations": chat}, {"q": ""}, {"q": "x" * 3000}]
    entries += [{"q": f"question {i}"} for i in range(9)]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(entries))
    alone, joined = tmp_path / "alone.msgpack", tmp_path / "joined.msgpack"
    words = ["regenerate", str(prompts), "--target", str(tiny_target), "--max-new", "24", *ENGINE]
    assert main([*words, "--out", str(alone)]) == 0

    words += ["--out", str(joined), "--address", live.ray_address(), *CLUSTER]
    log = tmp_path / "log.txt"
    process = _start(words, log)
    parts = Path(f"{joined}.parts")
    while process.poll() is None and not list(parts.glob("*.msgpack")):
        time.sleep(0.02)
    process.kill()
    process.wait()
    said = _finish(_start(words, log), log)
    assert joined.read_bytes() == alone.read_bytes()
    assert not parts.exists()
    assert "11 records of 11 conversations" in said
    assert "skipped: 1 empty (prompts.json line 1)" in said
    assert "skipped: 1 longer than the context (prompts.json line 1)" in said
    assert "11/11 conversations" in said


def test_a_job_that_has_enough_turns_stops_and_leaves_the_single_engines_file(
    live, tiny_target, tmp_path
):
    alone, joined = tmp_path / "alone.jsonl", tmp_path / "joined.jsonl"
    words = ["synthesise", "--target", str(tiny_target), "--count", "3", "--min-words", "1"]
    words += ["--max-new", "60", *ENGINE]
    assert main([*words, "--out", str(alone)]) == 0
    log = tmp_path / "log.txt"
    words += ["--out", str(joined), "--address", live.ray_address(), *CLUSTER]
    _finish(_start(words, log), log)
    assert joined.read_bytes() == alone.read_bytes()
    assert not Path(f"{joined}.parts").exists()
