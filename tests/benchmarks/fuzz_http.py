"""Does the HTTP face keep to its OpenAPI document under random bodies?

A long run, by hand, of what `tests/unit/cluster/test_openapi.py` does briefly: the face in process
over a fake backend, no model, no sockets. Whatever it finds is a fault.

    python -m tests.benchmarks.fuzz_http --examples 2000 --seed 7
"""

import argparse
import tempfile
import time
from pathlib import Path

from cluster.http.ingress import Front, FrontSettings
from cluster.http.text import load_text
from tests.tiny import byte_tokenizer
from tests.unit.cluster.http_fakes import VOCAB, FakeBackend, answering
from tests.unit.cluster.openapi_fuzz import fuzz


def main() -> int:
    """Print the checks made and the faults found; 1 when there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=500, help="Random bodies an endpoint.")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer(VOCAB).save_pretrained(folder)
        backend = FakeBackend(answering([70, 71, 72], 2))
        settings = FrontSettings(("tiny",), keys=("k1",))
        app = Front(backend, load_text(Path(folder)), settings).app()
        began = time.perf_counter()
        found = fuzz(app, "k1", given.examples, given.seed)
    for name, count in sorted(found.num_checks.items()):
        print(f"{name:32} {count:8}")
    for fault in found.faults:
        print(fault)
    print(f"{len(found.faults)} faults in {time.perf_counter() - began:.0f} s")
    return 1 if found.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
