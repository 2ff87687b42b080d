"""`python -m drafter_service`: one drafter behind gRPC, without Ray.

Prints one line with the bound address when it is ready, and writes it to --ready-file if given.
SIGTERM and SIGINT drain: sessions get `drain_s` to leave.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from drafter_service.build import build_drafter
from drafter_service.config import DrafterServerSettings, load_settings, parse_settings
from drafter_service.process import prepare_process
from drafter_service.server import DrafterServer
from protos.address import join_address, split_address
from protos.channel import Security, TlsFiles, trust
from protos.errors import OutriderError

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


async def _serve(settings: DrafterServerSettings, ready_file: Path | None) -> None:
    host, port = split_address(settings.listen)
    prepare_process(settings)
    drafter = build_drafter(settings)
    server = DrafterServer(drafter, security_of(settings), host, port, settings.limits.max_works)
    bound = await server.start()
    address = join_address(host, bound)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stopped.set)
    if ready_file is not None:
        # Renamed into place, so that who waits for the file never reads half of it.
        part = ready_file.with_name(ready_file.name + ".part")
        part.write_text(address + "\n", encoding="utf-8")
        part.replace(ready_file)
    sys.stdout.write(f"drafter ready on {address}\n")
    sys.stdout.flush()
    await stopped.wait()
    await server.stop(settings.drain_s)
    logger.info("stopped: %s", server.metrics())


def security_of(settings: DrafterServerSettings) -> Security:
    """Towards callers; without files of its own, Ray's. Raises ConfigError."""
    tls, own = settings.tls, None
    if tls is not None:
        own = TlsFiles(tls.authority, tls.certificate, tls.key)
    return trust(settings.token, own, os.environ, insecure=settings.insecure)


def _settings(options: argparse.Namespace) -> DrafterServerSettings:
    """File first, then options, then the token out of the environment."""
    names = ("kind", "name", "checkpoint", "target", "dtype", "num_threads", "listen", "insecure")
    given = {n: v for n in names if (v := getattr(options, n)) is not None}
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        given["token"] = token
    if options.config is not None:
        return load_settings(options.config, given)
    return parse_settings(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("drafter_service", description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML file; options below win over it")
    parser.add_argument("--kind")
    parser.add_argument("--name")
    parser.add_argument("--checkpoint", help="directory, or the name of a shipped head")
    parser.add_argument("--target", help="directory of the target")
    parser.add_argument("--dtype")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--listen", help="host:port; port 0 takes a free one")
    parser.add_argument("--insecure", action="store_true", default=None)
    parser.add_argument("--ready-file", type=Path, help="the address is written here when ready")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
