"""The credit bank: what speculation may cost, at most, because of what it gained.

Knows no drafters. An account holds (1 + share) x plain time of all committed tokens, minus the
time they really took, plus a small grant. Invariant: a step whose worst case (nothing accepted)
exceeds the balance is never allowed, so time never passes (1 + share) x plain time + the grant,
up to the error of the cost model (reference/disagg.md 2.4).
"""

from dataclasses import dataclass
from typing import Final

_CAP_STEPS: Final = 40.0


@dataclass(slots=True)
class _Account:
    balance_s: float = 0.0


class CreditBank:
    """One account for the whole process, one per request; a request may borrow from the whole.

    share: extra time allowed without any gain. grant_steps: plain steps given to begin with;
    without it nothing that costs could ever be tried. loan_steps: what one request may lose of
    what others gained.
    """

    def __init__(self, share: float, grant_steps: float = 2.0, loan_steps: float = 4.0) -> None:
        self._share = share
        self._grant_steps = grant_steps
        self._loan_steps = loan_steps
        self._overall = _Account()
        self._accounts: dict[int, _Account] = {}

    def may_spend_s(self, plain_s: float) -> float:
        """What a step may cost beyond a plain one, should nothing be accepted."""
        balance = self._overall.balance_s + self._grant_steps * plain_s
        return max(balance, 0.0) + self._share * plain_s

    def request_may_spend_s(self, key: int, plain_s: float) -> float:
        """The same for one request: its own balance and a limited loan from the whole."""
        own = self._accounts.get(key, _Account()).balance_s
        whole = max(self._overall.balance_s, 0.0) + self._grant_steps * plain_s
        return max(own + min(whole, self._loan_steps * plain_s), 0.0) + self._share * plain_s

    def settle(self, committed: dict[int, int], plain_s: float, elapsed_s: float) -> None:
        """Book a step: tokens committed by each request that may speculate, and its time."""
        if not committed:
            return
        mean = sum(committed.values()) / len(committed)
        self._book(self._overall, mean, plain_s, elapsed_s)
        for key, count in committed.items():
            self._book(self._accounts.setdefault(key, _Account()), count, plain_s, elapsed_s)

    def forget(self, key: int) -> None:
        """The request left; its gain stays in the whole."""
        self._accounts.pop(key, None)

    @property
    def balance_s(self) -> float:
        """Gained and not spent, over all requests."""
        return self._overall.balance_s

    def _book(self, account: _Account, tokens: float, plain_s: float, elapsed_s: float) -> None:
        account.balance_s += (1.0 + self._share) * tokens * plain_s - elapsed_s
        account.balance_s = min(account.balance_s, _CAP_STEPS * plain_s)
