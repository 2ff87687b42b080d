"""A soak: mixed load with random cancels on a whole cluster, then a look at what is left.

Question: is memory flat on both services, and is every place, page and session given back, after
minutes of chats, completions, several choices, schemas, log probabilities, long prompts, refused
bodies, short deadlines and clients that leave at any moment? Memory is compared between the second
quarter and the last one: caches (grammars, prefixes, allocators' pools) fill in the first.

    python -m tests.benchmarks.soak --minutes 15 [--json FILE]

Exits with 1 when something is left, an answer was an error nobody asked for, or memory grew by more
than GROWTH.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from cluster.tools.bench_prompts import read_questions
from cluster.tools.bench_server import resident_mb, started
from cluster.tools.client import AsyncOutriderClient

HERE = Path(__file__).resolve().parent
GROWTH: Final = 0.05
_IDLE_S: Final = 60.0
_WATCHED: Final = (
    "vllm:num_requests_running",
    "outrider_verifier_num_running",
    "outrider_verifier_num_waiting",
    "outrider_verifier_num_draft_sessions",
)
_SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Soak:
    """The load: workers that never stop, and what they met."""

    def __init__(self, url: str, questions: Sequence[str], seed: int, until: float) -> None:
        self._url = url
        self._questions = questions
        self._rng = random.Random(seed)
        self._until = until
        self.met: Counter[str] = Counter()

    async def run(self, num_workers: int) -> None:
        """Work until the time is up."""
        async with httpx.AsyncClient(base_url=self._url, timeout=300.0) as http:
            await asyncio.gather(*(self._work(http) for _ in range(num_workers)))

    async def _work(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self._until:
            kind, path, body = self._next()
            if self._rng.random() < 0.3:
                await self._leave(http, kind, path, body)
            elif body.get("stream"):
                await self._read(http, kind, path, body)
            else:
                response = await http.post(path, json=body)
                self._note(kind, response.status_code)

    def _next(self) -> tuple[str, str, dict[str, Any]]:
        rng = self._rng
        question = rng.choice(self._questions)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": rng.choice([4, 24, 60]),
            "temperature": rng.choice([0.0, 0.0, 0.8, 1.0]),
            "stream": rng.random() < 0.6,
            "speculation": {"mode": rng.choice(["auto", "auto", "auto", "off"])},
        }
        kind = rng.choice(
            ["chat", "chat", "choices", "schema", "logprobs", "long", "deadline", "refused", "text"]
        )
        if kind == "choices":
            body["n"] = 2
        elif kind == "schema":
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": _SCHEMA},
            }
        elif kind == "logprobs":
            body |= {"logprobs": True, "top_logprobs": 3, "presence_penalty": 0.5}
        elif kind == "long":
            body["messages"][0]["content"] = question + " again" * rng.randrange(200, 1200)
        elif kind == "deadline":
            body["timeout_s"] = rng.choice([0.05, 0.5])
        elif kind == "refused":
            body["temperature"] = -1
        elif kind == "text":
            del body["messages"]
            return kind, "/v1/completions", body | {"prompt": question[:400], "stop": ["\n\n"]}
        return kind, "/v1/chat/completions", body

    async def _read(
        self, http: httpx.AsyncClient, kind: str, path: str, body: dict[str, Any]
    ) -> None:
        last = ""
        async with http.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                last = line or last
        ended = response.status_code if response.status_code != 200 else last == "data: [DONE]"
        self._note(kind, 200 if ended is True else int(ended))

    async def _leave(
        self, http: httpx.AsyncClient, kind: str, path: str, body: dict[str, Any]
    ) -> None:
        """Begin, and go away after a random while or a random number of events."""

        async def begin() -> None:
            async with http.stream("POST", path, json=body | {"stream": True}) as response:
                left = self._rng.randrange(6)
                async for _ in response.aiter_lines():
                    left -= 1
                    if left < 0:
                        return

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(begin(), self._rng.choice([0.02, 0.2, 1.0, 3.0]))
        self.met["left"] += 1

    def _note(self, kind: str, status: int) -> None:
        expected = {"refused": {400}, "deadline": {200, 504}, "long": {200, 400}}
        fine = status in expected.get(kind, {200}) or status == 503
        self.met[f"{kind} {status}" if fine else f"FAULT {kind} {status}"] += 1


async def _soak(url: str, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    questions = [question.text for question in read_questions(given.prompts)]
    began = time.monotonic()
    soak = Soak(url, questions, given.seed, began + 60.0 * given.minutes)
    memory: list[dict[str, float]] = []

    async def watch() -> None:
        while True:
            sums = {name: sum(sizes) for name, sizes in (resident_mb(pid) or {}).items()}
            memory.append({"s": round(time.monotonic() - began)} | sums)
            print(memory[-1], dict(soak.met), file=sys.stderr, flush=True)
            await asyncio.sleep(given.every_s)

    watcher = asyncio.create_task(watch())
    await soak.run(given.workers)
    watcher.cancel()
    left = await _left(url)
    return {
        "minutes": given.minutes,
        "workers": given.workers,
        "met": dict(sorted(soak.met.items())),
        "left": left,
        "memory_mb": memory,
        "growth": _growth(memory),
    }


async def _left(url: str) -> dict[str, float]:
    """What is still held when all have left, after at most _IDLE_S; pages not free among it."""
    async with AsyncOutriderClient(url) as client:
        until = time.monotonic() + _IDLE_S
        while True:
            held = still_held(await client.statistics())
            if not any(held.values()) or time.monotonic() > until:
                return held
            await asyncio.sleep(1.0)


def still_held(now: dict[str, float]) -> dict[str, float]:
    """Gauges that are to come to zero, by name. One that is not told is held: nobody knows."""
    held = {f"{name} is not told": 1.0 for name in _WATCHED if not _told(now, name)}
    held |= {
        name: value
        for name, value in now.items()
        if name.startswith(_WATCHED) or ("session" in name and "total" not in name)
    }
    pages = _sum(now, "outrider_verifier_num_pages")
    held["pages not free"] = pages - _sum(now, "outrider_verifier_num_free_pages")
    return held


def _told(values: dict[str, float], name: str) -> bool:
    return any(key.partition("{")[0] == name for key in values)


def _sum(values: dict[str, float], name: str) -> float:
    return sum(value for key, value in values.items() if key.partition("{")[0] == name)


def _growth(memory: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each deployment: the last quarter's median over the second quarter's, less 1."""
    quarter = len(memory) // 4
    names = set.intersection(*(set(sizes) for sizes in memory)) - {"s"}
    return {
        name: round(
            statistics.median(sizes[name] for sizes in memory[-quarter:])
            / statistics.median(sizes[name] for sizes in memory[quarter : 2 * quarter])
            - 1.0,
            4,
        )
        for name in sorted(names)
        if quarter
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was met and what was left."""
    given = _parser().parse_args(argv)
    with started(given.config, given.port) as (url, pid):
        found = asyncio.run(_soak(url, pid, given))
    text = json.dumps(found, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")
    faults = any(name.startswith("FAULT") for name in found["met"])
    grown = any(value > GROWTH for value in found["growth"].values())
    return int(faults or grown or any(found["left"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, help="cluster to start; default: the embedded one")
    parser.add_argument("--prompts", type=Path, default=HERE / "spec_bench_48.jsonl")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--every-s", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
