"""The engine's door: what other threads may do to it, behind one lock.

Checks requests, numbers them, holds the queue limit, and keeps entries until the engine's thread
drains them. Knows nothing of steps. Invariant: a request that was let in is answered: drained, or
handed back by `close` to be failed.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protos.errors import ContextTooLong, InvalidRequest, Overloaded, PeerUnavailable
from protos.generation import GenerationRequest
from protos.grammar import GRAMMAR_PARAM
from verifier_service.engine.request import Emit, Ends, RunningRequest
from verifier_service.grammar.compiling import Grammars


class Intake:
    """Submissions and cancellations on their way to the engine's thread."""

    def __init__(
        self,
        vocab_size: int,
        ends: Ends,
        max_active: int,
        clock: Callable[[], float],
        grammars: Grammars | None = None,
    ) -> None:
        """max_active: requests that may be in at once. clock: seconds, for their deadlines.

        grammars: None where requests may carry none."""
        self._vocab_size = vocab_size
        self._ends = ends
        self._max_active = max_active
        self._clock = clock
        self._grammars = grammars
        self._keys = itertools.count(1)
        self._entries: deque[RunningRequest | int] = deque()
        lock = threading.Lock()
        self._condition = threading.Condition(lock)
        self._is_empty = threading.Condition(lock)
        self._num_active = 0
        self._num_preparing = 0
        self._closed_because: str | None = None

    @property
    def num_active(self) -> int:
        """Requests let in and not yet gone."""
        return self._num_active

    @property
    def refusal(self) -> str | None:
        """Why nobody is let in any more, or None."""
        return self._closed_because

    @property
    def takes_grammar(self) -> bool:
        """Whether requests may carry a grammar."""
        return self._grammars is not None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A place of the queue for as long as a request waits to be prepared.

        Raises Overloaded when full; PeerUnavailable after `refuse` or `close`.
        """
        with self._condition:
            self._require_room()
            self._num_preparing += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_preparing -= 1

    def prepare(self, request: GenerationRequest) -> None:
        """Do beforehand what may take long: compile the request's grammar.

        Raises what `check` raises; PeerUnavailable after `refuse` or `close`.
        """
        if self._closed_because is not None:
            raise PeerUnavailable(self._closed_because)
        self.check(request)
        if request.options.grammar is not None and self._grammars is not None:
            self._grammars.compile(request.options.grammar)

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequest or ContextTooLong unless the request can be served."""
        max_context = self._ends.max_context
        if not request.prompt_ids:
            raise InvalidRequest("the prompt must hold at least one token", "prompt")
        for name, ids in (("prompt", request.prompt_ids), ("output_ids", request.output_ids)):
            wrong = next((token for token in ids if not 0 <= token < self._vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"token ids are 0 to {self._vocab_size - 1}, not {wrong}", name
                )
        self._check_options(request)
        num_prompt = len(request.prompt_ids)
        if num_prompt >= max_context:
            raise ContextTooLong(
                f"the prompt has {num_prompt} tokens; prompt and answer together may have "
                f"{max_context}",
                "prompt",
            )
        if num_prompt + len(request.output_ids) > max_context:
            raise ContextTooLong(
                f"prompt and committed output exceed {max_context} tokens", "output_ids"
            )

    def _check_options(self, request: GenerationRequest) -> None:
        stops, options = request.params.stop_token_ids, request.options
        wrong = next((token for token in stops if token >= self._vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"stop_token_ids: token ids are 0 to {self._vocab_size - 1}, not {wrong}",
                "stop_token_ids",
            )
        options.check_ids(self._vocab_size)
        end_ids = self._ends.eos_token_ids | frozenset(stops)
        options.check_ends(request.params.max_tokens, end_ids, self._vocab_size)
        if options.grammar is None:
            return
        if self._grammars is None:
            raise InvalidRequest("this verifier takes no grammar", GRAMMAR_PARAM)
        allowed = options.allowed_token_ids
        if allowed and self._ends.eos_token_ids.isdisjoint(allowed):
            raise InvalidRequest(
                "allowed_token_ids: a text with a grammar needs an end-of-sequence id to end",
                "allowed_token_ids",
            )

    def submit(self, request: GenerationRequest, emit: Emit) -> int:
        """Let a request in; returns its key.

        Raises what `check` raises; Overloaded when full; PeerUnavailable after `refuse` or `close`.
        """
        self.check(request)
        # Looked at twice: building takes a while, which who is refused anyway shall not cost, and
        # nobody is counted before, because a grammar may refuse the output that came along.
        with self._condition:
            self._require_room()
        now = self._clock()
        key = next(self._keys)
        entry = RunningRequest(key, request, self._ends, emit, now, self._grammars)
        with self._condition:
            self._require_room()
            self._num_active += 1
            self._entries.append(entry)
            self._condition.notify()
        return key

    def _require_room(self) -> None:
        """Under the lock. Who waits to be prepared has a place of the queue as well."""
        if self._closed_because is not None:
            raise PeerUnavailable(self._closed_because)
        num_inside = self._num_active + self._num_preparing
        if num_inside >= self._max_active:
            raise Overloaded(f"{num_inside} requests are running or queued already")

    def cancel(self, key: int) -> None:
        """Ask for the end of a request, whether or not it is still there."""
        with self._condition:
            self._entries.append(key)
            self._condition.notify()

    def drain(self) -> list[RunningRequest | int]:
        """Entries since the last drain, in order: requests, and keys to cancel."""
        with self._condition:
            entries = list(self._entries)
            self._entries.clear()
        return entries

    def count_left(self) -> None:
        """One request that was let in is gone."""
        with self._condition:
            self._num_active -= 1
            if self._num_active == 0:
                self._is_empty.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Block until there is an entry to drain, or the time is over."""
        with self._condition:
            if not self._entries:
                self._condition.wait(timeout_s)

    def refuse(self, because: str) -> None:
        """Let nobody in any more; who is in stays. The first reason is the one that is told."""
        with self._condition:
            self._closed_because = self._closed_because or because

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Block until everybody has left, or the time is over; True when everybody has."""
        with self._condition:
            return self._is_empty.wait_for(lambda: self._num_active == 0, timeout_s)

    def close(self, because: str) -> list[RunningRequest]:
        """Let nobody in any more; returns the requests that were not drained yet."""
        self.refuse(because)
        with self._condition:
            left = [entry for entry in self._entries if isinstance(entry, RunningRequest)]
            self._entries.clear()
        return left
