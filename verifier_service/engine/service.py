"""The engine's thread and the one bridge between it and an event loop.

Callers see `async for run in service.generate(request)`; the loop sees only finished token runs.
Knows no wire. Invariants: a caller who leaves cancels its request within a step; an engine that
dies ends every stream with an error instead of leaving it hanging.
"""

import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from protos.errors import OutriderError, PeerUnavailable
from protos.generation import GenerationRequest, TokenRun
from verifier_service.engine.loop import Engine
from verifier_service.engine.stats import EngineStats
from verifier_service.step import TargetFacts

_log = logging.getLogger(__name__)

_IDLE_S: Final = 0.5
_SWITCH_INTERVAL_S: Final = 0.0005
"""How long the event loop may hold the interpreter while the engine wants it; Python's 5 ms would
be a sixth of a step."""

_Runs = asyncio.Queue[TokenRun | None]
"""Runs as they come; None when what was waited for beside them is over."""


class EngineService:
    """Runs one engine on a thread of its own and streams its answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread: threading.Thread | None = None
        self._is_stopping = threading.Event()
        self._failure: str | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @property
    def facts(self) -> TargetFacts:
        """What is served."""
        return self._engine.target.facts

    @property
    def max_context(self) -> int:
        """Tokens that prompt and output may have together."""
        return self._engine.max_context

    @property
    def takes_grammar(self) -> bool:
        """Whether requests may carry a grammar."""
        return self._engine.intake.takes_grammar

    @property
    def failure(self) -> str | None:
        """Why the engine died, or None while it lives."""
        return self._failure

    @property
    def refusal(self) -> str | None:
        """Why nobody is let in any more, or None while requests are welcome."""
        return self._engine.intake.refusal

    def start(self) -> None:
        """Start stepping. Thread counts are set by whoever loads the target."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def drain(self, limit_s: float) -> bool:
        """Let nobody in any more and wait until everybody is through, at most `limit_s` seconds.

        True when everybody is. `stop` comes next, and ends whoever is left.
        """
        self._engine.intake.refuse("the verifier is shutting down")
        return await asyncio.to_thread(self._engine.intake.wait_until_empty, limit_s)

    def stop(self) -> None:
        """Finish the step under way, end all streams with an error, close the drafters."""
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        # Not cancelled: whoever still waits for the compiler is refused, and goes elsewhere.
        self._compiling.shutdown(wait=False)

    def stats(self) -> EngineStats:
        """Counts and sums so far."""
        return self._engine.stats()

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequest or ContextTooLong unless the request can be served."""
        self._engine.check(request)

    @property
    def silent_s(self) -> float:
        """How long the engine has made no step with work present; 0 without work."""
        stats = self.stats()
        has_work = stats.num_running + stats.num_waiting > 0
        return time.monotonic() - stats.last_step_s if has_work else 0.0

    async def generate(
        self, request: GenerationRequest, beat_s: float | None = None
    ) -> AsyncGenerator[TokenRun, None]:
        """Token runs of a request, the last with finish_reason and counts.

        beat_s: give a run without tokens so often, as long as the engine steps. Who waits can then
        tell a full engine from one that hangs.
        Raises InvalidRequest, ContextTooLong, Overloaded, PeerUnavailable or, where a grammar took
        all its time, DeadlineExceeded before the first run with tokens.
        Leaving the iteration early (break, cancellation) cancels the request within a step.
        """
        loop = asyncio.get_running_loop()
        runs: _Runs = asyncio.Queue()

        def emit(run: TokenRun) -> None:
            # RuntimeError: the caller's loop is closed, so nobody is left to be told.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(runs.put_nowait, run)

        beat: asyncio.TimerHandle | None = None

        def beat_again() -> None:
            nonlocal beat
            assert beat_s is not None
            if self.silent_s < beat_s:
                runs.put_nowait(TokenRun(request.request_id, ()))
            beat = loop.call_later(beat_s, beat_again)

        if beat_s is not None:
            beat = loop.call_later(beat_s, beat_again)
        key: int | None = None
        try:
            if request.options.grammar is not None:
                # Neither this loop nor the engine waits for a compiler; one works at a time.
                began_s = loop.time()
                async with contextlib.aclosing(self._until_prepared(request, runs)) as beats:
                    async for sign in beats:
                        yield sign
                request = request.after(loop.time() - began_s)
            key = self._engine.submit(request, emit)
            while (run := await runs.get()) is not None:
                is_last = run.finish_reason is not None
                if is_last:
                    key = None  # gone already: nothing is left to cancel
                yield run
                if is_last:
                    return
        finally:
            if beat is not None:
                beat.cancel()
            if key is not None:
                self._engine.cancel(key)

    async def _until_prepared(
        self, request: GenerationRequest, runs: _Runs
    ) -> AsyncGenerator[TokenRun, None]:
        """What comes in `runs`, until the request's grammar is at hand. Raises as `_prepare`."""
        preparing = asyncio.create_task(self._prepare(request))
        preparing.add_done_callback(lambda _: runs.put_nowait(None))
        try:
            while (run := await runs.get()) is not None:
                yield run
            await preparing
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def _prepare(self, request: GenerationRequest) -> None:
        """Return when the request's grammar is at hand; it has a place of the queue meanwhile.

        Raises what `Intake.preparing` and `Intake.prepare` raise; DeadlineExceeded when its turn
        comes too late.
        """
        with self._engine.intake.preparing():
            try:
                preparing = self._compiling.submit(self._engine.intake.prepare, request)
            except RuntimeError as error:  # the service was stopped
                raise PeerUnavailable(self.refusal or "the verifier is shutting down") from error
            try:
                await asyncio.wait_for(asyncio.wrap_future(preparing), request.timeout_s)
            except TimeoutError:
                request.after(math.inf)
                raise

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                if not self._engine.step():
                    self._engine.intake.wait(_IDLE_S)
        except Exception as error:
            # The edge of the engine's thread: nobody else would ever see this.
            _log.exception("the engine died")
            known = isinstance(error, OutriderError)
            self._failure = str(error) if known else "the verifier's engine failed"
            self._engine.fail_all(self._failure)
        self._engine.close()
