"""Ctrl-C as a wish: the first one is noted and heeded between two updates, the second one kills.

Knows no run. Invariant: what handled the signals before handles them again afterwards.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_wish() -> Iterator[threading.Event]:
    """An event that SIGINT or SIGTERM sets.

    Python hands signals to the main thread alone; elsewhere nothing sets the event.
    """
    wish = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        wish.set()

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
