"""A run divided into blocks writes the single engine's file, in whatever order parts come."""

import random

import pytest
import torch

from protos.errors import ConfigError, OutriderError
from tests.tiny import tiny_llama_dir
from verifier_service.data.chat import Chat
from verifier_service.data.conversations import Conversation, Sampler
from verifier_service.data.divided import (
    answers_work,
    parts_path,
    regenerate_divided,
    synthesise_divided,
    turns_work,
)
from verifier_service.data.engines import EngineChoice, build_engine, summarise
from verifier_service.data.openings import Openings
from verifier_service.data.regenerate import regenerate
from verifier_service.data.synthesise import TurnsRun, synthesise
from verifier_service.data.turns_file import TurnRules
from verifier_service.data.worker import Worker

SAMPLER = Sampler((0.0, 1.0), 0, 8, 3)
TURN_SAMPLER = Sampler((0.8, 1.2), 0, 6, 3)
ENDS = frozenset(range(0, 384, 2))
"""A random target hardly ever ends a turn: half of its words shall do."""
OPENINGS = Openings(("What is", "Tell me"), 3)
RULES = TurnRules(min_words=1, num_distinct_words=3)
CONVERSATIONS = [
    Conversation(i, ({"role": "user", "content": f"question {i}"},), ("and?",) * (i % 3))
    for i in range(9)
]


class Killed(Exception):
    """The process ends here."""


class Replicas:
    """A cluster of one process: computes blocks in a shuffled order, and can be killed."""

    def __init__(self, choice: EngineChoice, work, kill_after: int | None = None) -> None:
        self._worker = Worker(choice, work)
        self._kill_after = kill_after
        self.computed: list[int] = []
        self.is_closed = False

    def __call__(self, blocks):
        order = list(blocks)
        random.Random(1).shuffle(order)
        try:
            for items in order:
                if len(self.computed) == self._kill_after:
                    raise Killed
                for block, part in self._worker.compute(items):
                    self.computed.append(block)
                    yield part
        finally:
            self.is_closed = True


@pytest.fixture(scope="module")
def choice(tmp_path_factory):
    torch.set_num_threads(1)
    return EngineChoice(str(tiny_llama_dir(tmp_path_factory.mktemp("target"))), 3, 1, "fp32")


@pytest.fixture(scope="module")
def target(choice):
    return choice.summarise()


@pytest.fixture(scope="module")
def chat(choice):
    return Chat(choice.directory())


@pytest.fixture(scope="module")
def whole(choice, chat, tmp_path_factory):
    """The file that one engine writes."""
    out = tmp_path_factory.mktemp("whole") / "whole.msgpack"
    regenerate(choice.build(), chat, CONVERSATIONS, SAMPLER, out, 4, _quiet)
    return out.read_bytes()


def _quiet(done: int, total: int, num_tokens: int) -> None:
    return None


def _divided(choice, chat, out, kill_after=None, block_size=2, report=_quiet):
    target = choice.summarise()
    work = answers_work(target, CONVERSATIONS, SAMPLER, block_size)
    replicas = Replicas(choice, work, kill_after)
    if kill_after is None:
        regenerate_divided(chat, target, CONVERSATIONS, work, out, replicas, report)
    else:
        with pytest.raises(Killed):
            regenerate_divided(chat, target, CONVERSATIONS, work, out, replicas, report)
    return replicas.computed


def test_a_summary_says_what_the_loaded_target_says(choice, target):
    facts = choice.build().target.facts
    assert target.name == facts.name
    assert target.digest == facts.digest
    assert target.vocab_size == facts.vocab_size
    assert target.ends == frozenset(facts.eos_token_ids)
    for asked in (None, 100):
        engine = build_engine(choice.directory(), 2, 1, "fp32", max_context=asked)
        assert summarise(choice.directory(), asked).max_context == engine.max_context


@pytest.mark.parametrize("block_size", [1, 2, 4, 100])
def test_parts_joined_are_the_single_engines_file(choice, chat, whole, tmp_path, block_size):
    out = tmp_path / "a.msgpack"
    _divided(choice, chat, out, block_size=block_size)
    assert out.read_bytes() == whole
    assert not parts_path(out).exists()


@pytest.mark.parametrize("place", [0, 1, 3, 4])
def test_whole_parts_are_not_computed_again(choice, chat, whole, tmp_path, place):
    out = tmp_path / "a.msgpack"
    first = _divided(choice, chat, out, kill_after=place)
    assert len(first) == place
    second = _divided(choice, chat, out)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert out.read_bytes() == whole


def test_torn_parts_are_computed_again(choice, chat, whole, tmp_path):
    out = tmp_path / "a.msgpack"
    first = _divided(choice, chat, out, kill_after=3)
    files = sorted(parts_path(out).glob("*.msgpack"))
    data = files[1].read_bytes()
    files[1].write_bytes(data[:-3])
    (parts_path(out) / "00000009.tmp").write_bytes(b"half")
    assert len(_divided(choice, chat, out)) == 5 - len(first) + 1
    assert out.read_bytes() == whole


