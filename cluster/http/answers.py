"""One answer on its way to a user: runs of ids become deltas of text, and counts become usage.

Pure: knows neither HTTP nor Ray. The engine counts what it computed; this counts what was
*delivered*: after a text-level end the tokens behind the cut are in no count here.
"""

import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace

from cluster.http.logprobs import ShownToken, TokenWriter
from cluster.http.text import TextStream
from protos.errors import DeadlineExceeded, PeerUnavailable
from protos.generation import FinishReason, RunCounts, TokenRun


@dataclass(frozen=True, slots=True)
class Delta:
    """What one run added. finish: OpenAI's finish_reason, on the last delta only.

    tokens: with their log probabilities, when asked for; an echoed prompt's come first.
    """

    index: int
    text: str
    ids: tuple[int, ...]
    finish: str | None = None
    stop_reason: str | int | None = None
    tokens: tuple[ShownToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is shown before its answer."""

    text: str
    ids: tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """Delivered counts and sums of one answer; seconds."""

    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_accepted: int = 0
    num_drafted: int = 0
    num_rounds: int = 0
    num_draft_rounds: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    queue_s: float = 0.0
    prefill_s: float = 0.0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def add(self, other: "Tally") -> None:
        """Sum in another answer of the same call; choices of one prompt count it once."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                mine.extend([0] * (len(theirs) - len(mine)))
                for i, n in enumerate(theirs):
                    mine[i] += n
            elif isinstance(mine, dict):
                for source, n in theirs.items():
                    mine[source] = mine.get(source, 0) + n
            elif name in ("first_token_s", "total_s"):
                setattr(self, name, max(mine, theirs))
            else:
                setattr(self, name, mine + theirs)


class Answer:
    """The state of one answer. After `done` no run is taken.

    writer: shows log probabilities. echo: shown with the first delta. num_prompt: counted as this
    answer's own. shows_stop_token: a stop token that ends the answer is part of its text.
    named_ids: the caller's own stop ids; no other id is told as the reason of an end.
    """

    def __init__(
        self,
        index: int,
        num_prompt: int,
        stream: TextStream,
        writer: TokenWriter | None = None,
        echo: Echo | None = None,
        shows_stop_token: bool = False,
        named_ids: Container[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.index = index
        self.tally = Tally(num_prompt=num_prompt)
        self.finish: str | None = None
        self._stream = stream
        self._writer = writer
        self._echo = echo
        self._shows_stop_token = shows_stop_token
        self._named_ids = named_ids
        self._clock = clock
        self._start = clock()

    @property
    def done(self) -> bool:
        """True after the last run, or a text-level end."""
        return self.finish is not None

    def feed(self, run: TokenRun) -> Delta:
        """Take one run; the delta may be empty of text.

        Raises: PeerUnavailable when the run says that the engine failed, DeadlineExceeded when it
        says that the time is over.
        """
        if run.finish_reason is FinishReason.DEADLINE:
            raise DeadlineExceeded(run.error or "the request's time is over")
        if run.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise PeerUnavailable("the engine ended this request early")
        shown, stop_id = run.ids, run.stop_token_id
        if stop_id is not None and shown[-1:] == (stop_id,) and not self._shows_stop_token:
            shown = shown[:-1]
        piece = self._stream.push(shown)
        used = run.ids if piece.stop is None else run.ids[: piece.num_tokens]
        text, stop = piece.text, piece.stop
        if stop is None and run.finish_reason is not None:
            tail = self._stream.finish()
            text, stop = text + tail.text, tail.stop
        self._count(run, len(used))
        delta = self._opened(Delta(self.index, text, used, tokens=self._shown(run, used)))
        if stop is not None:
            return self._end(delta, "stop", stop)
        if run.finish_reason is None:
            return delta
        named = stop_id if stop_id in self._named_ids else None
        return self._end(delta, run.finish_reason.value, named)

    def _opened(self, delta: Delta) -> Delta:
        """The first delta begins with the echoed prompt."""
        echo, self._echo = self._echo, None
        return delta if echo is None else replace(delta, text=echo.text + delta.text)

    def _shown(self, run: TokenRun, used: tuple[int, ...]) -> tuple[ShownToken, ...]:
        if self._writer is None:
            return ()
        given = run.logprobs[: len(used)]
        if len(given) != len(used):
            raise PeerUnavailable("the verifier left out log probabilities")
        if self._echo is None:
            return self._writer.write(used, given)
        if len(run.prompt_logprobs) != len(self._echo.ids) - 1:
            raise PeerUnavailable("the verifier left out log probabilities of the prompt")
        before = (None, *run.prompt_logprobs)
        return self._writer.write((*self._echo.ids, *used), (*before, *given))

    def _end(self, delta: Delta, finish: str, reason: str | int | None) -> Delta:
        self.finish = finish
        self.tally.total_s = self._clock() - self._start
        return replace(delta, finish=finish, stop_reason=reason)

    def _count(self, run: TokenRun, num_used: int) -> None:
        tally = self.tally
        accepted = min(run.num_accepted, num_used)
        if num_used and not tally.num_output:
            tally.first_token_s = self._clock() - self._start
        tally.num_output += num_used
        tally.num_rounds += 1
        tally.num_accepted += accepted
        depths = tally.accepted_by_depth
        depths.extend([0] * (accepted - len(depths)))
        for depth in range(accepted):
            depths[depth] += 1
        if run.counts is not None:
            self._copy(run.counts)

    def _copy(self, counts: RunCounts) -> None:
        tally = self.tally
        # Choices that do not count their prompt do not count what was found of it either.
        tally.num_cached = min(counts.num_cached, tally.num_prompt)
        tally.num_drafted = counts.num_drafted
        tally.num_draft_rounds = counts.num_draft_rounds
        tally.accepted_by_source = dict(counts.accepted_by_source)
        tally.queue_s = counts.queue_s
        tally.prefill_s = counts.prefill_s
        tally.draft_wait_s = counts.draft_wait_s
        tally.verify_s = counts.verify_s
