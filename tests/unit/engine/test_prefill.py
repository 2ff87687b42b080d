"""How a step's prefill rows are shared, against a loop that deals them out one at a time."""

from hypothesis import given
from hypothesis import strategies as st

from verifier_service.engine.prefill import share_prefill


def one_row_at_a_time(wanted: list[int], budget: int, most: int) -> list[int]:
    """The same rule in plain words: the first half is the oldest's, then the least wanting one."""
    rows = [0] * len(wanted)
    for dealt in range(budget):
        hungry = [i for i, left in enumerate(wanted) if rows[i] < min(left, most)]
        if not hungry:
            break
        is_oldests_turn = dealt < (budget + 1) // 2 and 0 in hungry
        rows[0 if is_oldests_turn else min(hungry, key=lambda i: (wanted[i], i))] += 1
    return rows


LENGTHS = st.lists(st.integers(1, 40), max_size=6)


@given(wanted=LENGTHS, budget=st.integers(0, 60), most=st.integers(1, 30))
def test_rows_are_shared_as_one_at_a_time(wanted: list[int], budget: int, most: int):
    assert share_prefill(wanted, budget, most) == one_row_at_a_time(wanted, budget, most)


@given(wanted=LENGTHS, budget=st.integers(1, 60), most=st.integers(1, 30))
def test_no_row_is_left_while_somebody_could_take_it(wanted: list[int], budget: int, most: int):
    rows = share_prefill(wanted, budget, most)
    could = sum(min(left, most) for left in wanted)
    assert sum(rows) == min(budget, could)
    assert all(given <= min(left, most) for given, left in zip(rows, wanted, strict=True))
    if wanted:
        assert rows[0] >= min(wanted[0], most, (budget + 1) // 2)
