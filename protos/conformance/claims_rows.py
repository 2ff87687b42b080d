"""Claims about feature rows: what is acknowledged, passed over, and what ends a session."""

from dataclasses import replace

from protos.conformance.bench import Bench, Skipped, answered, expect, require
from protos.exchange import DraftStatus
from protos.features import FeatureRows


def bulk_rows_are_acknowledged(bench: Bench) -> None:
    """a piece of rows is acknowledged with the rows held without a gap"""
    name = _opened_without_rows(bench)
    ack = bench.give(name, _rows(bench, 0, 5))
    require(not ack.lost and ack.held_rows == 5, f"5 rows were sent, {ack.held_rows} are held")


def held_rows_are_told(bench: Bench) -> None:
    """a result tells the rows that are held, used ones included"""
    name = _opened_without_rows(bench)
    bench.give(name, _rows(bench, 0, 5))
    again = replace(bench.work(name, 6, 6), rows=None)
    result = answered(bench.ask(again)[0])
    require(result.held_rows == 5, f"5 rows are held, it says {result.held_rows}")


def rows_twice_are_passed_over(bench: Bench) -> None:
    """rows that come twice are passed over"""
    name = _opened_without_rows(bench)
    bench.give(name, _rows(bench, 0, 4))
    ack = bench.give(name, _rows(bench, 2, 5))
    require(not ack.lost and ack.held_rows == 5, f"5 rows are known, {ack.held_rows} are held")


def rows_behind_a_gap_are_passed_over(bench: Bench) -> None:
    """rows behind a gap are passed over, and held_rows shows it"""
    name = _opened_without_rows(bench)
    bench.give(name, _rows(bench, 0, 2))
    ack = bench.give(name, _rows(bench, 4, 5))
    require(not ack.lost and ack.held_rows == 2, f"2 rows have no gap, it says {ack.held_rows}")
    mended = bench.give(name, _rows(bench, 2, 5))
    require(mended.held_rows == 5, "the gap was not mended")


def rows_before_their_tokens(bench: Bench) -> None:
    """rows that come before their tokens are kept, or shown as not held; never lost"""
    name = _opened_without_rows(bench)
    ack = bench.give(name, _rows(bench, 0, 8))
    require(not ack.lost and 5 <= ack.held_rows <= 8, f"8 rows came early, {ack.held_rows} held")


def rows_of_an_unknown_session_are_lost(bench: Bench) -> None:
    """rows for a session that is not there are acknowledged as lost"""
    _needs_rows(bench)
    require(bench.give(bench.new_session(), _rows(bench, 0, 3)).lost, "rows of nothing are held")


def rows_of_another_incarnation_are_lost(bench: Bench) -> None:
    """rows under another incarnation are acknowledged as lost"""
    name = _opened_without_rows(bench)
    other = bench.capabilities.incarnation ^ 1
    require(bench.give(name, _rows(bench, 0, 3), other).lost, "another incarnation's rows are held")


def rows_of_another_width_end_the_session(bench: Bench) -> None:
    """rows of another width than opened end the session, and the stream goes on"""
    name = _opened_without_rows(bench)
    good = _rows(bench, 0, 1)
    wrong = FeatureRows(0, 1, good.width + 1, good.dtype, good.data + bytes(good.dtype.num_bytes))
    require(bench.give(name, wrong).lost, "rows of another width were taken")
    expect(bench.ask(bench.work(name, 6, 8))[0], DraftStatus.LOST)
    bulk_rows_are_acknowledged(bench)


def missing_rows_are_no_loss(bench: Bench) -> None:
    """a session whose rows are still under way is held: drafted for, or not ready"""
    name = _opened_without_rows(bench)
    result = answered(bench.ask(replace(bench.work(name, 6, 7), rows=None))[0])
    require(result.held_tokens == 7, f"7 tokens were sent, {result.held_tokens} are held")
    require(result.held_rows == 0, f"no rows were sent, {result.held_rows} are held")


CLAIMS = (
    bulk_rows_are_acknowledged,
    held_rows_are_told,
    rows_twice_are_passed_over,
    rows_behind_a_gap_are_passed_over,
    rows_before_their_tokens,
    rows_of_an_unknown_session_are_lost,
    rows_of_another_incarnation_are_lost,
    rows_of_another_width_end_the_session,
    missing_rows_are_no_loss,
)


def _needs_rows(bench: Bench) -> None:
    if not bench.eats_rows:
        raise Skipped("it eats tokens only")


def _opened_without_rows(bench: Bench) -> int:
    _needs_rows(bench)
    name = bench.new_session()
    work = bench.work(name, 0, 6, opened=bench.opening(), with_rows=False)
    answered(bench.ask(work)[0])
    return name


def _rows(bench: Bench, start: int, end: int) -> FeatureRows:
    rows = bench.rows(start, end)
    assert rows is not None, "the drafter eats rows"
    return rows
