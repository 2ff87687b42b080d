"""Jobs come back in their order, and one that takes long does not empty the batch behind it."""

from collections import deque

import pytest

from protos.errors import OutriderError
from protos.generation import FinishReason, TokenRun
from protos.params import SamplingParams
from verifier_service.data.writer import Ask, Job, run_in_order

PARAMS = SamplingParams()


class _Engine:
    """Gives each request as many tokens as its prompt's first id, one a step, `batch` at once."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.waiting: deque = deque()
        self.running: list[list] = []
        self.num_running: list[int] = []

    def submit(self, request, emit) -> int:
        self.waiting.append([request.prompt_ids[0], emit])
        return 0

    def step(self) -> bool:
        while self.waiting and len(self.running) < self.batch:
            self.running.append(self.waiting.popleft())
        self.num_running.append(len(self.running))
        for entry in list(self.running):
            entry[0] -= 1
            ended = FinishReason.STOP if entry[0] == 0 else None
            if ended:
                self.running.remove(entry)
            entry[1](TokenRun("id", (7,), finish_reason=ended))
        return True


def _job(*lengths: int) -> Job[int]:
    total = 0
    for length in lengths:
        ids = yield Ask((length,), PARAMS)
        total += len(ids)
    return total


def test_results_come_in_order_whatever_ends_first():
    jobs = [_job(5), _job(1), _job(2, 2), _job(), _job(1)]
    assert list(run_in_order(_Engine(2), iter(jobs), 3)) == [5, 1, 4, 0, 1]


def test_a_long_conversation_leaves_the_batch_full():
    engine = _Engine(4)
    jobs = [_job(*[5] * 10), *[_job(5) for _ in range(60)]]
    assert sum(run_in_order(engine, iter(jobs), 8)) == 350
    assert engine.num_running[:60] == [4] * 60


def test_finished_results_that_wait_are_bounded():
    begun = []

    def jobs():
        for number in range(500):
            begun.append(number)
            yield _job(400 if number == 0 else 1)

    results = run_in_order(_Engine(4), jobs(), 4)
    assert next(results) == 400
    assert len(begun) <= 4 * 16 + 1


def test_a_request_that_the_engine_gives_up_ends_the_run():
    class Failing(_Engine):
        def step(self) -> bool:
            self.waiting.popleft()[1](
                TokenRun("id", (), finish_reason=FinishReason.ERROR, error="broken")
            )
            return True

    with pytest.raises(OutriderError, match="broken"):
        list(run_in_order(Failing(1), iter([_job(3)]), 1))
