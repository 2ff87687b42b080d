"""What an evaluation found, as a JSON object and as tables. Knows counts and questions only.

tau is the ratio of two sums, over all texts of a group, as `outrider bench acceptance` forms it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from cluster.tools.bench_prompts import Question
from drafter_service.replay_counts import ReplayCounts, total

Counts = dict[str, dict[str, list[ReplayCounts]]]
"""By head, shape and text."""

_DIGITS: Final = 4
Before = TypeVar("Before")
After = TypeVar("After")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """found: by temperature. facts: what else belongs into the report."""

    questions: Sequence[Question]
    found: Mapping[float, Counts]
    facts: Mapping[str, object]

    @property
    def first_temperature(self) -> float:
        """The one that `tau` at the top is of: greedy where it was asked for."""
        return 0.0 if 0.0 in self.found else next(iter(self.found))

    def report(self) -> dict[str, object]:
        """`tau` by head and shape, then a section for every temperature."""
        sections = {f"{t:g}": self._section(counts) for t, counts in self.found.items()}
        first = f"{self.first_temperature:g}"
        return {
            "tau": sections[first]["tau"],
            "temperature": self.first_temperature,
            "questions": len(self.questions),
            **self.facts,
            "temperatures": sections,
        }

    def tables(self) -> Iterator[str]:
        """Lines of Markdown: tau by category, then acceptance by depth, for every temperature."""
        for temperature, counts in self.found.items():
            names = [(head, shape) for head, shapes in counts.items() for shape in shapes]
            yield f"tau at temperature {temperature:g}, {len(self.questions)} questions"
            yield ""
            yield _row("category", [f"{head} {shape}" for head, shape in names])
            yield _row("---", ["---:"] * len(names))
            for category in self._groups(_category):
                taus = self._taus(counts, _category, category)
                yield _row(category, [f"{taus[head][shape]:.2f}" for head, shape in names])
            whole = [total(counts[head][shape]) for head, shape in names]
            yield _row("all", [f"{one.tau:.3f}" for one in whole])
            deepest = max((len(one.acceptance_by_depth) for one in whole), default=0)
            for depth in range(deepest):
                shares = [one.acceptance_by_depth[depth : depth + 1] for one in whole]
                cells = [f"{100 * share[0]:.0f} %" if share else "" for share in shares]
                yield _row(f"depth {depth + 1} accepted", cells)
            yield ""

    def _section(self, counts: Counts) -> dict[str, object]:
        sums = _each(counts, total)
        return {
            "tau": _each(sums, lambda one: _rounded(one.tau)),
            "tau_mean_of_questions": _each(counts, _mean_tau),
            "by_category": {
                name: self._taus(counts, _category, name) for name in self._groups(_category)
            },
            "by_subtask": {
                name: self._taus(counts, _subtask, name) for name in self._groups(_subtask)
            },
            "acceptance_by_depth": _each(
                sums, lambda one: [_rounded(share) for share in one.acceptance_by_depth]
            ),
            "drafted_per_round": _each(
                sums, lambda one: round(one.num_drafted / max(one.num_rounds, 1), 2)
            ),
            "accepted_by_source": _each(sums, lambda one: dict(one.accepted_by_source)),
            "counts": _each(sums, _plain),
        }

    def _groups(self, group: Callable[[Question], str]) -> list[str]:
        return list(dict.fromkeys(group(question) for question in self.questions))

    def _taus(
        self, counts: Counts, group: Callable[[Question], str], name: str
    ) -> dict[str, dict[str, float]]:
        places = [i for i, question in enumerate(self.questions) if group(question) == name]
        return _each(counts, lambda found: _rounded(total(found[i] for i in places).tau))


def _each(
    table: Mapping[str, Mapping[str, Before]], make: Callable[[Before], After]
) -> dict[str, dict[str, After]]:
    return {
        head: {shape: make(value) for shape, value in shapes.items()}
        for head, shapes in table.items()
    }


def _subtask(question: Question) -> str:
    return question.subtask


def _category(question: Question) -> str:
    return question.category


def _mean_tau(found: Sequence[ReplayCounts]) -> float:
    return _rounded(sum(one.tau for one in found) / max(len(found), 1))


def _plain(one: ReplayCounts) -> dict[str, int]:
    return {
        "rounds": one.num_rounds,
        "draft_rounds": one.num_draft_rounds,
        "drafted": one.num_drafted,
        "accepted": one.num_accepted,
        "committed": one.num_committed,
    }


def _rounded(value: float) -> float:
    return round(value, _DIGITS)


def _row(first: str, cells: Sequence[str]) -> str:
    return "| " + " | ".join([first, *cells]) + " |"
