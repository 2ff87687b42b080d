"""Who takes part in a step: decode first, prompts in order, drafts last, the youngest gives way."""

from protos.generation import GenerationRequest
from tests.fakes import request, small_settings
from verifier_service.engine.page_pool import PagePool
from verifier_service.engine.prefix_cache import PrefixCache
from verifier_service.engine.request import Ends, RunningRequest
from verifier_service.engine.scheduler import Scheduler, Share

ENDS = Ends(512, frozenset())


class Bench:
    """A scheduler and requests whose progress is played by hand."""

    def __init__(self, num_pages: int = 64, **settings: int) -> None:
        self.settings = small_settings(**settings)
        self.pool = PagePool(num_pages, self.settings.page_size)
        self.scheduler = Scheduler(self.pool, PrefixCache(self.pool, "t"), self.settings)
        self._num = 0

    def add(
        self, prompt_len: int, max_tokens: int = 50, first: int | None = None
    ) -> RunningRequest:
        """first: the first token; by default no two prompts share a beginning."""
        self._num += 1
        first = 1000 * self._num if first is None else first
        prompt = range(first, first + prompt_len)
        given: GenerationRequest = request(str(self._num), prompt, max_tokens)
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
        self.scheduler.publish(share.request)


def test_equal_prompts_are_computed_in_chunks_in_order_of_arrival():
    bench = Bench(max_prefill_chunk=16, max_tokens_per_step=24)
    for _ in range(3):
        bench.add(20)
    assert bench.step() == {1: 16, 2: 8}
    assert bench.step() == {1: 4, 2: 12, 3: 8}
    assert bench.step() == {1: 1, 2: 1, 3: 12}


def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it():
    """Two prompts of 4,000 tokens beside a decoding request: the short one is through at once."""
    bench = Bench(num_pages=2100, max_prefill_chunk=64, max_tokens_per_step=128)
    bench.add(3)
    bench.step()
    long = [bench.add(4000), bench.add(4000)]
    for _ in range(5):
        assert bench.step() == {1: 1, 2: 64}
    short = bench.add(30)
    assert bench.step() == {1: 1, 2: 34, 4: 30}
    assert short.num_output == 1
    assert [one.computed_len for one in long] == [354, 0]


def test_the_oldest_prompt_moves_on_by_half_whatever_else_comes():
    bench = Bench(num_pages=900, max_prefill_chunk=16, max_tokens_per_step=64, max_running=64)
    bench.add(2)
    bench.step()
    long = bench.add(480)
    while long.num_output == 0:
        left = long.extend_len
        bench.add(8, max_tokens=1)
        assert bench.step()[2] >= min(left, 8), "half of 16 rows"
        for other in [r for r in bench.scheduler.running if r.remaining <= 0]:
            bench.scheduler.remove(other)


def test_every_prompt_is_through_by_twice_the_rows_ahead_of_it():
    """Shorter ones keep coming, and still each older prompt has its bound: nobody starves."""
    bench = Bench(num_pages=3000, max_prefill_chunk=16, max_tokens_per_step=64, max_running=64)
    bench.add(2, max_tokens=10_000)
    bench.step()
    older = [bench.add(length) for length in (160, 480, 320)]
    ahead = 0
    bounds = [ahead := ahead + -(-one.extend_len // 8) for one in older]
    for step in range(1, bounds[-1] + 1):
        bench.add(8, max_tokens=1)
        bench.step()
        for other in [r for r in bench.scheduler.running if r.key > 4 and r.remaining <= 0]:
            bench.scheduler.remove(other)
        for one, bound in zip(older, bounds, strict=True):
            assert one.num_output > 0 or step < bound


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
    known_len = young.known_len
    # Its first page was not needed by anybody and is found again.
    assert bench.step() == {2: known_len - 4, 3: 1}


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


def test_prompts_together_take_a_bounded_share_of_a_step_in_which_others_decode():
    bench = Bench(max_prefill_chunk=16, max_tokens_per_step=64, max_prefill_while_decoding=10)
    bench.add(4)
    bench.step()
    bench.add(30)
    bench.add(14)
    assert bench.step() == {1: 1, 2: 5, 3: 5}
    assert bench.step() == {1: 1, 2: 5, 3: 5}
    assert bench.step() == {1: 1, 2: 6, 3: 4}
    assert bench.step() == {1: 1, 2: 10, 3: 1}


def test_prompts_have_the_whole_step_while_nobody_decodes():
    bench = Bench(max_prefill_chunk=16, max_tokens_per_step=64, max_prefill_while_decoding=3)
    for _ in range(3):
        bench.add(16)
    assert bench.step() == {1: 16, 2: 16, 3: 16}


def test_a_prompt_moves_on_beside_as_many_decoding_requests_as_may_run():
    bench = Bench(max_tokens_per_step=4, max_running=4)
    for _ in range(3):
        bench.add(1)
    for _ in range(3):
        bench.step()
    bench.add(8)
    for _ in range(8):
        assert bench.step() == {1: 1, 2: 1, 3: 1, 4: 1}


def test_drafts_leave_cached_pages_alone():
    bench = Bench(num_pages=8)
    first = bench.add(12, first=0)
    bench.step()
    bench.scheduler.remove(first)
    assert bench.pool.num_idle == 3
    one = bench.add(8, first=900)
    bench.step()
    bench.scheduler.share_rows()
    assert bench.scheduler.seat_nodes(one, 40) < 40
    assert bench.pool.num_idle == 3


def test_a_request_that_waits_for_a_page_does_not_stop_those_behind_it():
    bench = Bench(max_prefill_chunk=8, max_tokens_per_step=16)
    bench.add(13, first=0)
    bench.add(13, first=0)
    bench.add(3)
    assert bench.step() == {1: 8, 3: 3}
    assert bench.step() == {1: 5, 3: 1}
    assert bench.step() == {1: 1, 2: 1, 3: 1}
    assert [request.key for request in bench.scheduler.running] == [1, 2, 3]
