"""Pairs over the wire: a drafter that does not fit is left out, requests go on without it."""

import threading
from contextlib import closing

import pytest

from protos.exchange import DraftStatus, DraftWork
from tests.integration.exchange_house import CHAIN, VOCAB, House, ask, oracle, plain_texts, until
from tests.integration.fake_drafter import FakeDrafter, Mode
from verifier_service.engine import remote_link
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.ports import SourcePlan
from verifier_service.pairs.book import PairBook
from verifier_service.pairs.text import read_text, text_ids

REQUESTS = [ask("a", 5), ask("b", 70, temperature=0.9, seed=3)]
PLANS = [SourcePlan("fake", CHAIN)]
DIGEST = {"digest": "digest"}


class CountingExam:
    """A pair book, and who was asked."""

    def __init__(self, tmp_path, target):
        text = read_text(target, text_ids(tmp_path, VOCAB), [])
        self.book = PairBook(text, TargetEnd(VOCAB, 10240, "fake", {}))
        self.num_asked = 0

    def trouble(self, capabilities, ask):
        self.num_asked += 1
        return self.book.trouble(capabilities, ask)


@pytest.fixture
def house(tmp_path):
    exams = []

    def exam(target):
        exams.append(CountingExam(tmp_path, target))
        return exams[0]

    house = House(PLANS, exam=exam)
    yield house, exams[0]
    house.close()


@pytest.fixture
def drafter():
    made = []

    def make(kind=FakeDrafter, **options):
        made.append(kind(oracle(), VOCAB, **options).start())
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_a_drafter_that_fits_is_tested_and_then_drafts(house, drafter):
    house, exam = house
    remote = drafter(capabilities=DIGEST)
    house.offer("fake", remote.address)
    assert exam.book.scores["digest"].agreement == 1.0
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == plain_texts(REQUESTS)
    assert house.exchange.counts()["fake"].in_time > 0
    until(lambda: not remote.sessions)


def test_a_drafter_that_does_not_fit_is_left_out_and_texts_are_the_same(house, drafter, caplog):
    house, _ = house
    remote = drafter(capabilities=DIGEST)
    remote.mode = Mode.RANDOM
    house.offer("fake", remote.address, wait=False)
    until(lambda: house.exchange.sources() or house.exchange.counts()["fake"].pairs_refused)
    assert house.exchange.sources() == []
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == plain_texts(REQUESTS)
    counts = house.exchange.counts()["fake"]
    assert (counts.pairs_refused, counts.asked) == (1, 0)
    assert "positions of the test text" in caplog.text


def test_a_second_replica_of_a_tested_pair_is_not_tested_again(house, drafter):
    house, exam = house
    first, second = drafter(capabilities=DIGEST), drafter(capabilities=DIGEST, incarnation=2)
    house.offer("fake", first.address)
    house.offer("fake", first.address, second.address, wait=False)
    until(lambda: house.exchange.sources()[0].num_replicas == 2)
    assert exam.num_asked == 2
    assert second.num_works == 0


@pytest.mark.parametrize("mode", [Mode.NAN, Mode.BAD_ID, Mode.REFUSES, Mode.TWINS])
def test_a_drafter_that_breaks_the_contract_meanwhile_costs_speed_only(house, drafter, mode):
    house, _ = house
    remote = drafter(capabilities=DIGEST)
    remote.mode = mode
    house.offer("fake", remote.address, wait=False)
    for request in REQUESTS:
        house.client.submit(request)
    assert house.client.finish() == plain_texts(REQUESTS)


class EndsItsStream(FakeDrafter):
    """Describes itself, and ends its stream at the first work."""

    async def Draft(self, request_iterator, context):  # noqa: N802
        await context.read()
        self.num_streams += 1


def test_exams_that_fail_leave_no_threads_behind(drafter, tmp_path):
    remote = drafter(EndsItsStream, capabilities=DIGEST)
    before = set(threading.enumerate())
    with closing(House(PLANS, exam=lambda target: CountingExam(tmp_path, target))) as house:
        house.offer("fake", remote.address, wait=False)
        until(lambda: remote.num_streams >= 4)
    until(lambda: set(threading.enumerate()) <= before)


class LateExam:
    """Asks its one question after more than the time a replica is given to answer."""

    def __init__(self):
        self.statuses = []

    def trouble(self, capabilities, ask):
        threading.Event().wait(1.5 * remote_link.EXAM_S)
        self.statuses.append(ask(DraftWork(1, capabilities.incarnation, 1, 0, (5,))).status)
        return ""


def test_an_exam_that_waits_for_another_has_all_its_time_still(drafter, monkeypatch):
    monkeypatch.setattr(remote_link, "EXAM_S", 1.0)
    exam, remote = LateExam(), drafter(capabilities=DIGEST)
    with closing(House(PLANS, exam=lambda _: exam)) as house:
        house.offer("fake", remote.address)
    assert exam.statuses == [DraftStatus.LOST]
    assert remote.num_streams == 1
