"""`outrider explain` on files made by hand: what it prints, finds, tolerates and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trace_house import header, made_records, write_file

from cluster.tools.cli import main
from protos.errors import ConfigError, InvalidRequest
from tests.tiny import byte_tokenizer
from verifier_service.frames import pack_frame
from verifier_service.trace.codec import Decoder
from verifier_service.trace.reading import TraceFolder
from verifier_service.trace.records import Closed, Lost, Opened, Round
from verifier_service.trace.story import Story, pace, spent

GOLDEN = """\
request cmpl-feed-0, 2027-01-15 08:00:00 UTC
  verifier aaaa0001: tiny, fingerprint fingerprint-of-i
  21 prompt tokens; temperature 0.7, seed 5, max_tokens 9; speculation auto
  5 tokens in 3 rounds, ended: stop

trees: > accepted, + the target's own next token, - agreed with but behind the end of the text

prompt: tokens 0 to 15 in 5.0 ms; wait 0.0, forward 4.0, choices 0.5, rest 0.5 ms; 1 request and \
16 rows in the step

round 1: 21 tokens known, 1 committed in 20.0 ms
  computed  tokens 16 to 20
    + 39
  times     wait 0.0, forward 19.0, choices 0.5, rest 0.5 ms; 1 request and 5 rows in the step

round 2: 22 tokens known, 2 of 4 drafted accepted, 3 committed in 50.0 ms
  asked     eagle3 tree of 6 nodes, 4 deep, 2 wide; ngram chain of 8; slow chain of 2  \
(planner: eagle3/depth4/tree, 2.5 tokens expected)
  answered  eagle3 3 nodes in 6.1 ms (4.8 in the drafter); ngram 2 nodes in 0.1 ms, \
to an older question; slow nothing
    > 40  eagle3, ngram -0.10
    >   42  ngram -0.90
    +     50
        41  eagle3 -0.50
      43  eagle3 -2.00
  times     wait 7.5, forward 40.0, choices 1.5, rest 1.0 ms; 2 requests and 9 rows in the step

preempted with 25 tokens: its pages were needed

round 3: 25 tokens known, 1 committed in 40.0 ms
    + 2
  times     wait 0.0, forward 38.0, choices 1.0, rest 1.0 ms; 1 request and 1 row in the step

where the time went               ms   share
  in the queue                   6.0     4 %
  prompt                        25.0    17 %
  waiting for drafts             7.5     5 %
  verification: forward         78.0    52 %
  verification: choices          2.5     2 %
  rest of its steps              2.0     1 %
  outside its steps             29.0    19 %
  in all                       150.0
  slowest rounds: 2 (50.0), 3 (40.0)
  other requests in its steps: 0.5 on average, 1 at most

rounds with drafts      1, 3.00 tokens each, 16.7 ms of step a token
rounds without          1, 1.00 tokens each, 40.0 ms of step a token
a token with drafts came 2.40 times as fast
the planner thinks that a step without drafts verifies in 31.0 ms

drafters        asked  replies  late  drafted  accepted   share  reply ms  drafting
  ngram             1        1     1        2         2   100 %       0.1       0.0
  eagle3            1        1     0        3         1    33 %       6.1       4.8
  slow              1        0     0        0         0       -       0.0       0.0

"""


def explain(*words: object) -> int:
    return main(["explain", *map(str, words)])


def only(folder: Path, request_id: str = "cmpl-feed-0") -> Story:
    (story,) = TraceFolder(folder).stories(request_id)
    return story


def test_explain_draws_every_round_and_sums_the_milliseconds(tmp_path, capsys):
    write_file(tmp_path, made_records())
    assert explain("cmpl-feed", "--traces", tmp_path) == 0
    assert capsys.readouterr() == (GOLDEN, "")


def test_rounds_and_sums_can_be_asked_for_alone(tmp_path, capsys):
    write_file(tmp_path, made_records())
    assert explain("cmpl-feed", "--traces", tmp_path, "--rounds", "3") == 0
    out = capsys.readouterr().out
    assert "round 3" in out
    assert "round 2" not in out
    assert explain("cmpl-feed", "--traces", tmp_path, "--summary") == 0
    out = capsys.readouterr().out
    assert "round 3" not in out
    assert "where the time went" in out
    assert explain("cmpl-feed", "--traces", tmp_path, "--rounds", "x") == 1
    assert "--rounds" in capsys.readouterr().err


def test_tokens_are_shown_as_text_when_a_tokenizer_is_given(tmp_path, capsys):
    target = tmp_path / "target"
    tokenizer = byte_tokenizer(384)
    tokenizer.save_pretrained(target)
    (target / "config.json").write_text("{}")
    write_file(tmp_path / "traces", made_records())
    assert explain("cmpl", "--traces", tmp_path / "traces", "--tokenizer", target) == 0
    out = capsys.readouterr().out
    assert f"> {tokenizer.decode([40])!r}  eagle3, ngram -0.10" in out
    assert "+ '<|im_end|>'" in out


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] == "torch" else find(name, *rest)
)
from cluster.tools.cli import main

status = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(status)
"""


