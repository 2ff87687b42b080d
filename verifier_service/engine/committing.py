"""What follows the target's choices: tokens join their texts, or a request leaves.

The one place where tokens are committed and the one place where requests leave, whatever the
cause. Knows nothing of how a step was put together. Used by the engine's thread alone. Invariants:
KV of an accepted path is contiguous before its tokens join; whoever leaves gives back pages, rows
and draft sessions, and then gets exactly one last run.
"""

import logging

import torch

from protos.generation import FinishReason, TokenRun
from verifier_service.engine.batch import Batch, MergedDraft, moves
from verifier_service.engine.intake import Intake
from verifier_service.engine.ports import Drafting, Planner, RoundOutcome
from verifier_service.engine.request import Cut, RunningRequest
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.scheduler import Scheduler
from verifier_service.engine.stats import EngineCounters
from verifier_service.sampling.walk import WalkEnd
from verifier_service.step import Target

_log = logging.getLogger(__name__)


class Committing:
    """Commits what a step found, and lets requests go."""

    def __init__(
        self,
        requests: dict[int, RunningRequest],
        *,
        target: Target,
        scheduler: Scheduler,
        rows: PagedRows,
        drafting: Drafting,
        planner: Planner,
        intake: Intake,
        counters: EngineCounters,
    ) -> None:
        """requests: the engine's own, by key; who leaves is taken out of it."""
        self._requests = requests
        self._target = target
        self._scheduler = scheduler
        self._rows = rows
        self._drafting = drafting
        self._planner = planner
        self._intake = intake
        self._counters = counters

    def commit(
        self, batch: Batch, ends: list[WalkEnd | None], wait_s: float, verify_s: float
    ) -> None:
        """Tokens join their texts; accepted paths become contiguous; runs go out.

        ends: per share, where its walk ended; None for prompt chunks. wait_s, verify_s: seconds of
        the step, for the tallies of its requests.
        """
        cuts = [
            None if end is None else share.request.cut(end.choices)
            for share, end in zip(batch.shares, ends, strict=True)
        ]
        self._move_accepted(batch, ends, cuts)
        for share, draft, end, cut in zip(batch.shares, batch.merged, ends, cuts, strict=True):
            request, was_decoding = share.request, share.request.is_decoding
            if was_decoding:
                request.tally.draft_wait_s += wait_s
                request.tally.verify_s += verify_s
            else:
                request.tally.prefill_s += verify_s
                self._counters.num_prompt_tokens += share.num_rows
            if end is None or cut is None:
                request.computed_len += share.num_rows
                self._scheduler.publish(request)
            elif end.is_broken and not end.choices:
                self._break_off(request, end)
            else:
                self._join(request, draft, end, cut, was_decoding)

    def finish(
        self,
        request: RunningRequest,
        cut: Cut,
        ids: tuple[int, ...] = (),
        num_accepted: int = 0,
        error: str = "",
        is_request_fault: bool = False,
    ) -> None:
        """The request leaves: pages, rows and sessions go back, its last run goes out.

        ids: tokens of this step, `num_accepted` of them drafted, that are part of the text already.
        is_request_fault: no other verifier would do better.
        """
        reason = cut.finish_reason
        assert reason is not None, "only an end finishes a request"
        self._requests.pop(request.key, None)
        self._scheduler.remove(request)
        self._rows.remove(request.key)
        self._drafting.forget(request.key)
        self._planner.forget(request.key)
        self._counters.finished[reason.value] += 1
        self._intake.count_left()
        _log.info(
            "request %s finished: %s, %d prompt and %d output tokens in %d rounds",
            request.request.request_id,
            reason.value,
            request.tally.num_prompt,
            request.num_output,
            request.tally.num_rounds,
        )
        request.emit(
            TokenRun(
                request.request.request_id,
                ids,
                num_accepted,
                finish_reason=reason,
                stop_token_id=cut.stop_token_id,
                counts=request.tally.snapshot(request.num_output),
                error=error,
                is_request_fault=is_request_fault,
            )
        )

    def _break_off(self, request: RunningRequest, end: WalkEnd) -> None:
        """No token could be chosen: the target's fault, or what the request itself allows."""
        if end.is_targets_fault:
            self._scheduler.distrust(request)
            error = "the target returned no finite score"
        elif request.grammar is None:
            error = "the target gives no finite score to any id that the options allow"
        else:
            error = request.grammar.fault or "no id is left that the grammar and the options allow"
        self.finish(
            request,
            Cut(0, FinishReason.ERROR),
            error=error,
            is_request_fault=not end.is_targets_fault,
        )

    def _move_accepted(
        self, batch: Batch, ends: list[WalkEnd | None], cuts: list[Cut | None]
    ) -> None:
        pairs = [
            pair
            for share, end, cut in zip(batch.shares, ends, cuts, strict=True)
            if end is not None and cut is not None
            if (pair := moves(share.request, end)) is not None
        ]
        if pairs:
            self._target.move(torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs]))

    def _join(
        self, request: RunningRequest, draft: MergedDraft, end: WalkEnd, cut: Cut, drafted: bool
    ) -> None:
        base_len, ids = request.known_len, end.choices[: cut.num_committed]
        request.tokens.extend(ids)
        request.computed_len = request.known_len - 1
        if end.is_targets_fault and cut.finish_reason is not None:
            # Behind the end of the text, where plain decoding would not have looked. Elsewhere
            # what was chosen joins, and the next step looks again, as plain decoding does.
            self._scheduler.distrust(request)
        else:
            self._scheduler.publish(request)
        names = [draft.sources[node - 1] for node in end.nodes]
        request.tally.count_round(draft.tree.num_nodes, end.num_accepted, names)
        self._counters.count_round(draft.sources, end.nodes, cut.num_committed)
        num_accepted = min(end.num_accepted, cut.num_committed)
        if drafted and not end.is_broken and not request.request.params.uses_rejection:
            self._planner.observe_round(
                RoundOutcome(
                    key=request.key,
                    base_len=base_len,
                    tree=draft.tree,
                    sources=draft.sources,
                    drafts=draft.drafts,
                    choices=end.choices,
                    num_accepted=end.num_accepted,
                    num_committed=cut.num_committed,
                )
            )
        if cut.finish_reason is not None:
            self.finish(request, cut, ids, num_accepted)
        else:
            counts = request.tally.snapshot(request.num_output)
            request.emit(TokenRun(request.request.request_id, ids, num_accepted, counts=counts))
