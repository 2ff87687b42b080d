"""The test of a pair: what a drafter is shown, how its guesses are counted, when it is refused."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from protos.errors import PeerUnavailable
from protos.exchange import Capabilities, DraftResult, DraftStatus, PlanKind
from protos.features import DType, FeatureForm
from protos.tree import CandidateTree, chain
from tests.fakes import HashTarget
from tests.tiny import byte_tokenizer
from verifier_service.engine.draft_form import RowForm, TargetEnd
from verifier_service.pairs.book import PairBook
from verifier_service.pairs.probe import CAUSES, PairScore, score_pair
from verifier_service.pairs.text import (
    NUM_CONTEXT,
    NUM_POSITIONS,
    TEXT,
    read_text,
    text_ids,
)

VOCAB = 97
NUM_TOKENS = NUM_CONTEXT + NUM_POSITIONS
RAW = RowForm(FeatureForm.RAW, 2, DType.FP32, "digest")
CHAINS = Capabilities("fake", "fake", 7, (PlanKind.CHAIN,), digest="digest", raw_width=2)


@pytest.fixture(scope="module")
def text():
    target = HashTarget(VOCAB)
    return read_text(target, text_ids_without_tokenizer(), ["digest"])


def text_ids_without_tokenizer():
    return tuple((7 + 31 * place) % VOCAB for place in range(NUM_TOKENS))


class Guesser:
    """Keeps the prefix rule strictly and guesses right at every `period`-th position."""

    def __init__(self, period=1, status=DraftStatus.OK, status_from=0):
        self.target = HashTarget(VOCAB)
        self.period, self.status, self.status_from = period, status, status_from
        self.tokens, self.works, self.num_rows, self.closed = [], [], 0, 0

    def __call__(self, work):
        if work.close:
            self.closed += 1
            return None
        self.works.append(work)
        assert work.token_start == len(self.tokens)
        self.tokens += work.tokens
        assert len(self.tokens) == work.base_len
        if work.rows is not None:
            assert work.rows.start == self.num_rows
            self.num_rows = work.rows.end
        result = DraftResult(work.session_id, work.incarnation, work.base_len, DraftStatus.OK)
        if work.plan.kind is PlanKind.NONE:
            return result
        if work.base_len >= self.status_from and self.status is not DraftStatus.OK:
            return replace(result, status=self.status, detail="because")
        best = int(self.target.path_logits(tuple(self.tokens)).argmax())
        right = work.base_len % self.period == 0
        return replace(result, tree=chain([best if right else (best + 1) % VOCAB]))


def test_a_drafter_that_says_what_the_target_says_agrees_everywhere(text):
    drafter = Guesser()
    score = score_pair(text, RAW, CHAINS, 5, drafter)
    assert score == PairScore(NUM_POSITIONS, NUM_POSITIONS, NUM_POSITIONS)
    assert score.trouble() == ""
    assert drafter.works[0].open is not None
    assert all(work.open is None for work in drafter.works[1:])
    assert drafter.num_rows == NUM_TOKENS - 1


@pytest.mark.parametrize("width", [2, 4000, 60000])
def test_rows_ride_in_entries_of_32_kib_or_alone(text, width):
    data = bytes(4 * width * NUM_TOKENS)
    wide = replace(text.rows["digest"], width=width, data=data)
    drafter = Guesser()
    form = replace(RAW, width=width)
    score_pair(replace(text, rows={"digest": wide}), form, CHAINS, 5, drafter)
    sizes = [(work.rows.count, len(work.rows.data)) for work in drafter.works if work.rows]
    assert all(count == 1 or size <= 32 * 1024 for count, size in sizes)
    assert drafter.num_rows == NUM_TOKENS - 1


@pytest.mark.parametrize(("period", "is_refused"), [(1, False), (8, False), (97, True)])
def test_the_floor_is_five_percent(text, period, is_refused):
    score = score_pair(text, RAW, CHAINS, 5, Guesser(period))
    assert (score.agreement < 0.05) is is_refused
    assert bool(score.trouble()) is is_refused


def test_a_refusal_names_the_number_and_the_causes(text):
    trouble = score_pair(text, RAW, CHAINS, 5, Guesser(1000)).trouble()
    assert "0 of 64 positions" in trouble
    assert "0.0 %" in trouble
    assert CAUSES in trouble


def test_an_empty_draft_and_one_that_is_not_ready_count_against_the_pair(text):
    score = score_pair(text, RAW, CHAINS, 5, Guesser(status=DraftStatus.NOT_READY))
    assert score == PairScore(0, 0, NUM_POSITIONS)


@pytest.mark.parametrize("kind", [PlanKind.BLOCK, PlanKind.TREE])
def test_other_shapes_are_asked_for_one_token(text, kind):
    drafter = Guesser()
    score = score_pair(text, RAW, replace(CHAINS, plan_kinds=(kind,)), 5, drafter)
    assert score.agreement == 1.0
    assert {(w.plan.kind, w.plan.depth) for w in drafter.works[-NUM_POSITIONS:]} == {(kind, 1)}


def test_a_drafter_of_short_context_is_asked_within_it(text):
    drafter = Guesser()
    score = score_pair(text, RAW, replace(CHAINS, max_context=40), 5, drafter)
    assert max(work.base_len + work.plan.depth for work in drafter.works) == 40
    assert score.is_decisive


def end():
    return TargetEnd(VOCAB, 512, "fake", {"digest": RAW})


def test_a_pair_is_tested_once(text):
    book, drafter = PairBook(text, end()), Guesser(1000)
    assert book.trouble(CHAINS, drafter) == book.trouble(CHAINS, drafter) != ""
    assert drafter.closed == 1
    assert list(book.scores) == ["digest"]


def test_a_silent_drafter_delays_no_digest_but_its_own(text):
    book, met, spoken = PairBook(text, end()), threading.Event(), threading.Event()
    book.trouble(CHAINS, Guesser())
    twin = Guesser()

    def silent(work):
        met.set()
        assert spoken.wait(60)

    with ThreadPoolExecutor(4) as threads:
        try:
            unheard = replace(CHAINS, digest="silent", raw_width=0)
            other = replace(CHAINS, digest="other", raw_width=0)
            first = threads.submit(book.trouble, unheard, silent)
            assert met.wait(10)
            known = threads.submit(book.trouble, CHAINS, silent)
            new = threads.submit(book.trouble, other, Guesser(1000))
            same = threads.submit(book.trouble, unheard, twin)
            assert known.result(10) == ""
            assert new.result(10) != ""
            assert not first.done()
            assert twin.works == []
        finally:
            spoken.set()
        assert (first.result(10), same.result(10)) == ("", "")
    assert book.scores["silent"].agreement == 1.0


def test_a_drafter_without_a_digest_is_not_tested(text):
    drafter = Guesser(1000)
    assert PairBook(text, end()).trouble(replace(CHAINS, digest=""), drafter) == ""
    assert drafter.works == []


def test_a_floor_of_zero_uses_any_pair(text):
    assert PairBook(text, end(), 0.0).trouble(CHAINS, Guesser(1000)) == ""


@pytest.mark.parametrize("status", [DraftStatus.LOST, DraftStatus.REFUSED])
def test_a_test_cut_short_decides_nothing_and_is_tried_again(text, status):
    book = PairBook(text, end())
    cut = Guesser(1000, status, status_from=NUM_TOKENS - NUM_POSITIONS + 5)
    assert book.trouble(CHAINS, cut) == ""
    assert book.scores == {}
    assert book.trouble(CHAINS, Guesser(1000)) != ""


def test_a_test_cut_short_late_decides(text):
    cut = Guesser(1000, DraftStatus.LOST, status_from=NUM_TOKENS - 5)
    assert PairBook(text, end()).trouble(CHAINS, cut) != ""


def test_a_drafter_that_goes_away_meanwhile_decides_nothing(text):
    def ask(work):
        raise PeerUnavailable("gone") if not work.close else AssertionError

    with pytest.raises(AssertionError):
        PairBook(text, end()).trouble(CHAINS, ask)

    def gone(work):
        if not work.close:
            raise PeerUnavailable("gone")

    assert PairBook(text, end()).trouble(CHAINS, gone) == ""


def test_a_malformed_answer_ends_the_test(text):
    answers = Guesser()

    def ask(work):
        return None if work.plan.kind is not PlanKind.NONE else answers(work)

    score = score_pair(text, RAW, CHAINS, 5, ask)
    assert (score.num_positions, score.detail) == (0, "a malformed answer")


def test_the_text_is_long_enough_in_a_tokenizer_of_bytes_and_in_words(tmp_path):
    byte_tokenizer(384).save_pretrained(tmp_path)
    ids = text_ids(tmp_path, 384)
    assert len(ids) == NUM_TOKENS
    assert max(ids) < 384
    assert len(TEXT.split()) > NUM_TOKENS


def test_a_target_without_a_tokenizer_reads_ids_of_its_vocabulary(tmp_path):
    assert text_ids(tmp_path, VOCAB) == text_ids_without_tokenizer()


def test_choices_and_rows_are_the_targets(text):
    target = HashTarget(VOCAB)
    ids = text.token_ids
    assert len(text.choices) == len(ids) == text.rows["digest"].count
    for place in (0, 5, len(ids) - 1):
        assert text.choices[place] == int(target.path_logits(ids[: place + 1]).argmax())


def test_a_tree_without_nodes_is_no_guess(text):
    answers = Guesser()
    score = score_pair(text, RAW, CHAINS, 5, lambda w: replace(answers(w), tree=CandidateTree()))
    assert (score.num_agreed, score.num_drafted) == (0, 0)


def edit_settings(directory, **values):
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def lose_sentencepiece(directory):
    """A tokenizer of a package that is not installed; where it is, of a broken file."""
    (directory / "tokenizer.json").unlink()
    (directory / "spm_char.model").write_bytes(b"abc")
    edit_settings(directory, tokenizer_class="SpeechT5Tokenizer")


BREAK = {
    "a package is missing": lose_sentencepiece,
    "not JSON": lambda directory: (directory / "tokenizer.json").write_text("{"),
    "odd JSON": lambda directory: (directory / "tokenizer_config.json").write_text("[]"),
    "an odd setting": lambda directory: edit_settings(directory, bos_token=5),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_tokenizer_that_cannot_be_read_means_that_nothing_is_tested(tmp_path, caplog, how):
    byte_tokenizer(384).save_pretrained(tmp_path)
    BREAK[how](tmp_path)
    ids = text_ids(tmp_path, 384)
    assert "pairs are not tested" in caplog.text
    nothing = read_text(HashTarget(VOCAB), ids, ["digest"])
    drafter = Guesser(1000)
    assert PairBook(nothing, end()).trouble(CHAINS, drafter) == ""
    assert (drafter.works, drafter.closed) == ([], 0)
