"""Trace records as maps and back: the format of a trace file.

    {"format": "outrider-trace", "version": 1, "writer", "target", "digest", "fingerprint",
     "wall_s", "clock_s"}                                      the header, once
    {"kind": "step", ...}                                      a step, before what belongs to it
    {"kind": "opened" | "chunk" | "round" | "preempted" | "closed", "id", "key", ...}
    {"kind": "lost", "num_steps"}

A chunk or round belongs to the newest step before it. Knows no file. Whatever a map holds, reading
it gives a record or None.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

from protos.errors import ConfigError, MalformedTree
from protos.exchange import Plan, PlanKind
from protos.generation import RunCounts
from protos.tree import CandidateTree
from verifier_service.trace.records import (
    Asked,
    Chunk,
    Closed,
    Drafted,
    Header,
    Lost,
    Opened,
    Preempted,
    Record,
    Round,
    StepFacts,
)

FORMAT: Final = "outrider-trace"
VERSION: Final = 1

Frame = dict[str, object]
_STEP_FIELDS: Final = tuple(field.name for field in fields(StepFacts))
_HEADER_FIELDS: Final = tuple(field.name for field in fields(Header))
_COUNT_FIELDS: Final = tuple(field.name for field in fields(RunCounts))


def header_frame(header: Header) -> Frame:
    """The first map of a file."""
    told = {name: getattr(header, name) for name in _HEADER_FIELDS}
    return {"format": FORMAT, "version": VERSION, **told}


def read_header(frame: Mapping[str, Any]) -> Header:
    """Raises ConfigError when the map begins no trace that this version reads."""
    if frame.get("format") != FORMAT:
        raise ConfigError("no trace")
    if frame.get("version") != VERSION:
        raise ConfigError(f"a trace of version {frame.get('version')}, not {VERSION}")
    try:
        return Header(
            writer=str(frame["writer"]),
            target=str(frame["target"]),
            digest=str(frame["digest"]),
            fingerprint=str(frame["fingerprint"]),
            wall_s=float(frame["wall_s"]),
            clock_s=float(frame["clock_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("a trace whose header is damaged") from error


class Encoder:
    """Records to maps; a step is written once, before its first record."""

    def __init__(self) -> None:
        self._step: StepFacts | None = None

    def frames(self, record: Record | Lost) -> Iterator[Frame]:
        """The maps of one record, in order."""
        if isinstance(record, Lost):
            yield {"kind": "lost", "num_steps": record.num_steps}
            return
        if isinstance(record, Chunk | Round) and record.step is not self._step:
            self._step = record.step
            yield {"kind": "step", **{name: getattr(record.step, name) for name in _STEP_FIELDS}}
        kind = type(record).__name__.lower()
        yield {"kind": kind, "id": record.request_id, "key": record.key, **_body(record)}


def _body(record: Record) -> Frame:
    names: tuple[str, ...]
    match record:
        case Opened():
            names = ("arrived_s", "num_prompt", "num_output", "settings", "mode")
        case Chunk():
            names = ("start", "num_rows", "num_cached", "queue_s")
        case Preempted():
            names = ("at_s", "base_len")
        case Closed():
            counts = {name: getattr(record.counts, name) for name in _COUNT_FIELDS}
            closed = {"at_s": record.at_s, "reason": record.reason, "error": record.error}
            return {**closed, "counts": counts}
        case Round():
            return _round(record)
    return {name: getattr(record, name) for name in names}


def _round(record: Round) -> Frame:
    tree, proposers = record.tree, list(dict.fromkeys(record.sources))
    return {
        "number": record.number,
        "start": record.start,
        "num_rows": record.num_rows,
        "base_len": record.base_len,
        "is_prompt": record.is_prompt,
        "asked": [
            (a.source, a.plan.kind.value, a.plan.depth, a.plan.width, a.plan.nodes)
            for a in record.asked
        ],
        "drafted": [
            (d.source, d.num_nodes, d.latency_s, d.drafter_s, d.was_late) for d in record.drafted
        ],
        "tokens": tree.tokens,
        "parents": tree.parents,
        "scores": tree.scores,
        "proposers": proposers,
        "sources": [proposers.index(names) for names in record.sources],
        "nodes": record.nodes,
        "choices": record.choices,
        "num_committed": record.num_committed,
        "num_cached": record.num_cached,
        "queue_s": record.queue_s,
    }


class Decoder:
    """Maps to records, in the order of a file."""

    def __init__(self) -> None:
        self._step: StepFacts | None = None

    def record(self, frame: Mapping[str, Any]) -> Record | Lost | None:
        """The record of a map; None for a step, and for what cannot be understood."""
        try:
            return self._record(frame)
        except (KeyError, IndexError, OverflowError, TypeError, ValueError, MalformedTree):
            return None

    def _record(self, frame: Mapping[str, Any]) -> Record | Lost | None:
        kind = frame["kind"]
        if kind == "step":
            self._step = None
            self._step = _read_step(frame)
            return None
        if kind == "lost":
            return Lost(int(frame["num_steps"]))
        whose = str(frame["id"]), int(frame["key"])
        if kind == "opened":
            return Opened(
                *whose,
                arrived_s=float(frame["arrived_s"]),
                num_prompt=int(frame["num_prompt"]),
                num_output=int(frame["num_output"]),
                settings=tuple((str(name), str(value)) for name, value in frame["settings"]),
                mode=str(frame["mode"]),
            )
        if kind == "preempted":
            return Preempted(*whose, float(frame["at_s"]), int(frame["base_len"]))
        if kind == "closed":
            at_s, told = float(frame["at_s"]), _counts(frame["counts"])
            return Closed(*whose, at_s, str(frame["reason"]), str(frame["error"]), told)
        if self._step is None:
            return None
        if kind == "chunk":
            return Chunk(
                *whose,
                step=self._step,
                start=int(frame["start"]),
                num_rows=int(frame["num_rows"]),
                num_cached=int(frame["num_cached"]),
                queue_s=float(frame["queue_s"]),
            )
        return _read_round(whose, self._step, frame) if kind == "round" else None


def _read_step(frame: Mapping[str, Any]) -> StepFacts:
    return StepFacts(
        number=int(frame["number"]),
        at_s=float(frame["at_s"]),
        step_s=float(frame["step_s"]),
        wait_s=float(frame["wait_s"]),
        forward_s=float(frame["forward_s"]),
        choose_s=float(frame["choose_s"]),
        num_requests=int(frame["num_requests"]),
        num_rows=int(frame["num_rows"]),
        why=str(frame["why"]),
        plain_s=float(frame["plain_s"]),
        predicted_s=float(frame["predicted_s"]),
        expected=float(frame["expected"]),
    )


def _read_round(whose: tuple[str, int], step: StepFacts, frame: Mapping[str, Any]) -> Round:
    proposers = [tuple(map(str, names)) for names in frame["proposers"]]
    tree = CandidateTree(
        tuple(map(int, frame["tokens"])),
        tuple(map(int, frame["parents"])),
        tuple(map(float, frame["scores"])),
    )
    sources = tuple(proposers[index] for index in frame["sources"])
    nodes, choices = (tuple(map(int, frame[name])) for name in ("nodes", "choices"))
    if len(sources) != tree.num_nodes or any(not 1 <= n <= tree.num_nodes for n in nodes):
        raise ValueError("a walk that does not fit its tree")
    return Round(
        *whose,
        step,
        number=int(frame["number"]),
        start=int(frame["start"]),
        num_rows=int(frame["num_rows"]),
        base_len=int(frame["base_len"]),
        is_prompt=bool(frame["is_prompt"]),
        asked=tuple(
            Asked(str(source), Plan(PlanKind(kind), int(depth), int(width), int(nodes)))
            for source, kind, depth, width, nodes in frame["asked"]
        ),
        drafted=tuple(
            Drafted(str(source), int(count), float(latency_s), float(drafter_s), bool(late))
            for source, count, latency_s, drafter_s, late in frame["drafted"]
        ),
        tree=tree,
        sources=sources,
        nodes=nodes,
        choices=choices,
        num_committed=int(frame["num_committed"]),
        num_cached=int(frame["num_cached"]),
        queue_s=float(frame["queue_s"]),
    )


def _counts(frame: Mapping[str, Any]) -> RunCounts:
    """Counts that one version knows and another does not are left at their defaults."""
    told = {name: frame[name] for name in _COUNT_FIELDS if name in frame}
    told["accepted_by_depth"] = tuple(map(int, frame["accepted_by_depth"]))
    told["accepted_by_source"] = tuple((str(k), int(v)) for k, v in frame["accepted_by_source"])
    return RunCounts(**told)
