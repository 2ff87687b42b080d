"""`outrider explain`: the rounds of one request, out of the traces that verifiers wrote.

Prints every round's tree, what was accepted, and where the milliseconds went; without a request
the ids that were recorded. Needs no running cluster, and torch for one thing only: a `--tokenizer`
that comes as GGUF, `embedded` included, is written as a directory first where none was kept yet.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.fleet.assembly import resolve_target
from protos.errors import ConfigError
from verifier_service.trace.as_json import story_json
from verifier_service.trace.drawing import LEGEND, draw_parts, draw_sums, heading
from verifier_service.trace.reading import TraceFolder
from verifier_service.trace.story import Story


def main(argv: Sequence[str]) -> int:
    """Explain one request; the exit status."""
    args = _parser().parse_args(argv)
    try:
        return _explain(args)
    except BrokenPipeError:  # `| head`: nobody reads on, and the exit must not flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _explain(args: argparse.Namespace) -> int:
    folder = TraceFolder(args.traces)
    if args.request is None:
        for request_id in folder.ids:
            print(request_id if request_id.isprintable() else repr(request_id))
        _print_notes(folder)
        return 0
    first, last = _rounds(args.rounds)
    found = folder.find(args.request)
    stories = [story for request_id in found for story in folder.stories(request_id)]
    if args.json:
        print(json.dumps([story_json(story) for story in stories], indent=1))
    else:
        name = _token_name(args.tokenizer)
        for story in stories:
            lost = folder.lost_steps(story)
            _print_story(story, name, (first, last), is_short=args.summary, num_lost=lost)
    _print_notes(folder)
    return 0


def _print_story(
    story: Story,
    name: Callable[[int], str],
    rounds: tuple[int, int],
    *,
    is_short: bool,
    num_lost: int,
) -> None:
    for line in heading(story):
        print(line)
    if num_lost:
        print(f"  {num_lost} steps of this verifier could not be recorded")
    if not is_short:
        if story.rounds:
            print(f"\n{LEGEND}")
        for line in draw_parts(story, name, *rounds):
            print(line)
    print()
    for line in draw_sums(story):
        print(line)
    print(flush=True)


def _print_notes(folder: TraceFolder) -> None:
    for note in folder.notes:
        print(f"outrider: {note}", file=sys.stderr)


def _rounds(text: str) -> tuple[int, int]:
    """`3`, `3-7`, `3-`. Raises ConfigError."""
    first, dash, last = text.partition("-")
    try:
        begin = int(first) if first else 1
        end = int(last) if last else (sys.maxsize if dash else begin)
    except ValueError as error:
        raise ConfigError(f"--rounds takes numbers like 3, 3-7 or 3-, not {text!r}") from error
    return begin, end


def _token_name(tokenizer: str | None) -> Callable[[int], str]:
    """How a token is shown: as quoted text, or its id without a tokenizer. Raises ConfigError."""
    if tokenizer is None:
        return str
    from cluster.http.text import load_text

    bytes_of = load_text(resolve_target(tokenizer)).bytes_of

    def name(token_id: int) -> str:
        # What cannot be printed is escaped: a token may be anything a model was trained on.
        return repr(bytes_of(token_id).shown)

    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("outrider explain", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "request", nargs="?", help="id of a reply or request, or how it begins; none: list ids"
    )
    parser.add_argument(
        "--traces", type=Path, required=True, help="the folder that verifier.traces.dir names"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="directory of the target, or `embedded`: show text. Where `embedded` never ran, "
        "unpacking it takes seconds, and torch",
    )
    parser.add_argument("--rounds", default="1-", metavar="A-B", help="only these rounds")
    parser.add_argument("--summary", action="store_true", help="no rounds, only the sums")
    parser.add_argument("--json", action="store_true", help="everything, for machines")
    return parser
