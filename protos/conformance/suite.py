"""Runs every claim against one drafter server and says which hold. Knows no claim's content."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protos.conformance import claims_limits, claims_prefix, claims_rows
from protos.conformance.bench import Bench, Skipped
from protos.conformance.link import Broken, Link
from protos.errors import OutriderError

Claim = Callable[[Bench], None]

CLAIMS: tuple[Claim, ...] = (*claims_prefix.CLAIMS, *claims_rows.CLAIMS, *claims_limits.CLAIMS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """holds None: the claim does not concern this drafter. reason: why it does not hold."""

    name: str
    claim: str
    holds: bool | None
    reason: str = ""


def verdicts(address: str, token: str = "") -> Iterator[Verdict]:
    """One verdict per claim, each with a verifier of its own.

    Raises OutriderError when the drafter does not even describe itself.
    """
    link = Link(address, token)
    try:
        link.describe()
        for claim in CLAIMS:
            yield judge(claim, link)
    finally:
        link.close()


def judge(claim: Claim, link: Link) -> Verdict:
    """One claim, by a verifier that nobody else is."""
    name, text = claim.__name__, (claim.__doc__ or "").strip()
    bench: Bench | None = None
    try:
        bench = Bench(link)
        claim(bench)
    except Skipped as why:
        return Verdict(name, text, None, str(why))
    except Broken as why:
        return Verdict(name, text, False, str(why))
    except OutriderError as error:
        return Verdict(name, text, False, f"{type(error).__name__}: {error}")
    finally:
        if bench is not None:
            bench.leave()
    return Verdict(name, text, True)
