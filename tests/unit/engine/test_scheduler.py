"""Who takes part in a step: decode first, prompts in order, drafts last, the youngest gives way."""

from protos.generation import GenerationRequest
from tests.fakes import request, small_settings
from verifier_service.engine.page_pool import PagePool
from verifier_service.engine.request import Ends, RunningRequest
from verifier_service.engine.scheduler import Scheduler, Share

ENDS = Ends(512, frozenset())


class Bench:
    """A scheduler and requests whose progress is played by hand."""

    def __init__(self, num_pages: int = 64, **settings: int) -> None:
        self.settings = small_settings(**settings)
        self.pool = PagePool(num_pages, self.settings.page_size)
        self.scheduler = Scheduler(self.pool, self.settings)
        self._num = 0

    def add(self, prompt_len: int, max_tokens: int = 50) -> RunningRequest:
        self._num += 1
        given: GenerationRequest = request(str(self._num), range(prompt_len), max_tokens)
        one = RunningRequest(self._num, given, ENDS, lambda run: None, 0.0)
        self.scheduler.add(one)
        return one

    def step(self) -> dict[int, int]:
        """Rows by request key; then every share is computed and commits what it can."""
        shares = self.scheduler.share_rows()
        for share in shares:
            self.commit(share)
        return {share.request.key: share.num_rows for share in shares}

    def commit(self, share: Share) -> None:
        grows = share.commits
        share.request.computed_len += share.num_rows
        if grows:
            share.request.tokens.append(0)


def test_prompts_are_computed_in_chunks_in_order_of_arrival():
    bench = Bench(max_prefill_chunk=16, max_tokens_per_step=24)
    bench.add(20)
    bench.add(10)
    assert bench.step() == {1: 16, 2: 8}
    assert bench.step() == {1: 4, 2: 2}
    assert bench.step() == {1: 1, 2: 1}


def test_decoding_requests_get_their_row_before_any_prompt():
    bench = Bench(max_tokens_per_step=8, max_prefill_chunk=16, max_running=4)
    bench.add(2)
    bench.add(2)
    bench.step()
    bench.add(30)
    assert bench.step() == {1: 1, 2: 1, 3: 6}
    assert bench.step() == {1: 1, 2: 1, 3: 6}


def test_draft_nodes_get_what_the_budget_leaves():
    bench = Bench(max_tokens_per_step=10, max_running=4)
    bench.add(1)
    bench.step()
    bench.add(4)
    shares = bench.scheduler.share_rows()
    assert bench.scheduler.room_for_nodes(shares) == 5


def test_no_more_requests_run_than_allowed():
    bench = Bench(max_running=2)
    for _ in range(3):
        bench.add(3)
    assert bench.step() == {1: 3, 2: 3}
    bench.scheduler.remove(bench.scheduler.running[0])
    assert bench.step() == {2: 1, 3: 3}


def test_a_prompt_waits_for_pages_and_nobody_overtakes_it():
    bench = Bench(num_pages=8)
    bench.add(16)
    bench.add(20)
    bench.add(1)
    assert bench.step() == {1: 16}
    bench.scheduler.remove(bench.scheduler.running[0])
    assert bench.step() == {2: 16, 3: 1}


def test_the_youngest_gives_way_when_pages_run_out_and_comes_back_first():
    bench = Bench(num_pages=5)
    old = bench.add(8)
    young = bench.add(6)
    later = bench.add(1)
    # Rooms for 20 tokens: 8 + 6 now; the third waits for a spare page.
    assert bench.step() == {1: 8, 2: 6}
    steps = 0
    while young in bench.scheduler.running:
        bench.step()
        steps += 1
    assert steps < 10
    assert young.computed_len == 0
    assert young.tokens[6:], "its committed output stays"
    assert bench.scheduler.waiting == [young, later]
    assert old in bench.scheduler.running
    bench.scheduler.remove(old)
    assert bench.step() == {2: len(young.tokens) - (1 if young.computed_len else 0), 3: 1}


def test_pages_of_drafts_are_taken_back_before_anybody_is_preempted():
    bench = Bench(num_pages=6)
    first = bench.add(4)
    second = bench.add(4)
    bench.step()
    shares = bench.scheduler.share_rows()
    assert bench.scheduler.seat_nodes(first, 15) == 11, "only free pages are used"
    assert bench.pool.num_free == 0
    assert bench.scheduler.seat_nodes(second, 9) == 3, "drafts never evict"
    for share in shares:
        bench.commit(share)
    for _ in range(6):
        assert bench.step() == {1: 1, 2: 1}
    assert bench.scheduler.running == [first, second]


def test_the_oldest_alone_always_moves_on():
    bench = Bench(num_pages=4)
    one = bench.add(5, max_tokens=11)
    while one.remaining > 0:
        assert bench.step().get(1), "the oldest request must take part in every step"