def test_explain_needs_no_torch_with_or_without_a_tokenizer_directory(tmp_path):
    target, traces = tmp_path / "target", tmp_path / "traces"
    byte_tokenizer(384).save_pretrained(target)
    (target / "config.json").write_text("{}")
    write_file(traces, made_records())
    for options, shown in ((), "> 40  eagle3"), (("--tokenizer", target), "+ '<|im_end|>'"):
        words = map(str, ("explain", "cmpl", "--traces", traces, *options))
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout


def test_json_says_the_same_to_machines(tmp_path, capsys):
    write_file(tmp_path, made_records())
    assert explain("cmpl-feed-0", "--traces", tmp_path, "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["ids"] == [39, 40, 42, 50, 2]
    assert told["spent_ms"]["total"] == 150.0
    assert told["drafters"]["eagle3"]["drafted"] == 3
    assert [part["kind"] for part in told["parts"]] == [
        "chunk",
        "round",
        "round",
        "preempted",
        "round",
    ]
    assert told["parts"][2]["tree"]["parents"] == [0, 1, 1, 0]
    assert told["settings"]["seed"] == "5"


def test_without_a_request_its_ids_are_listed(tmp_path, capsys):
    write_file(tmp_path, [*made_records("cmpl-b"), *made_records("cmpl-\x1b[2J", 4)])
    assert explain("--traces", tmp_path) == 0
    assert capsys.readouterr().out == "cmpl-b\n'cmpl-\\x1b[2J'\n"


def test_an_id_that_is_no_unicode_is_listed_and_found_as_it_came_and_as_it_stands(tmp_path, capsys):
    write_file(tmp_path, [*made_records("cmpl-\ud800"), *made_records("cmpl-b", 4)])
    assert explain("--traces", tmp_path) == 0
    assert capsys.readouterr().out == "cmpl-\\ud800\ncmpl-b\n"
    for name in ("cmpl-\ud800", "cmpl-\\ud800"):
        assert explain(name, "--traces", tmp_path) == 0
        out, err = capsys.readouterr()
        assert (out, err) == (GOLDEN.replace("cmpl-feed-0", "cmpl-\\ud800"), "")
    assert explain("cmpl-\udcff", "--traces", tmp_path) == 1
    assert r"'cmpl-\\udcff'; there are cmpl-\ud800, cmpl-b" in capsys.readouterr().err


def test_an_id_that_is_unknown_or_may_be_several_says_which_exist(tmp_path, capsys):
    write_file(tmp_path, [*made_records("cmpl-ab-0"), *made_records("chatcmpl-ab-0", 4)])
    write_file(tmp_path, made_records("cmpl-abc-0"), writer="bbbb0002")
    assert explain("nobody", "--traces", tmp_path) == 1
    told = capsys.readouterr().err
    assert all(name in told for name in ("nobody", "cmpl-ab-0", "chatcmpl-ab-0", "cmpl-abc-0"))
    assert explain("cmpl-a", "--traces", tmp_path) == 1
    told = capsys.readouterr().err
    assert "cmpl-ab-0, cmpl-abc-0" in told
    assert "chatcmpl" not in told
    assert explain("cmpl-ab", "--traces", tmp_path) == 1
    assert TraceFolder(tmp_path).find("cmpl-abc") == ["cmpl-abc-0"]


def test_a_reply_of_several_choices_is_explained_whole(tmp_path):
    records = [*made_records("cmpl-ab-0"), *made_records("cmpl-ab-1", 4), *made_records("x", 5)]
    write_file(tmp_path, records)
    assert TraceFolder(tmp_path).find("cmpl-ab") == ["cmpl-ab-0", "cmpl-ab-1"]
    with pytest.raises(InvalidRequest):
        TraceFolder(tmp_path).find("cmpl-a")


def test_choices_come_in_their_order_whichever_verifier_was_first(tmp_path):
    names = [f"cmpl-ab-{number}" for number in (10, 1, 0, 2)]
    write_file(tmp_path, [made_records(name, n)[0] for n, name in enumerate(names)])
    expected = [f"cmpl-ab-{number}" for number in (0, 1, 2, 10)]
    assert TraceFolder(tmp_path).find("cmpl-ab") == expected


def test_a_name_that_means_a_reply_and_another_is_asked_about(tmp_path):
    names = ("cmpl-ab-0", "cmpl-ab2")
    write_file(tmp_path, [made_records(name, n)[0] for n, name in enumerate(names)])
    with pytest.raises(InvalidRequest, match="may be any of"):
        TraceFolder(tmp_path).find("cmpl-ab")


def test_many_ids_are_not_listed_all(tmp_path):
    write_file(tmp_path, [made_records(f"cmpl-{n:03}", n)[0] for n in range(100)])
    with pytest.raises(InvalidRequest, match="cmpl-099 and 80 older ones"):
        TraceFolder(tmp_path).find("other")


def test_a_torn_last_record_is_passed_over_and_told(tmp_path, capsys):
    path = write_file(tmp_path, made_records())
    whole = path.read_bytes()
    story = only(tmp_path)
    for size in range(len(whole) - 1, len(whole) - 150, -7):
        path.write_bytes(whole[:size])
        torn = only(tmp_path)
        assert torn.closed is None
        assert torn.parts == story.parts[: len(torn.parts)]
    assert explain("cmpl-feed", "--traces", tmp_path) == 0
    shown = capsys.readouterr()
    assert "5 tokens so far: it runs, or its verifier was killed" in shown.out
    assert "bytes at its end are no whole record" in shown.err


def test_files_that_are_no_traces_are_told_and_cost_nothing(tmp_path, capsys):
    write_file(tmp_path, made_records())
    (tmp_path / "trace-1.msgpack").write_bytes(b"")
    (tmp_path / "trace-2.msgpack").write_bytes(pack_frame({"format": "outrider-answers"}))
    newer = {"format": "outrider-trace", "version": 2}
    (tmp_path / "trace-3.msgpack").write_bytes(pack_frame(newer))
    (tmp_path / "trace-4.msgpack").write_bytes(b"\xc1 no msgpack")
    (tmp_path / "notes.txt").write_text("mine")
    assert explain("cmpl-feed", "--traces", tmp_path, "--summary") == 0
    err = capsys.readouterr().err
    assert "trace-1.msgpack: no whole header" in err
    assert "trace-2.msgpack: no trace" in err
    assert "trace-3.msgpack: a trace of version 2, not 1" in err
    assert "trace-4.msgpack: no whole header" in err


def test_a_file_that_is_removed_meanwhile_is_told(tmp_path):
    path = write_file(tmp_path, made_records())
    folder = TraceFolder(tmp_path)
    path.unlink()
    assert folder.stories("cmpl-feed-0") == []
    assert folder.notes == [f"{path.name}: No such file or directory"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "x", None, []])
