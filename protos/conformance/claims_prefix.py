"""Claims about the prefix rule: who holds what, and what is said when it is not held."""

from dataclasses import replace

from protos.conformance.bench import Bench, answered, expect, require
from protos.exchange import DraftStatus, Plan
from protos.params import SamplingParams


def opened_and_drafted(bench: Bench) -> None:
    """a session opened from token 0 is held, answered for its base_len and drafted for"""
    result = answered(bench.ask(bench.open(bench.new_session()))[0])
    require(result.base_len == 6, f"the answer is for {result.base_len} tokens, asked were 6")
    require(result.held_tokens == 6, f"6 tokens were sent, {result.held_tokens} are held")
    require(
        result.incarnation == bench.capabilities.incarnation, "the answer names another incarnation"
    )


def no_larger_than_planned(bench: Bench) -> None:
    """a draft has no more nodes and levels than its plan, for every kind that is offered"""
    record = bench.capabilities
    for kind in record.plan_kinds:
        depth = min(4, record.max_depth or 4)
        width, nodes = min(2, record.max_width or 2), min(6, record.max_nodes or 6)
        plan = Plan(kind, depth, width, nodes if kind in ("tree", "static") else 0)
        work = replace(bench.open(bench.new_session(), 12), plan=plan)
        tree = answered(bench.ask(work)[0]).tree
        most = plan.nodes or depth
        require(tree.num_nodes <= most, f"{kind} of {most} nodes asked, {tree.num_nodes} came")
        require(tree.depth <= depth, f"{kind} of {depth} levels asked, {tree.depth} came")


def temperature_is_taken(bench: Bench) -> None:
    """a session that samples is drafted for"""
    params = SamplingParams(temperature=0.8, seed=-3, top_p=0.9)
    answered(bench.ask(bench.open(bench.new_session(), params=params))[0])


def extended(bench: Bench) -> None:
    """tokens that follow what is held extend the session"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name))[0])
    result = answered(bench.ask(bench.work(name, 6, 9))[0])
    require(result.held_tokens == 9, f"9 tokens were sent, {result.held_tokens} are held")


def known_tokens_are_compared(bench: Bench) -> None:
    """tokens sent again are compared, not appended"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name))[0])
    result = answered(bench.ask(bench.work(name, 3, 8))[0])
    require(result.held_tokens == 8, f"8 tokens are known, {result.held_tokens} are held")


def plan_alone(bench: Bench) -> None:
    """an entry without tokens asks again for the prefix that is held"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name))[0])
    again = replace(bench.work(name, 6, 6), rows=None)
    require(answered(bench.ask(again)[0]).held_tokens == 6, "the prefix changed")


def absorbs_without_a_plan(bench: Bench) -> None:
    """a plan of kind none is answered without a tree"""
    name = bench.new_session()
    work = replace(bench.open(name), plan=Plan())
    result = expect(bench.ask(work)[0], DraftStatus.OK, DraftStatus.NOT_READY)
    require(result.tree.num_nodes == 0, "a draft that nobody asked for")


def unknown_session_is_lost(bench: Bench) -> None:
    """a session that is not held is lost, with nothing held"""
    result = expect(bench.ask(bench.work(bench.new_session(), 0, 6))[0], DraftStatus.LOST)
    require(result.held_tokens == result.held_rows == 0, "something is held of nothing")


def gap_is_lost_and_mended(bench: Bench) -> None:
    """a prefix longer than what is held is lost, I hold n; tokens from n on mend it"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name))[0])
    lost = expect(bench.ask(bench.work(name, 9, 12))[0], DraftStatus.LOST)
    require(lost.held_tokens == 6, f"6 tokens are held, it says {lost.held_tokens}")
    mended = bench.work(name, lost.held_tokens, 12)
    require(answered(bench.ask(mended)[0]).held_tokens == 12, "the gap was not mended")


def disagreement_is_lost(bench: Bench) -> None:
    """tokens that disagree cut the session back to the agreeing part"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name))[0])
    work = bench.work(name, 0, 6, with_rows=False)
    other = (work.tokens[4] + 1) % (bench.capabilities.vocab_size or 1000)
    wrong = replace(work, tokens=(*work.tokens[:4], other, work.tokens[5]))
    lost = expect(bench.ask(wrong)[0], DraftStatus.LOST)
    require(lost.held_tokens == 4, f"4 tokens agree, it holds {lost.held_tokens}")


def shorter_prefix_cuts_back(bench: Bench) -> None:
    """an entry for a shorter base_len cuts the session back to it"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name))[0])
    cut = bench.work(name, 2, 4, with_rows=False)
    require(answered(bench.ask(cut)[0]).held_tokens == 4, "the session was not cut back")
    result = answered(bench.ask(bench.work(name, 4, 7))[0])
    require(result.held_tokens == 7, "the session did not go on after the cut")


def opened_again(bench: Bench) -> None:
    """an open of a session that exists wins over it"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name, 8))[0])
    work = bench.work(name, 0, 5, opened=bench.opening(), seed=1)
    require(answered(bench.ask(work)[0]).held_tokens == 5, "the old session is still there")


def another_incarnation_is_lost(bench: Bench) -> None:
    """an entry with another incarnation is lost, with nothing held, under the true number"""
    record = bench.capabilities
    work = replace(bench.open(bench.new_session()), incarnation=record.incarnation ^ 1)
    result = expect(bench.ask(work)[0], DraftStatus.LOST)
    require(result.held_tokens == 0, "tokens of another incarnation are held")
    require(result.incarnation == record.incarnation, "the answer hides the incarnation")


def close_ends_without_an_answer(bench: Bench) -> None:
    """a close ends the session and is not answered"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name))[0])
    bench.close(name)
    result = expect(bench.ask(bench.work(name, 6, 8))[0], DraftStatus.LOST)
    require(result.held_tokens == 0, "the session outlived its close")


def sessions_belong_to_their_verifier(bench: Bench) -> None:
    """another verifier neither sees nor ends a session"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name))[0])
    other = Bench(bench.link)
    try:
        expect(other.ask(other.work(name, 6, 8))[0], DraftStatus.LOST)
        other.close(name)
    finally:
        other.leave()
    answered(bench.ask(bench.work(name, 6, 8))[0])


def broken_stream_is_resumed(bench: Bench) -> None:
    """sessions outlive a broken connection"""
    name = bench.new_session()
    answered(bench.ask(bench.open(name))[0])
    bench.reconnect()
    result = answered(bench.ask(bench.work(name, 6, 8))[0])
    require(result.held_tokens == 8, "the session was lost with the stream")


CLAIMS = (
    opened_and_drafted,
    no_larger_than_planned,
    temperature_is_taken,
    extended,
    known_tokens_are_compared,
    plan_alone,
    absorbs_without_a_plan,
    unknown_session_is_lost,
    gap_is_lost_and_mended,
    disagreement_is_lost,
    shorter_prefix_cuts_back,
    opened_again,
    another_incarnation_is_lost,
    close_ends_without_an_answer,
    sessions_belong_to_their_verifier,
    broken_stream_is_resumed,
)
