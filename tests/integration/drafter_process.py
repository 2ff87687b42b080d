"""Real drafter processes for tests: `python -m drafter_service`, killed for certain in the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import torch
import yaml

from drafter_service.checkpoint.writer import write_eagle3
from drafter_service.eagle3.config import Eagle3Config, Rope
from drafter_service.eagle3.head import Eagle3Head
from protos import drafting_pb2_grpc as rpc
from protos.channel import Security, call_metadata, make_channel
from protos.describe_codec import decode_description, encode_describe_request
from protos.exchange import DrafterLoad

START_LIMIT_S = 90.0


def write_tiny_head(path: Path, hidden: int = 64, vocab: int = 384, layers: int = 3) -> Path:
    """A random EAGLE-3 head for `tiny_llama_dir`: real in every way but its quality."""
    config = Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=hidden,
        aux_layers=tuple(range(layers)),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=2 * hidden,
        rope=Rope(theta=10_000.0),
        norm_eps=1e-5,
        vocab_size=vocab,
        draft_vocab_size=vocab // 2,
    )
    torch.manual_seed(0)
    head = Eagle3Head(config, torch.arange(0, vocab, 2))
    write_eagle3(path, head, "tiny", torch.float32)
    return path


class DrafterProcess:
    """One drafter process and its address."""

    def __init__(self, folder: Path, token: str, **settings: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._security = Security(token=token)
        ready = folder / "ready"
        ready.unlink(missing_ok=True)
        config = folder / "drafter.yaml"
        config.write_text(yaml.safe_dump({"listen": "127.0.0.1:0", "drain_s": 0.0, **settings}))
        self._log = (folder / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drafter_service", "--config", config, "--ready-file", ready],
            env=os.environ | {"OUTRIDER_TOKEN": token, "OMP_NUM_THREADS": "1"},
            stdout=self._log,
            stderr=self._log,
        )
        end = time.monotonic() + START_LIMIT_S
        while not ready.exists():
            assert self.process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, "the drafter did not start"
            time.sleep(0.02)
        self.address = ready.read_text().strip()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def send(self, number: signal.Signals) -> None:
        """Signal the process."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(10)
        self._log.close()

    def load(self) -> DrafterLoad:
        """What the drafter says of its load."""
        with make_channel(self.address, self._security) as channel:
            response = rpc.DrafterStub(channel).Describe(
                encode_describe_request(),
                metadata=call_metadata(self._security),
                timeout=10,
            )
        return decode_description(response)[1]

    def refuses_strangers(self) -> bool:
        """A call without the token is UNAUTHENTICATED."""
        with make_channel(self.address, Security()) as channel:
            try:
                rpc.DrafterStub(channel).Describe(encode_describe_request(), timeout=10)
            except grpc.RpcError as error:
                return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
        return False


class Drafters:
    """One process per kind, started when first wanted; starting takes seconds."""

    def __init__(
        self, folder: Path, token: str, settings_of: Callable[[str], dict[str, object]]
    ) -> None:
        self._folder = folder
        self._token = token
        self._settings_of = settings_of
        self._running: dict[str, DrafterProcess] = {}

    def get(self, kind: str) -> DrafterProcess:
        """The running process."""
        if kind not in self._running:
            settings = self._settings_of(kind)
            self._running[kind] = DrafterProcess(self._folder / kind, self._token, **settings)
        return self._running[kind]

    def kill(self, kind: str) -> None:
        """SIGKILL it; the next `get` starts another one."""
        self._running.pop(kind).kill()

    def close(self) -> None:
        """Kill whatever runs."""
        for kind in list(self._running):
            self.kill(kind)
