"""The command line of `outrider data`: builds an engine, shows progress, writes files.

Answering runs without drafters: full batches leave the target nothing to gain from them.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from protos.errors import ConfigError
from verifier_service.data.answer import answer_all
from verifier_service.data.answers_file import read_answers
from verifier_service.data.chat import Chat
from verifier_service.data.compose import compose, load_templates, write_prompts
from verifier_service.data.conversations import Sampler, read_conversations
from verifier_service.data.synthesise import synthesise
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange
from verifier_service.engine.loop import Engine
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.embedded import ensure_embedded_target
from verifier_service.model.load import load_target

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    args = _parser().parse_args(argv)
    directory = ensure_embedded_target() if args.target == "embedded" else Path(args.target)
    chat = Chat(directory)
    if args.command == "compose":
        return _compose(args, chat)
    sampler = Sampler(tuple(args.temperatures), args.top_k, args.max_new, args.seed)
    if args.command == "answer":
        conversations = read_conversations(args.prompts, args.limit)
        engine = build_engine(directory, args.batch, args.threads, args.dtype)
        meter = Meter("conversations")
        total = answer_all(
            engine, chat, conversations, sampler, args.out, 2 * args.batch, meter.report
        )
    else:
        engine = build_engine(directory, args.batch, args.threads, args.dtype)
        meter = Meter("turns")
        total = synthesise(
            engine, chat, sampler, args.count, args.out, 2 * args.batch, meter.report
        )
    engine.close()
    meter.close()
    print(f"{args.out}: {total} {'records' if args.command == 'answer' else 'turns'}")
    return 0


def _compose(args: argparse.Namespace, chat: Chat) -> int:
    answers = [answer for path in args.texts for answer in read_answers(path)[1]]
    texts = [chat.text(answer.answer_ids).strip() for answer in answers]
    prompts = compose(load_templates(args.templates), dict(args.count), texts, args.seed)
    write_prompts(prompts, args.out)
    print(f"{args.out}: {len(prompts)} prompts")
    return 0


def build_engine(directory: Path, batch: int, threads: int | None, dtype: str) -> Engine:
    """An engine without drafters that runs `batch` requests at once."""
    target = load_target(directory, _DTYPES[dtype], num_threads=threads)
    facts = target.facts
    settings = EngineSettings(
        num_slots=batch * min(facts.max_context, 2048),
        max_running=batch,
        max_tokens_per_step=max(512, batch),
        max_queued=4 * batch,
    )
    rows = PagedRows(target)
    end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, {})
    return Engine(target, DraftExchange(end, rows), StaticPlanner(()), settings, rows)


class Meter:
    """Progress on stderr: done, rate, time left; a line that is rewritten on a terminal."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._began_s = time.monotonic()
        self._first: int | None = None
        self._shown_s = 0.0

    def report(self, done: int, total: int, num_tokens: int) -> None:
        """Show the state, at most once a second (every ten without a terminal)."""
        now = time.monotonic()
        if self._first is None:
            self._first = done - 1
        terminal = sys.stderr.isatty()
        if done < total and now - self._shown_s < (1.0 if terminal else 10.0):
            return
        self._shown_s = now
        elapsed = max(now - self._began_s, 1e-6)
        left_s = elapsed / (done - self._first) * (total - done)
        line = (
            f"{done}/{total} {self._unit}  {num_tokens / elapsed:.0f} tokens/s  "
            f"{int(left_s // 60)} min {int(left_s % 60)} s left"
        )
        print(
            f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr
        )

    def close(self) -> None:
        """End the line."""
        if sys.stderr.isatty() and self._shown_s:
            print(file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    answer = commands.add_parser("answer", help="the target answers prompts")
    answer.add_argument("prompts", type=Path, help="JSONL with q, turns or messages")
    answer.add_argument("--limit", type=int, default=None, help="conversations to answer")
    own = commands.add_parser("synthesise", help="the target writes user turns of its own")
    own.add_argument("--count", type=int, required=True, help="turns the file shall hold")
    made = commands.add_parser("compose", help="prompts from templates and the target's own texts")
    made.add_argument("templates", type=Path, help="YAML with lists and templates")
    made.add_argument(
        "--count", type=_count, nargs="+", required=True, help="kind=number, one or more"
    )
    made.add_argument(
        "--texts", type=Path, nargs="*", default=[], help="answers files that fill {text}"
    )
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--target", default="embedded", help="directory, or `embedded`")
    made.add_argument("--seed", type=int, default=0)
    for command, max_new, temperatures in ((answer, 256, "0,0,0.7,1"), (own, 192, "1")):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--target", default="embedded", help="directory, or `embedded`")
        command.add_argument("--max-new", type=int, default=max_new)
        command.add_argument("--temperatures", type=_temperatures, default=temperatures)
        command.add_argument("--top-k", type=int, default=64)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--batch", type=int, default=16, help="requests at once")
        command.add_argument("--threads", type=int, default=None)
        command.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16")
    return parser


def _count(text: str) -> tuple[str, int]:
    kind, _, number = text.partition("=")
    if not kind or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"a count is kind=number, not {text!r}")
    return kind, int(number)


def _temperatures(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"temperatures are numbers between commas, not {text!r}") from error
    if not all(0.0 <= value <= 2.0 for value in values):
        raise ConfigError(f"temperatures lie between 0 and 2, not {text!r}")
    return values