def test_a_map_of_wrong_values_is_no_record(value):
    assert Decoder().record({"kind": "lost", "num_steps": value}) is None


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no directory"):
        TraceFolder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds none"):
        TraceFolder(tmp_path)


def test_a_story_goes_on_in_the_next_file_and_may_have_lost_its_beginning(tmp_path):
    records = made_records()
    first = write_file(tmp_path, records[:3])
    first = first.rename(first.with_name(first.name.replace("0001.", "0000.")))
    write_file(tmp_path, records[3:])
    story = only(tmp_path)
    assert [story.opened, *story.parts, story.closed] == records
    first.unlink()
    cut = only(tmp_path)
    assert cut.opened is None
    assert cut.num_missing == 1
    assert cut.ids == (40, 42, 50, 2)


def test_a_request_that_another_verifier_went_on_with_is_told_in_order(tmp_path, capsys):
    whose = "cmpl-feed-0", 9
    opened = Opened(*whose, 103.0, 21, 4, (), "off")
    write_file(tmp_path, [opened], writer="0000beef")
    write_file(tmp_path, made_records()[:4])
    first, second = TraceFolder(tmp_path).stories("cmpl-feed-0")
    assert (first.header.writer, second.header.writer) == ("aaaa0001", "0000beef")
    assert explain("cmpl-feed-0", "--traces", tmp_path, "--summary") == 0
    assert "21 prompt tokens and 4 of output" in capsys.readouterr().out


def test_lost_steps_are_told(tmp_path, capsys):
    records = made_records()
    write_file(tmp_path, [*records[:3], Lost(12), *records[4:]])
    assert explain("cmpl-feed-0", "--traces", tmp_path, "--summary") == 0
    out = capsys.readouterr().out
    assert "12 steps of this verifier could not be recorded" in out
    assert "not recorded: 1 round" in out


def test_what_was_agreed_behind_the_end_is_not_shown_as_committed(tmp_path, capsys):
    *before, walked = made_records()[:4]
    assert isinstance(walked, Round)
    ended = Round(**{name: getattr(walked, name) for name in Round.__slots__} | {
        "num_committed": 1})  # fmt: skip
    write_file(tmp_path, [*before, ended])
    assert explain("cmpl-feed-0", "--traces", tmp_path) == 0
    out = capsys.readouterr().out
    assert "    > 40" in out
    assert "    -   42" in out
    assert "    -     50" in out


def test_a_request_that_never_ran_spent_its_time_in_the_queue():
    opened = Opened("q", 1, 100.0, 4, 0, (), "auto")
    closed = Closed("q", 1, 102.5, "cancelled", "", made_records()[-1].counts)
    where = spent(Story(header(), "q", opened, (), closed))
    assert where.queue_s == where.total_s == 2.5
    assert where.elsewhere_s == 0.0


def test_the_parts_add_up_to_the_whole():
    opened, *parts, closed = made_records()
    story = Story(header(), "cmpl-feed-0", opened, tuple(parts), closed)
    where = spent(story)
    parts_s = sum(getattr(where, name) for name in type(where).__slots__ if name != "total_s")
    assert parts_s == pytest.approx(where.total_s)
    drafted, plain = pace(story, drafted=True), pace(story, drafted=False)
    assert (drafted.num_tokens, plain.num_tokens) == (3, 1)
