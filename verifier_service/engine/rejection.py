"""Requests that use rejection: what is asked for them, and which chain is tested.

They go around the planner. Its plans, admissions and evidence look at drafted tokens and their
scores, and a chain that is kept, cut or asked for because of what it holds biases this rule (TV
0.18 in the table of EXACTNESS.md). So one source that gives q drafts a chain of the same length
every round, and room alone may cut it. Knows no logits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from protos.exchange import Plan, PlanKind
from protos.generation import SpeculationMode
from protos.tree import chain
from verifier_service.engine.batch import MergedDraft
from verifier_service.engine.ports import Draft, SequenceView, SourceInfo, SourcePlan
from verifier_service.planning.asking import clamp
from verifier_service.sampling.rejection import draw_again

DEFAULT_DEPTH: Final = 4
MIN_WAIT_S: Final = 0.25
"""How long a step is held for a chain while its source's replies are not known."""


def chain_plans(view: SequenceView, sources: Sequence[SourceInfo]) -> tuple[SourcePlan, ...]:
    """A chain from the first source that gives q, of those that the request allows; or nothing.

    For a request still in its prompt too: the source is fed.
    """
    speculation = view.speculation
    if speculation.mode is SpeculationMode.OFF:
        return ()
    for info in sources:
        if not info.capabilities.gives_q:
            continue
        if speculation.drafters and info.name not in speculation.drafters:
            continue
        depth = speculation.plan.depth if speculation.plan else DEFAULT_DEPTH
        kinds = info.capabilities.plan_kinds
        kind = PlanKind.CHAIN if PlanKind.CHAIN in kinds else PlanKind.BLOCK
        plan = clamp(Plan(kind, depth), info, view.remaining)
        return (SourcePlan(info.name, plan),) if plan.kind is not PlanKind.NONE else ()
    return ()


def wait_s(plans: Sequence[tuple[SourcePlan, ...]], sources: Sequence[SourceInfo]) -> float:
    """How long a step may be held for these chains; 0 when there are none."""
    asked = {plan.source for each in plans for plan in each}
    waits = [2.0 * info.reply_p95_s for info in sources if info.name in asked]
    return max([MIN_WAIT_S, *waits]) if asked else 0.0


def chain_to_test(drafts: Sequence[Draft], most: int) -> MergedDraft:
    """The first of these chains, or as much of it as `most` nodes allow."""
    if not drafts:
        return MergedDraft()
    draft = drafts[0]
    names = ((draft.source,),) * draft.tree.num_nodes
    whole = MergedDraft(draft.tree, names, (draft,), draft.q)
    count = max(min(draft.tree.num_nodes, most), 0)
    return whole.cut_to(draft.tree.keep(range(1, count + 1)))


def honest_chain(view: SequenceView, draft: Draft, vocab_size: int) -> Draft | None:
    """The draft with every token drawn again here (`draw_again`); None when it has no usable q."""
    tree, q = draft.tree, draft.q
    if not tree.is_chain or len(q) != tree.num_nodes or not q:
        return None
    if max(max(part.ids) for part in q) >= vocab_size:
        return None
    drawn = draw_again(tree.tokens, q, view.params, view.base_len)
    if drawn == tree.tokens:
        return draft
    return replace(draft, tree=chain(drawn, tree.scores[: len(drawn)]), q=q[: len(drawn)])
