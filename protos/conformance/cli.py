"""`outrider conformance HOST:PORT`: PROTOCOL.md, claim by claim, against a drafter server.

A line per claim; exits with 1 when one does not hold, with 2 when the server cannot be asked. The
drafter should serve nobody else meanwhile: one claim fills it up.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from protos.conformance.suite import Verdict, verdicts
from protos.errors import OutriderError

TOKEN_VARIABLE = "OUTRIDER_TOKEN"
_WORDS = {True: "ok", False: "FAIL", None: "skip"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser("outrider conformance", description=__doc__.split("\n")[0])
    parser.add_argument("address", help="host:port of a drafter server")
    parser.add_argument("--token", default=None, help=f"its bearer token, or ${TOKEN_VARIABLE}")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    given = parser.parse_args(argv)
    token = given.token if given.token is not None else os.environ.get(TOKEN_VARIABLE, "")
    found: list[Verdict] = []
    try:
        for verdict in verdicts(given.address, token):
            found.append(verdict)
            reason = f": {verdict.reason}" if verdict.reason else ""
            print(f"{_WORDS[verdict.holds]:4}  {verdict.claim}{reason}", flush=True)
    except OutriderError as error:
        print(f"outrider conformance: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    counts = {word: sum(v.holds is holds for v in found) for holds, word in _WORDS.items()}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(v) for v in found], indent=1) + "\n")
    return 1 if counts["FAIL"] else 0
