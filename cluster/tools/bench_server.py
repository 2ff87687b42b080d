"""A server for benchmarks: started, watched and stopped as its own process.

Knows the names that Ray gives to replicas' processes and the names of /metrics. Memory is null
where psutil is not installed.
"""

import contextlib
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cluster.tools.client import OutriderClient
from protos.errors import PeerUnavailable

_START_S: Final = 300.0
_STOP_S: Final = 90.0
_PREFIX: Final = "outrider_verifier"


@contextlib.contextmanager
def started(config: Path | None, port: int) -> Iterator[tuple[str, int]]:
    """`outrider serve` on `port`; yields its URL and process id. Raises: PeerUnavailable."""
    words = [sys.executable, "-m", "cluster.tools.cli", "serve"]
    words += [str(config)] if config is not None else []
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*words, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, process)
            yield url, process.pid
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_S
    with OutriderClient(url) as client:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise PeerUnavailable(f"the server ended with status {process.returncode}")
            if client.is_healthy():
                return
            time.sleep(0.5)
    raise PeerUnavailable(f"the server was not ready within {_START_S:.0f} s")


def resident_mb(root_pid: int) -> dict[str, list[float]] | None:
    """Resident memory of every replica below `root_pid`, by deployment, in MB (10^6 bytes)."""
    if importlib.util.find_spec("psutil") is None:
        return None
    import psutil  # type: ignore[import-untyped]  # ships no types

    found: dict[str, list[float]] = {}
    for process in psutil.Process(root_pid).children(recursive=True):
        try:
            words = process.cmdline()
            title = words[0] if words else ""
            if title.startswith("ray::ServeReplica:"):
                name = title.split(":")[4].split(".")[0].split(" ")[0]
                found.setdefault(name, []).append(round(process.memory_info().rss / 1e6, 1))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def round_split(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, object]:
    """Where a step's time went between two looks at /metrics, in milliseconds.

    wait: the step was held for drafts; other: all that is neither wait nor verify. draft and wire
    are per reply of each remote drafter: inside it, and between the services both ways.
    """
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    steps = grown.get(f"{_PREFIX}_num_steps_total", 0.0)
    if not steps:
        return {}
    wait_s = grown.get(f"{_PREFIX}_draft_wait_s_total", 0.0)
    verify_s = grown.get(f"{_PREFIX}_verify_s_total", 0.0)
    step_s = grown.get(f"{_PREFIX}_step_s_total", 0.0)
    split: dict[str, object] = {
        "steps": steps,
        "step_ms": 1e3 * step_s / steps,
        "wait_ms": 1e3 * wait_s / steps,
        "verify_ms": 1e3 * verify_s / steps,
        "other_ms": 1e3 * (step_s - wait_s - verify_s) / steps,
        "drafters": {},
    }
    drafters: dict[str, dict[str, float]] = {}
    for source in _sources(grown):
        timed = _exchange(grown, "timed", source)
        if timed:
            reply_s = _exchange(grown, "reply_s", source)
            drafter_s = _exchange(grown, "drafter_s", source)
            drafters[source] = {
                "replies": timed,
                "draft_ms": 1e3 * drafter_s / timed,
                "wire_ms": 1e3 * (reply_s - drafter_s) / timed,
                "in_time": _exchange(grown, "in_time", source),
                "late": _exchange(grown, "late", source),
            }
    split["drafters"] = drafters
    return split


def _sources(values: Mapping[str, float]) -> list[str]:
    start = f'{_PREFIX}_exchange_timed_total{{source="'
    return [name[len(start) : -2] for name in values if name.startswith(start)]


def _exchange(values: Mapping[str, float], name: str, source: str) -> float:
    return values.get(f'{_PREFIX}_exchange_{name}_total{{source="{source}"}}', 0.0)
