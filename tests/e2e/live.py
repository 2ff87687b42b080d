"""A running cluster for tests: `outrider serve` as a process, and what tests do to it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from cluster.tools.client import OutriderClient

START_TIMEOUT_S = 240.0


@dataclass
class LiveCluster:
    """A started server; `log` is what it printed."""

    url: str
    process: subprocess.Popen
    log: Path

    def client(self) -> OutriderClient:
        """A client of it."""
        return OutriderClient(self.url)

    def statistic(self, name: str) -> float:
        """One number of /metrics, 0 while it is absent."""
        return self.statistics().get(name, 0.0)

    def statistics(self) -> dict[str, float]:
        """All of /metrics."""
        with self.client() as client:
            return client.statistics()

    def replicas(self, deployment: str) -> set[int]:
        """Process ids of a deployment's replicas, by the titles that Ray gives them."""
        title = f"ray::ServeReplica:outrider:{deployment}"
        found = set()
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if process.cmdline() and process.cmdline()[0].startswith(title):
                    found.add(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def ray_address(self) -> str:
        """Where others join its Ray cluster, off the command line of its raylet."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            for word in words:
                if word.startswith("--gcs-address="):
                    return word.partition("=")[2]
        raise AssertionError("the server runs no raylet")

    def busiest(self, deployment: str, over_s: float = 0.3) -> int:
        """The replica that computes most just now: one that has requests, where any has."""
        processes = [psutil.Process(pid) for pid in self.replicas(deployment)]
        before = [process.cpu_times().user for process in processes]
        time.sleep(over_s)
        used = [p.cpu_times().user - start for p, start in zip(processes, before, strict=True)]
        return processes[used.index(max(used))].pid

    def stop(self) -> int:
        """Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=90)


def wait_for(claim: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until `claim()`; an AssertionError naming `what` after the timeout."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if claim():
            return
        time.sleep(0.2)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_cluster(
    config: dict, directory: Path, port: int, environment: dict[str, str] | None = None
) -> LiveCluster:
    """Start `outrider serve` on a free port and wait for its ready line."""
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(config | {"http": config.get("http", {}) | {"port": port}}))
    log = directory / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.tools.cli", "serve", str(path)],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=os.environ
            | {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5"}
            | (environment or {}),
        )
    live = LiveCluster(f"http://127.0.0.1:{port}", process, log)

    def ready() -> bool:
        text = log.read_text()
        assert process.poll() is None, f"the server ended:\n{text[-4000:]}"
        return "outrider: ready" in text

    try:
        wait_for(ready, "the server is ready", START_TIMEOUT_S)
    except AssertionError:
        process.kill()
        raise
    return live
