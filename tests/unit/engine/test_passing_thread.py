"""Heavy work leaves no thread behind, whose OpenMP workers would slow every later step."""

import asyncio
import threading

import pytest

from verifier_service.threads import in_passing_thread


def test_work_runs_on_a_thread_that_is_gone_afterwards():
    ran_on = asyncio.run(in_passing_thread(threading.current_thread))
    assert ran_on is not threading.main_thread()
    assert not ran_on.is_alive()


def test_what_work_raises_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_passing_thread(divmod, 1, 0))
