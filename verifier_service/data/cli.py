"""The command line of `outrider data`: prompts and turns in, files out, on one engine here.

Whoever runs it on many engines takes the parser and what follows from its arguments from here.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protos.errors import ConfigError
from verifier_service.data.answers_file import read_answers
from verifier_service.data.chat import Chat
from verifier_service.data.compose import compose, load_templates, write_prompts
from verifier_service.data.conversations import Sampler
from verifier_service.data.engines import DTYPES, EngineChoice
from verifier_service.data.meter import Meter
from verifier_service.data.openings import Openings, default_openings, load_openings
from verifier_service.data.prompt_files import Prompts, read_prompts
from verifier_service.data.regenerate import Totals, regenerate
from verifier_service.data.synthesise import TurnsRun, synthesise
from verifier_service.data.turns_file import TurnRules
from verifier_service.model.embedded import ensure_target


@dataclass(frozen=True, slots=True)
class DataParser:
    """The parser, and the commands that need an engine."""

    parser: argparse.ArgumentParser
    regenerate: argparse.ArgumentParser
    synthesise: argparse.ArgumentParser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command here; the exit status."""
    return run_here(data_parser().parser.parse_args(argv))


def run_here(args: argparse.Namespace) -> int:
    """Run parsed arguments on an engine of this process."""
    run = {"compose": _compose, "synthesise": _synthesise}.get(args.command, _regenerate)
    return run(args)


def engine_choice(args: argparse.Namespace) -> EngineChoice:
    """The engine that the arguments ask for."""
    if args.batch < 1:
        raise ConfigError(f"--batch must be at least 1, not {args.batch}")
    return EngineChoice(
        args.target, args.batch, args.threads, args.dtype, args.device, args.max_context
    )


def sampler_of(args: argparse.Namespace) -> Sampler:
    """The sampling that the arguments ask for."""
    return Sampler(tuple(args.temperatures), args.top_k, args.max_new, args.seed)


def openings_of(args: argparse.Namespace) -> Openings:
    """The openings that the arguments ask for."""
    if args.seed_words == "none":
        return Openings((), args.seed)
    path = default_openings() if args.seed_words is None else Path(args.seed_words)
    return Openings(load_openings(path), args.seed)


def rules_of(args: argparse.Namespace) -> TurnRules:
    """Which turns the arguments let pass."""
    return TurnRules(args.min_words, args.distinct_words)


def say_answers(out: Path, totals: Totals, prompts: Prompts) -> None:
    """The summary of a finished answers file."""
    print(f"{out}: {totals.num_records} records of {totals.num_conversations} conversations")
    if prompts.num_repeated:
        print(f"left out: {prompts.num_repeated} repeated")
    for skips in (prompts.skips, totals.skips):
        if len(skips):
            print(f"skipped: {skips.describe()}")


def say_turns(run: TurnsRun) -> None:
    """The summary of a finished turns file."""
    refused = ", ".join(f"{n} {why}" for why, n in run.file.skips.counts.items())
    print(f"{run.out}: {len(run.file)} turns" + (f"; refused: {refused}" if refused else ""))


def _regenerate(args: argparse.Namespace) -> int:
    choice, sampler = engine_choice(args), sampler_of(args)
    prompts = read_prompts(args.prompts, args.limit)
    chat, engine = Chat(choice.directory()), choice.build()
    meter = Meter("conversations")
    totals = regenerate(
        engine, chat, prompts.conversations, sampler, args.out, 2 * args.batch, meter.report
    )
    engine.close()
    meter.close()
    say_answers(args.out, totals, prompts)
    return 0


def _synthesise(args: argparse.Namespace) -> int:
    choice, sampler, openings = engine_choice(args), sampler_of(args), openings_of(args)
    chat, engine = Chat(choice.directory()), choice.build()
    facts = engine.target.facts
    ends = frozenset(facts.eos_token_ids)
    run = TurnsRun(args.out, chat, ends, facts.digest, sampler, openings, rules_of(args))
    meter = Meter("turns")
    synthesise(engine, run, chat, sampler, openings, args.count, 2 * args.batch, meter.report)
    engine.close()
    meter.close()
    say_turns(run)
    return 0


def _compose(args: argparse.Namespace) -> int:
    chat = Chat(ensure_target(args.target))
    answers = [answer for path in args.texts for answer in read_answers(path)[1]]
    texts = [chat.text(answer.answer_ids).strip() for answer in answers]
    prompts = compose(load_templates(args.templates), dict(args.count), texts, args.seed)
    write_prompts(prompts, args.out)
    print(f"{args.out}: {len(prompts)} prompts")
    return 0


def data_parser() -> DataParser:
    """The parser of `outrider data`."""
    parser = argparse.ArgumentParser(
        prog="outrider data", description="Training data that the target writes itself."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    answers = commands.add_parser(
        "regenerate", aliases=["answer"], help="the target answers prompts; resumes"
    )
    answers.add_argument(
        "prompts",
        type=Path,
        nargs="+",
        help="JSONL or JSON with q, turns, messages or ShareGPT's conversations",
    )
    answers.add_argument("--limit", type=int, default=None, help="conversations to answer")
    turns = commands.add_parser("synthesise", help="the target writes user turns; resumes")
    turns.add_argument("--count", type=int, required=True, help="turns the file shall hold")
    turns.add_argument(
        "--seed-words",
        metavar="FILE",
        help="how turns begin, one a line; `none`: freely (default: configs/train/seed_words.txt)",
    )
    turns.add_argument("--min-words", type=int, default=3, help="of a turn that is taken")
    turns.add_argument(
        "--distinct-words", type=int, default=8, help="turns that share so many are the same"
    )
    _add_compose(commands.add_parser("compose", help="prompts from templates and own texts"))
    _add_engine(answers, 256, "0,0,0.7,1")
    _add_engine(turns, 192, "0.8,1,1.2")
    return DataParser(parser, answers, turns)


def _add_compose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("templates", type=Path, help="YAML with lists and templates")
    parser.add_argument(
        "--count", type=_count, nargs="+", required=True, help="kind=number, one or more"
    )
    parser.add_argument(
        "--texts", type=Path, nargs="*", default=[], help="answers files that fill {text}"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="embedded", help="directory, or `embedded`")
    parser.add_argument("--seed", type=int, default=0)


def _add_engine(parser: argparse.ArgumentParser, max_new: int, temperatures: str) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="embedded", help="directory, or `embedded`")
    parser.add_argument("--max-new", type=int, default=max_new, help="tokens of an answer or turn")
    parser.add_argument(
        "--temperatures", type=_temperatures, default=temperatures, help="taken in turn"
    )
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help="requests at once")
    parser.add_argument("--max-context", type=int, help="tokens of prompt and answer")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


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
