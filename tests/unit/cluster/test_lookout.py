"""Who is alive: each verifier's answers, silences and signs of life count for it alone."""

import asyncio
import math
from collections.abc import Sequence

import pytest
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.fleet.lookout import SILENT_LOOKS, Lookout
from cluster.fleet.messages import VerifierReport
from tests.unit.cluster.serve_fakes import answering
from tests.unit.cluster.test_silent_verifier import report, run

LOOK_S = 5.0
SILENCE_S = 30.0
GONE = DeploymentUnavailableError.__new__(DeploymentUnavailableError)

Look = str | Exception


class House:
    """A handle whose verifiers answer as they are told: letters in order of asking.

    A small letter answers, a capital hangs, one after ! says that it makes no steps, one after ?
    fails.
    """

    def __init__(self) -> None:
        self.look: Look = ""
        self.num_looks = 0

    def broadcast(self, _method: str) -> DeploymentBroadcastResponse:
        self.num_looks += 1
        if isinstance(self.look, Exception):
            return answering(self.look)
        answers: list[object] = []
        for before, name in zip(" " + self.look, self.look, strict=False):
            if name.isalpha():
                hung = None if name.isupper() else report(name, math.inf if before == "!" else 0.0)
                answers.append(RuntimeError("broken") if before == "?" else hung)
        return answering(answers)


def known_after(*looks: Look, heard: str = "") -> list[tuple[str, str]]:
    """Who serves and who looks dead after each look; heard: spoke before each."""

    async def go() -> list[tuple[str, str]]:
        house = House()
        lookout = Lookout(house, 1.0, LOOK_S, SILENCE_S, lambda _reports: None)
        known = []
        for house.look in looks:
            for name in heard:
                lookout.hear(name)
            await lookout.look()
            names = (lookout.replica_ids, lookout.suspects.current())
            known.append(("".join(sorted(names[0])), "".join(sorted(names[1]))))
        return known

    return run(go())


@pytest.mark.parametrize("hung", ["A", "B", "C"])
def test_one_that_never_answers_is_left_out_in_time_and_the_others_count(hung):
    look = "abc".replace(hung.lower(), hung)
    others = "abc".replace(hung.lower(), "")
    known = known_after("abc", *[look] * SILENT_LOOKS)
    assert known == [("abc", "")] * SILENT_LOOKS + [(others, hung.lower())]


def test_who_comes_while_one_hangs_is_seen_at_once():
    assert known_after("ab", "Abc") == [("ab", ""), ("abc", "")]


def test_who_leaves_while_one_hangs_is_forgotten_like_one_that_hangs():
    """Serve names nobody by id, so a look that is not whole cannot tell the two apart."""
    assert known_after("ab", "Ac", "Ac", "Ac")[-1] == ("c", "ab")


def test_who_leaves_is_forgotten_at_once():
    assert known_after("ab", "b") == [("ab", ""), ("b", "")]
    assert known_after("ab", "?ab") == [("ab", ""), ("b", "")]
    # Though its last streams are still heard.
    assert known_after("ab", "b", heard="a")[-1] == ("b", "")


def test_one_that_makes_no_steps_says_so_itself():
    assert known_after("ab", "!ab", "ab") == [("ab", ""), ("b", "a"), ("ab", "")]
    assert known_after("abc", "!aBc")[-1] == ("bc", "a")


def test_the_last_one_is_believed_in_longer():
    assert known_after("a", "!a", "!a", "!a") == [("a", ""), ("a", "a"), ("a", "a"), ("", "a")]
    for look in ("A", "?a", GONE, TimeoutError()):
        assert known_after("a", *[look] * 4) == [("a", "")] * 3 + [("", "a")] * 2
        assert known_after("a", look, look, "a", look, look)[-1] == ("a", "")


def test_tokens_speak_for_the_verifier_that_gave_them_only():
    assert known_after("ab", *["AB"] * 9, heard="a")[-1] == ("a", "b")


def test_a_look_under_way_is_shared():
    async def go() -> tuple[int, list[Sequence[VerifierReport]]]:
        house, learned = House(), []
        house.look = "Ab"
        lookout = Lookout(house, 1.0, LOOK_S, SILENCE_S, learned.append)
        lookout.reports = (report("a"),)
        looks = [asyncio.create_task(lookout.look()) for _ in range(2 * SILENT_LOOKS)]
        await asyncio.sleep(0)
        looks[0].cancel()  # whoever leaves spoils nobody's look
        await asyncio.gather(*looks, return_exceptions=True)
        assert lookout.replica_ids == {"a", "b"}
        return house.num_looks, learned

    num_looks, learned = run(go())
    assert num_looks == 1
    assert [[one.replica_id for one in reports] for reports in learned] == [["b", "a"]]


def test_it_goes_on_looking_until_it_is_closed():
    async def go() -> int:
        house = House()
        house.look = GONE
        lookout = Lookout(house, 1.0, LOOK_S, SILENCE_S, lambda _reports: None)
        asyncio.get_running_loop().call_later(2.5, setattr, house, "look", "a")
        await lookout.start()
        before = house.num_looks
        assert lookout.replica_ids == {"a"}
        house.look = "A"
        await asyncio.sleep(10 * (LOOK_S + 1.0))
        assert lookout.replica_ids == frozenset()
        assert house.num_looks - before == 10
        await lookout.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return before

    assert run(go()) == 4
