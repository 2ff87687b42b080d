"""Runs heavy work on a thread that ends with it, so that its OpenMP workers go too.

OpenMP keeps a pool of workers for every thread that ever computed. With more of them in a process
than cores, GNU's runtime hardly spins between parallel regions, idle pools or not, and a step of a
few hundred regions takes half as long again (measured: 21 ms, 34 beside one idle pool). A thread
of the default executor never ends; the engine's thread must be the only one that keeps a pool.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_passing_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work(...)` returns or raises, from a thread of its own."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loading") as executor:
        return await loop.run_in_executor(executor, functools.partial(work, *args, **kwargs))
