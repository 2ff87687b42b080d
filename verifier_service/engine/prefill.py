"""Which prompts get the rows that a step has for prompts.

Pure: knows how many rows each prompt under way still wants, oldest first, and nothing of requests.
The oldest has half of the budget to itself. The other half, and whatever the oldest leaves, goes
to whoever wants least, ties to the older one. So

    a short prompt     is through in a step or two, however long the one before it is;
    equal prompts      are computed one after the other, which ends each sooner than side by side;
    the oldest         moves on by half of every budget, whatever else comes: nobody starves, and
                       no clock or age has to be kept.

Invariant: no row of the budget is left while a prompt could still take it.
"""

from collections.abc import Sequence


def share_prefill(wanted: Sequence[int], budget: int, most: int) -> list[int]:
    """Rows for each prompt. wanted: rows left of each, oldest first; most: what one may take."""
    rows = [0] * len(wanted)
    oldest_half = [(0, -(-budget // 2))] if wanted else []
    shortest_first = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    for index, limit in [*oldest_half, *((index, budget) for index in shortest_first)]:
        given = min(min(wanted[index], most) - rows[index], limit, budget)
        rows[index] += given
        budget -= given
    return rows
