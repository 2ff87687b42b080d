"""What was kept of a group equals a fresh gather, whoever comes, leaves, moves or writes."""

import random

import pytest
import torch

from verifier_service.model.block_keys import GatheredKeys
from verifier_service.model.kept_keys import KeptKeys
from verifier_service.model.kv import Pool
from verifier_service.model.layout import StepLayout, lay_out
from verifier_service.model.sdpa import SDPA_RULES
from verifier_service.step import Span

LAYERS, HEADS, HEAD_DIM, SLOTS = 2, 3, 8, 6000


class Steps:
    """Requests that decode side by side on scattered slots of one pool, and what is kept."""

    def __init__(self, share: float = 1.0) -> None:
        self.pool = Pool(LAYERS, SLOTS, HEADS, HEAD_DIM, torch.bfloat16, {})
        self.kept = KeptKeys(self.pool)
        self.random = random.Random(4)
        self.generator = torch.Generator().manual_seed(4)
        self.free = list(range(1, SLOTS))
        self.random.shuffle(self.free)
        self.requests: dict[int, list[int]] = {}
        self.num_copied: list[int | None] = []

    def join(self, key: int, length: int) -> None:
        """A request whose prompt of so many positions is in the pool."""
        self.requests[key] = [self.free.pop() for _ in range(length)]
        self.write(torch.tensor(self.requests[key]))

    def leave(self, key: int) -> None:
        """Its slots go to whoever comes next."""
        self.free += self.requests.pop(key)

    def write(self, slots: torch.Tensor) -> None:
        """Other K and V in these slots of all layers, by the door that steps use."""
        self.pool.stamp(slots)
        for layer in range(LAYERS):
            new = torch.randn(2, HEADS, len(slots), HEAD_DIM, generator=self.generator)
            self.pool.write(layer, slots, new.to(self.pool.kv.dtype))

    def spans(self, rows: int = 1) -> list[Span]:
        """The next `rows` rows of everybody."""
        found = []
        for key, slots in self.requests.items():
            slots += [self.free.pop() for _ in range(rows)]
            found.append(Span(key, (0,) * rows, len(slots) - rows, torch.tensor(slots)))
        return found

    def step(self, rows: int = 1, layers: int = LAYERS) -> StepLayout:
        """One step, comparing everything that is kept with a gather; says what was copied."""
        spans = self.spans(rows)
        layout = lay_out([spans[n] for n in self.kept.order(spans)], 4, torch.bfloat16, SDPA_RULES)
        self.write(layout.slots)
        self.num_copied = []
        for group in layout.groups:
            arranged, found = self.kept.take(group)
            assert sorted(arranged.owners) == sorted(group.owners)
            if found is None:
                self.num_copied.append(None)
                continue
            self.num_copied.append(found.num_copied)
            gathered = GatheredKeys(arranged, self.pool)
            # Of scrap, which is masked, any finite value will do.
            real = (arranged.slots != 0)[:, None, :, None]
            for layer in range(layers):
                pairs = zip(found.read(layer), gathered.read(layer), strict=True)
                assert all(torch.equal(one * real, other * real) for one, other in pairs)
        return layout


@pytest.fixture
def steps():
    found = Steps()
    for key in range(6):
        found.join(key, 70 + key)
    return found


def test_a_group_is_gathered_once_and_then_by_its_new_columns(steps):
    copied = []
    for _ in range(5):
        steps.step()
        copied += steps.num_copied
    columns = 6 * 128
    # First met, then given a buffer, then one column a request.
    assert copied == [None, columns, 6, 6, 6]


def test_who_leaves_makes_room_for_who_comes_and_others_stay_in_their_lanes(steps):
    for _ in range(3):
        steps.step()
    steps.leave(1)
    steps.join(9, 80)
    steps.step()
    own = 80 + 1
    # Its lane held another request's slots; of five others one column each. Columns behind the
    # end are scrap's, and were scrap's before where the old request ended as well.
    assert steps.num_copied[0] <= own + 5
    assert steps.num_copied[0] >= 5


def test_blocks_of_one_group_lie_in_lane_order_in_the_flat_batch(steps):
    for _ in range(3):
        steps.step()
    steps.leave(0)
    steps.step()
    layout = steps.step()
    [group] = layout.groups
    assert group.first_row == 0
    arranged, _ = steps.kept.take(group)
    assert arranged is group


def test_slots_written_again_are_copied_again(steps):
    for _ in range(3):
        steps.step()
    # Preempted and computed anew, into the same slots.
    steps.write(torch.tensor(steps.requests[2]))
    steps.step()
    assert steps.num_copied == [len(steps.requests[2]) - 1 + 6]


def test_moved_slots_are_copied_again(steps):
    for _ in range(3):
        steps.step()
    own = steps.requests[3]
    steps.pool.move(torch.tensor(own[5:9]), torch.tensor(own[20:24]))
    steps.step()
    assert steps.num_copied == [4 + 6]


def test_a_step_that_ended_between_layers_leaves_nothing_half_copied(steps):
    for _ in range(3):
        steps.step()
    steps.step(layers=1)
    steps.step()
    assert steps.num_copied == [6 * 128]


def test_reads_equal_gathers_whatever_comes_and_goes():
    steps = Steps()
    key = 0
    for _ in range(120):
        draw = steps.random.random()
        if draw < 0.3 and len(steps.requests) < 9:
            key += 1
            steps.join(key, steps.random.randrange(1, 300))
        elif draw < 0.4 and steps.requests:
            steps.leave(steps.random.choice(list(steps.requests)))
        elif draw < 0.5 and steps.requests:
            own = steps.random.choice(list(steps.requests.values()))
            steps.write(torch.tensor(own[len(own) // 2 :]))
        elif draw < 0.55:
            order = list(steps.requests.items())
            steps.random.shuffle(order)
            steps.requests = dict(order)
        if steps.requests:
            steps.step(rows=steps.random.choice([1, 1, 1, 5]))


def test_buffers_stay_within_their_share_of_the_pool():
    steps = Steps()
    for key in range(8):
        steps.join(key, 600)
    for _ in range(4):
        steps.step()
    assert steps.num_copied == [None], "eight of 640 columns are more than half of 6,000"
    assert steps.kept.num_bytes == 0
    for key in range(5):
        steps.leave(key)
    for _ in range(4):
        steps.step()
    assert steps.num_copied == [3]
    assert 0 < steps.kept.num_bytes <= steps.pool.kv.nbytes / 2


def test_groups_that_are_met_no_more_give_their_buffers_back(steps):
    for _ in range(3):
        steps.step()
    for key in range(6):
        steps.leave(key)
    steps.join(20, 900)
    for _ in range(20):
        steps.step()
    only = steps.kept.num_bytes
    assert only <= LAYERS * 2 * HEADS * HEAD_DIM * 2 * (1024 + 64)


def test_spans_of_one_key_twice_are_gathered_for_every_step(steps):
    spans = [Span(1, (0,), 70, torch.tensor(steps.requests[0] + [5000 + n])) for n in range(2)]
    for _ in range(3):
        layout = lay_out(spans, 4, torch.bfloat16, SDPA_RULES)
        steps.write(layout.slots)
        assert [steps.kept.take(group)[1] for group in layout.groups] == [None]
