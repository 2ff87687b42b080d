"""Which drafters have been tested beside this target, and with what result.

Asked by the draft exchange when it meets a drafter: by a link's own thread for a remote one,
while starting for a local one, never by a thread that steps. A pair is tested once per (drafter
digest, target digest). A refused pair costs speed only: its source is not used.
"""

import logging
import random
import threading
from typing import Final

from protos.errors import IncompatiblePair
from protos.exchange import Capabilities
from verifier_service.engine.draft_form import TargetEnd, choose_form
from verifier_service.pairs.probe import MIN_AGREEMENT, Ask, PairScore, try_pair
from verifier_service.pairs.text import ReadText

_SESSION_BITS: Final = 64

logger = logging.getLogger(__name__)


class PairBook:
    """Implements the exchange's `PairExam`."""

    def __init__(
        self, text: ReadText, target: TargetEnd, min_agreement: float = MIN_AGREEMENT
    ) -> None:
        """min_agreement 0: any pair is used."""
        self._text = text
        self._target = target
        self._min_agreement = min_agreement
        self._scores: dict[str, PairScore] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._rng = random.SystemRandom()

    @property
    def scores(self) -> dict[str, PairScore]:
        """Scores by drafter digest."""
        return dict(self._scores)

    def trouble(self, capabilities: Capabilities, ask: Ask) -> str:
        """Why this drafter is not used; empty when it is.

        Asks it some hundred times when its digest was not met before. A drafter without a digest
        (it has no weights that could be the wrong ones) is not tested, nor one that fails or is
        full meanwhile: that says nothing about the pair. Waits only while another thread tests
        the same digest.
        """
        digest = capabilities.digest
        if not digest or self._min_agreement <= 0:
            return ""
        score = self._scores.get(digest)
        if score is None:
            with self._locks.setdefault(digest, threading.Lock()):
                # Looked up again: whoever held the lock may have settled it.
                score = self._scores.get(digest) or self._test(capabilities, ask)
                if score.is_decisive:
                    self._scores[digest] = score
        return score.trouble(self._min_agreement)

    def _test(self, capabilities: Capabilities, ask: Ask) -> PairScore:
        try:
            form = choose_form(capabilities, self._target)
        except IncompatiblePair as error:
            return PairScore(0, 0, 0, str(error))  # the exchange refuses it in its own words
        session_id = self._rng.getrandbits(_SESSION_BITS) or 1
        score = try_pair(self._text, form, capabilities, session_id, ask)
        logger.info(
            "drafter %s beside this target: %d of %d first guesses agree%s",
            capabilities.name or capabilities.kind,
            score.num_agreed,
            score.num_positions,
            f" (cut short: {score.detail})" if score.detail else "",
        )
        return score