def test_a_run_begun_on_one_engine_goes_on_in_parts_and_back(choice, chat, whole, tmp_path):
    out = tmp_path / "a.msgpack"

    def report(done: int, total: int, num_tokens: int) -> None:
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        regenerate(choice.build(), chat, CONVERSATIONS, SAMPLER, out, 4, report)
    assert sorted(_divided(choice, chat, out)) == [1, 2, 3, 4]
    assert out.read_bytes() == whole
    assert _divided(choice, chat, out) == []
    regenerate(choice.build(), chat, CONVERSATIONS, SAMPLER, out, 4, report)
    assert out.read_bytes() == whole


def test_progress_counts_what_was_there_and_this_runs_tokens(choice, chat, tmp_path):
    out, seen = tmp_path / "a.msgpack", []
    _divided(choice, chat, out, kill_after=2)
    _divided(choice, chat, out, report=lambda *report: seen.append(report))
    assert seen[0][1:] == (9, 0)
    assert seen[-1][:2] == (9, 9)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[0][0] in (3, 4)


def test_parts_of_another_run_are_refused_and_kept(choice, chat, tmp_path):
    out = tmp_path / "a.msgpack"
    _divided(choice, chat, out, kill_after=1)
    (before,) = parts_path(out).iterdir()
    with pytest.raises(ConfigError, match="other settings, prompts or blocks"):
        _divided(choice, chat, out, block_size=3)
    assert list(parts_path(out).iterdir()) == [before]


def test_another_file_is_refused_before_anything_is_computed(choice, chat, tmp_path):
    out = tmp_path / "precious.txt"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="no answers file"):
        _divided(choice, chat, out)
    assert out.read_text() == "mine"


def _altered(choice, target, alter):
    """What computes, with packed parts changed by `alter`."""
    work = answers_work(target, CONVERSATIONS, SAMPLER, 5)
    real = Replicas(choice, work)

    def compute(blocks):
        for number, part in enumerate(real(blocks)):
            yield from alter(number, part)

    return work, compute


@pytest.mark.parametrize(
    ("alter", "error", "message"),
    [
        (lambda n, part: [], OutriderError, "2 blocks were not computed"),
        (lambda n, part: [part[:-1]], OutriderError, "no part of this run"),
        (lambda n, part: [b"rubbish"], OutriderError, "no part of this run"),
        (lambda n, part: [part, part], OutriderError, "no part of this run"),
        (
            lambda n, part: [
                part.replace(b"\xa1i\x00", b"\xa1i\x01").replace(b"\xa1i\x05", b"\xa1i\x06")
            ],
            OutriderError,
            "other items",
        ),
    ],
    ids=["none", "torn", "rubbish", "twice", "other-items"],
)
def test_what_replicas_send_is_checked(choice, chat, target, tmp_path, alter, error, message):
    work, compute = _altered(choice, target, alter)
    with pytest.raises(error, match=message):
        regenerate_divided(
            chat, target, CONVERSATIONS, work, tmp_path / "a.msgpack", compute, _quiet
        )


def test_replicas_that_compute_differently_are_refused(choice, chat, target, tmp_path):
    fingerprint = choice.build().target.facts.fingerprint.encode()

    def differ(number, part):
        return [part.replace(fingerprint, fingerprint[::-1]) if number else part]

    work, compute = _altered(choice, target, differ)
    with pytest.raises(ConfigError, match="computed differently"):
        regenerate_divided(chat, target, CONVERSATIONS, work, tmp_path / "a", compute, _quiet)
    work, compute = _altered(
        choice, target, lambda n, part: [part.replace(target.digest.encode(), b"0" * 32)]
    )
    with pytest.raises(ConfigError, match="another target"):
        regenerate_divided(chat, target, CONVERSATIONS, work, tmp_path / "b", compute, _quiet)


def _turns(choice, chat, target, out, count, kill_after=None):
    run = TurnsRun(out, chat, ENDS, target.digest, TURN_SAMPLER, OPENINGS, RULES)
    work = turns_work(run, TURN_SAMPLER, OPENINGS, 4)
    replicas = Replicas(choice, work, kill_after)
    if kill_after is None:
        assert synthesise_divided(run, target, work, count, replicas, _quiet) == count
    else:
        with pytest.raises(Killed):
            synthesise_divided(run, target, work, count, replicas, _quiet)
    return replicas


def test_turns_written_in_blocks_are_the_single_engines(choice, chat, target, tmp_path):
    one, parts = tmp_path / "one.jsonl", tmp_path / "parts.jsonl"
    run = TurnsRun(one, chat, ENDS, target.digest, TURN_SAMPLER, OPENINGS, RULES)
    synthesise(choice.build(), run, chat, TURN_SAMPLER, OPENINGS, 9, 6, _quiet)
    first = _turns(choice, chat, target, parts, 9, kill_after=2).computed
    second = _turns(choice, chat, target, parts, 9)
    assert parts.read_bytes() == one.read_bytes()
    assert not set(first) & set(second.computed)
    assert second.is_closed
    assert not parts_path(parts).exists()
    assert _turns(choice, chat, target, parts, 9).computed == []
