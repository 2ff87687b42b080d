"""`python -m verifier_service`: one verifier behind gRPC, without Ray.

Prints one line with the bound address when it is ready, and writes it to --ready-file if given.
SIGTERM and SIGINT drain: new requests are refused, running ones get `drain_s` to finish. A second
signal ends them at once.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from protos.address import join_address, split_address
from protos.errors import OutriderError
from verifier_service.config import (
    THREAD_WAITING,
    VerifierSettings,
    load_settings,
    parse_settings,
)

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "OUTRIDER_TOKEN"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    options = _parser().parse_args(argv)
    try:
        settings = _settings(options)
        asyncio.run(_serve(settings, options.ready_file))
    except OutriderError as error:
        logger.error("%s", error)
        return 2
    return 0


async def _serve(settings: VerifierSettings, ready_file: Path | None) -> None:
    host, port = split_address(settings.listen)
    # Read when torch is first imported, which is below.
    for name, value in THREAD_WAITING.items():
        os.environ.setdefault(name, value)
    from verifier_service.build import build_verifier, security_of
    from verifier_service.metrics import snapshot
    from verifier_service.server import GenerationServer
    from verifier_service.threads import in_passing_thread

    parts = await in_passing_thread(build_verifier, settings)
    parts.service.start()
    server = GenerationServer(parts.service, security_of(settings), host, port)
    try:
        bound = await server.start()
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, stopped.set)
        _announce(join_address(host, bound), ready_file)
        await stopped.wait()
        stopped.clear()
        await _either(parts.service.drain(settings.drain_s), stopped.wait())
    finally:
        await asyncio.to_thread(parts.service.stop)
        await server.stop()
    logger.info("stopped: %s", snapshot(parts.service.stats(), parts.exchange.counts()))


async def _either(*waits: Coroutine[Any, Any, bool]) -> None:
    """Until the first of them is over."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _announce(address: str, ready_file: Path | None) -> None:
    if ready_file is not None:
        # Renamed into place, so that who waits for the file never reads half of it.
        part = ready_file.with_name(ready_file.name + ".part")
        part.write_text(address + "\n", encoding="utf-8")
        part.replace(ready_file)
    sys.stdout.write(f"verifier ready on {address}\n")
    sys.stdout.flush()


def _settings(options: argparse.Namespace) -> VerifierSettings:
    """File first, then options, then the token out of the environment."""
    names = ("target", "dtype", "device", "num_threads", "planner", "listen", "insecure")
    given = {n: v for n in names if (v := getattr(options, n)) is not None}
    if options.drafter:
        given["drafters"] = [_drafter(text) for text in options.drafter]
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        given["token"] = token
    if options.config is not None:
        return load_settings(options.config, given)
    return parse_settings(given)


def _drafter(text: str) -> dict[str, str]:
    """NAME=HOST:PORT, or NAME=HOST:PORT=CHECKPOINT."""
    name, _, rest = text.partition("=")
    address, _, checkpoint = rest.partition("=")
    return {"name": name, "address": address, "checkpoint": checkpoint}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("verifier_service", description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML file; options below win over it")
    parser.add_argument("--target", help="directory of the target, or `embedded`")
    parser.add_argument("--dtype")
    parser.add_argument("--device", help="auto, cpu or cuda")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--planner")
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="NAME=HOST:PORT[=CHECKPOINT]",
        help="a drafter to ask; may be given several times",
    )
    parser.add_argument("--listen", help="host:port; port 0 takes a free one")
    parser.add_argument("--insecure", action="store_true", default=None)
    parser.add_argument("--ready-file", type=Path, help="the address is written here when ready")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
