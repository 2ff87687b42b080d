"""The router, statistics and the builder, without Ray running."""

import pytest
from ray.serve import Application

from cluster.config import ClusterConfig, SecuritySection
from cluster.fleet.app import build_app, wire_token
from cluster.fleet.backend import sum_nested
from cluster.fleet.messages import SourceReport, VerifierReport
from cluster.fleet.progress import Progress
from cluster.fleet.router import MIN_DRAFTED, Router
from cluster.fleet.statistics import statistics_of
from cluster.http.metrics import flatten, render
from protos.errors import ConfigError
from protos.generation import GenerationRequest, RunCounts, Speculation, SpeculationMode, TokenRun
from protos.params import SamplingParams
from verifier_service.engine.draft_counts import DraftCounts
from verifier_service.engine.stats import EngineStats
from verifier_service.planning.ledger import PlannerCounts

SOURCES = (SourceReport("ngram", 0, True), SourceReport("eagle3", 1, False))


def report(**counts: tuple[float, float]) -> VerifierReport:
    """counts: drafted and accepted totals by drafter."""
    statistics = {
        "drafted_total_by_source": {n: pair[0] for n, pair in counts.items()},
        "accepted_total_by_source": {n: pair[1] for n, pair in counts.items()},
    }
    return VerifierReport("r", 1, 100, 100, "f", True, SOURCES, statistics)


def request(speculation: Speculation | None = None) -> GenerationRequest:
    return GenerationRequest("r", (1,), SamplingParams(), (), speculation or Speculation())


def test_hopeless_drafters_are_left_out_and_come_back() -> None:
    router = Router()
    assert router.route(request()) == request()
    router.learn([report(ngram=(1000, 400), eagle3=(1000, 3))])
    assert router.route(request()).speculation.drafters == ("ngram",)
    for _ in range(30):
        router.learn([report(ngram=(1000, 400), eagle3=(1000, 3))])
    assert router.route(request()) == request()


def test_little_evidence_and_restarts_judge_nobody() -> None:
    router = Router()
    router.learn([report(eagle3=(MIN_DRAFTED - 1, 0))])
    assert router.route(request()) == request()
    router.learn([report(eagle3=(10, 9))])
    assert router.route(request()) == request()


def test_a_users_override_is_never_touched() -> None:
    router = Router()
    router.learn([report(ngram=(1000, 400), eagle3=(1000, 0))])
    for speculation in (
        Speculation(SpeculationMode.OFF),
        Speculation(SpeculationMode.FIXED, ("eagle3",)),
    ):
        assert router.route(request(speculation)).speculation == speculation


def test_statistics_become_named_and_labelled_samples() -> None:
    stats = EngineStats(
        num_running=2,
        num_draft_sessions=3,
        num_steps=5,
        accepted_by_depth=(4, 1),
        finished=(("stop", 3),),
    )
    one = statistics_of(stats, {"ngram": DraftCounts(asked=7)})
    text = render(flatten("outrider_verifier", sum_nested([one, one])))
    for line in (
        "outrider_verifier_num_running 4",
        "# TYPE outrider_verifier_num_draft_sessions gauge",
        "outrider_verifier_num_draft_sessions 6",
        "# TYPE outrider_verifier_num_steps_total counter",
        "outrider_verifier_num_steps_total 10",
        'outrider_verifier_accepted_total{depth="0"} 8',
        'outrider_verifier_finished_total{reason="stop"} 6',
        'outrider_verifier_exchange_asked_total{source="ngram"} 14',
    ):
        assert line in text.splitlines()
    assert "last_step" not in text


def test_another_verifier_goes_on_where_the_first_was_lost() -> None:
    progress = Progress(request())
    assert progress.rest() == request()
    first = RunCounts(5, 2, 1, 1, 4, 1, (1,), (("ngram", 1),), verify_s=0.5)
    assert progress.take(TokenRun("r", (7, 8), counts=first)).counts == first
    assert progress.rest().output_ids == (7, 8)
    second = RunCounts(5, 4, 1, 1, 3, 1, (1, 1), (("eagle3", 1),), verify_s=0.25)
    seen = progress.take(TokenRun("r", (9, 10), counts=second)).counts
    assert seen == RunCounts(5, 4, 2, 2, 7, 2, (2, 1), (("ngram", 1), ("eagle3", 1)), verify_s=0.75)
    assert progress.rest().output_ids == (7, 8, 9, 10)


def test_builder_makes_an_application_of_the_default_and_of_many_drafters() -> None:
    entries = [
        {"name": "one", "kind": "ngram"},
        {"name": "two", "kind": "ngram", "autoscaling": {"max_replicas": 3}},
        {"name": "here", "kind": "ngram", "colocated": True},
    ]
    for document in ({}, {"drafters": entries}):
        assert isinstance(build_app(ClusterConfig.model_validate(document)), Application)


def test_token_is_fresh_configured_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire_token(SecuritySection()) != wire_token(SecuritySection())
    assert wire_token(SecuritySection(insecure=True)) == ""
    named = SecuritySection(token_env="A_TOKEN")
    monkeypatch.setenv("A_TOKEN", "secret")
    assert wire_token(named) == "secret"
    monkeypatch.delenv("A_TOKEN")
    with pytest.raises(ConfigError):
        wire_token(named)


@pytest.mark.parametrize("value", [0, 7, 2.0, 1_234_567, 9_876_543_210, 1_234_567.25, 1e-7])
def test_metrics_show_every_digit(value: float) -> None:
    """A counter of millions that hides its last digits stands still, then jumps."""
    (line,) = [line for line in render(flatten("a", {"b": value})).splitlines() if line[0] != "#"]
    assert float(line.removeprefix("a_b ")) == value


def test_the_planners_sums_and_choices_are_metrics() -> None:
    counts = PlannerCounts(num_steps=9, num_probes=2, predicted_s=0.5)
    counts.chosen.update({"ngram chain 8": 7})
    nested = statistics_of(EngineStats(), {}, counts)
    lines = render(flatten("outrider", {"verifier": sum_nested([nested, nested])})).splitlines()
    assert "outrider_verifier_planner_num_steps_total 18" in lines
    assert "outrider_verifier_planner_num_probes_total 4" in lines
    assert "outrider_verifier_planner_predicted_s_total 1" in lines
    assert 'outrider_verifier_planner_chosen_total{plan="ngram chain 8"} 14' in lines
