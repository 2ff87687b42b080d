"""The command line, `outrider`: starts a cluster, talks to one, and dispatches to the services.

Only dispatches: heavy imports happen inside the branch that was chosen, so that `outrider --help`
and `outrider chat` start at once.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from protos.errors import OutriderError

DISPATCH = {
    ("data",): "cluster.tools.data:main",
    ("manifest",): "cluster.tools.manifest:main",
    ("check",): "cluster.tools.check:main",
    ("explain",): "cluster.tools.explain:main",
    ("evaluate",): "cluster.tools.evaluate:main",
    ("conformance",): "protos.conformance.cli:main",
    ("convert",): "drafter_service.checkpoint.convert.cli:main",
    ("train",): "cluster.tools.train:main",
    ("plot",): "drafter_service.training.plots.cli:main",
    ("bench", "engine"): "verifier_service.bench:main",
    ("bench", "draft"): "drafter_service.bench:main",
    ("bench", "train"): "drafter_service.training.bench:main",
    ("bench", "acceptance"): "cluster.tools.bench:main",
    ("bench", "serve"): "cluster.tools.bench:main",
}
"""Commands whose arguments belong to a service: words -> module:function taking the argv."""

_ABOUT = {
    "data": "compose prompts, have a target write or answer turns",
    "manifest": "write a KubeRay RayService for a cluster file",
    "check": "test a target and a drafter's checkpoint as a pair",
    "explain": "show where a request's time went, out of recorded traces",
    "evaluate": "tau of drafters, replayed against recorded texts",
    "conformance": "hold a drafter server to PROTOCOL.md",
    "convert": "rewrite a checkpoint in another engine's layout",
    "train": "train a drafter for a target",
    "plot": "draw training runs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        for prefix, target in DISPATCH.items():
            if tuple(words[: len(prefix)]) == prefix:
                return _dispatch(target, prefix, words[len(prefix) :])
        args = _parser().parse_args(words)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(target: str, prefix: tuple[str, ...], rest: list[str]) -> int:
    module, _, function = target.partition(":")
    command = getattr(importlib.import_module(module), function)
    # cluster.tools.bench has two commands behind one door.
    words = [prefix[-1], *rest] if module == "cluster.tools.bench" else rest
    status = command(words)
    return int(status or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="start a cluster on this machine")
    serve.add_argument("config", nargs="?", type=Path, help="YAML; default: the embedded one")
    serve.add_argument("--host", help="listen here instead of what the file says")
    serve.add_argument("--port", type=int, help="listen here instead of what the file says")
    serve.add_argument("--dashboard", action="store_true", help="start Ray's dashboard too")
    serve.add_argument("--address", help="join this Ray cluster instead of starting one")
    serve.set_defaults(run=_serve)
    chat = commands.add_parser("chat", help="ask a running server; streams the answer")
    chat.add_argument("message", nargs="+")
    chat.add_argument("--url", default="http://127.0.0.1:8000")
    chat.add_argument("--api-key", default=None, help="or $OUTRIDER_API_KEY")
    chat.add_argument("--model", default=None)
    chat.add_argument("--max-tokens", type=int, default=256)
    chat.add_argument("--temperature", type=float, default=None)
    chat.add_argument("--seed", type=int, default=None)
    chat.add_argument("--speculation", default=None, help="auto, off, or a drafter's name")
    chat.set_defaults(run=_chat)
    validate = commands.add_parser("validate", help="check files; all faults at once")
    validate.add_argument("files", nargs="+", type=Path)
    validate.set_defaults(run=_validate)
    for words in DISPATCH:
        if len(words) == 1:
            commands.add_parser(words[0], help=_ABOUT[words[0]], add_help=False)
    for group in dict.fromkeys(words[0] for words in DISPATCH if len(words) > 1):
        names = [words[1] for words in DISPATCH if words[0] == group and len(words) > 1]
        commands.add_parser(group, help=" | ".join(names)).add_argument("what", choices=names)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from cluster.tools.serving import serve_forever

    return serve_forever(
        args.config,
        host=args.host,
        port=args.port,
        dashboard=args.dashboard,
        address=args.address,
    )


def _chat(args: argparse.Namespace) -> int:
    from cluster.tools.calls import Options, Speculation
    from cluster.tools.chat import run_chat

    options: Options = {"max_tokens": args.max_tokens}
    if args.model is not None:
        options["model"] = args.model
    if args.temperature is not None:
        options["temperature"] = args.temperature
    if args.seed is not None:
        options["seed"] = args.seed
    if args.speculation is not None:
        options["speculation"] = Speculation(mode=args.speculation)
    message = " ".join(args.message)
    key = args.api_key or os.environ.get("OUTRIDER_API_KEY")
    return run_chat(message, url=args.url, api_key=key, options=options)


def _validate(args: argparse.Namespace) -> int:
    from cluster.tools.validate import validate_files

    return validate_files(args.files)


if __name__ == "__main__":
    sys.exit(main())
