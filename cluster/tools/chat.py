"""`outrider chat`: one question to a running server, streamed, with its speed at the end."""

import sys
import time

from cluster.tools.calls import Chunk, Options
from cluster.tools.client import OutriderClient


def run_chat(message: str, *, url: str, api_key: str | None, options: Options) -> int:
    """Print the answer as it comes, then tokens a second and acceptance; the exit status.

    Raises: OutriderError.
    """
    first_s = last_s = time.perf_counter()
    is_first = True
    tail = Chunk()
    with OutriderClient(url, api_key) as client:
        for chunk in client.stream_chat(message, **options):
            if chunk.usage is not None:
                tail = chunk
                continue
            last_s = time.perf_counter()
            first_s = last_s if is_first else first_s
            is_first = False
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    print()
    print(summary(tail, last_s - first_s), file=sys.stderr)
    return 0


def summary(tail: Chunk, decode_s: float) -> str:
    """One line: tokens, rate, and how much of it was drafted."""
    usage = tail.usage
    if usage is None:
        return "no usage reported"
    parts = [f"{usage.num_output} tokens"]
    if decode_s > 0 and usage.num_output > 1:
        parts.append(f"{(usage.num_output - 1) / decode_s:.1f} tokens/s")
    block = tail.metrics.get("speculative_decoding") or {}
    drafted = usage.num_accepted + usage.num_rejected
    if drafted:
        rounds = block.get("num_rounds") or 0
        per_round = f", {usage.num_output / rounds:.2f} a round" if rounds else ""
        rate = usage.num_accepted / drafted
        parts.append(f"{usage.num_accepted} of {drafted} drafted accepted ({rate:.0%}){per_round}")
    else:
        parts.append("nothing drafted")
    return ", ".join(parts)
