"""The door of `outrider bench acceptance` and `outrider bench serve`."""

from collections.abc import Sequence

from protos.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the first word names; the exit status."""
    what, rest = (argv[0], argv[1:]) if argv else ("", argv)
    if what == "acceptance":
        from cluster.tools import bench_acceptance

        return bench_acceptance.main(rest)
    if what == "serve":
        from cluster.tools import bench_serve

        return bench_serve.main(rest)
    raise ConfigError(f"bench knows acceptance and serve, not {what!r}")
