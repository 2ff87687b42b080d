"""The door of `outrider bench acceptance` and `outrider bench serve`."""

import os
from collections.abc import Sequence

from protos.errors import ConfigError
from verifier_service.config import THREAD_WAITING


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the first word names; the exit status."""
    for name, value in THREAD_WAITING.items():  # read when torch is first loaded
        os.environ.setdefault(name, value)
    what, rest = (argv[0], argv[1:]) if argv else ("", argv)
    if what == "acceptance":
        from cluster.tools import bench_acceptance

        return bench_acceptance.main(rest)
    if what == "serve":
        from cluster.tools import bench_serve

        return bench_serve.main(rest)
    raise ConfigError(f"bench knows acceptance and serve, not {what!r}")
