"""`ngram` as an algorithm: one growing index per session, no model and no rows."""

from collections.abc import Sequence

from drafter_service.ngram.index import NgramIndex, draft_chain, draft_tree, ranked_along
from drafter_service.service import Job, MakeRoom, Outcome
from drafter_service.session import Session
from protos.exchange import Plan, PlanKind, SessionOpen
from protos.tree import CandidateTree


class NgramSession(Session):
    """A session with the index of its tokens."""

    def __init__(self, session_id: int, opened: SessionOpen) -> None:
        super().__init__(session_id, opened)
        self.index = NgramIndex()

    def extend(self, tokens: tuple[int, ...]) -> None:
        """Append committed tokens and index them."""
        super().extend(tokens)
        self.index.extend(self.tokens)

    def truncate(self, base_len: int) -> None:
        """Cut back; rare, so the index is simply made again."""
        super().truncate(base_len)
        self.index.clear()
        self.index.extend(self.tokens)

    def draft(self, plan: Plan) -> CandidateTree:
        """The planned chain or tree; empty when the last token never stood here before."""
        if plan.kind is PlanKind.TREE:
            return draft_tree(self.index, self.tokens, plan.depth, plan.width, plan.nodes)
        return draft_chain(self.index, self.tokens, plan.depth)

    def ranked(self, tree: CandidateTree) -> tuple[tuple[int, ...], ...]:
        """What else could have stood along the draft's best path."""
        path = [tree.tokens[node - 1] for node in tree.best_path()]
        return ranked_along(self.index, self.tokens, path)


class Ngram:
    """Chains and trees by prompt look-up."""

    def create(self, session_id: int, opened: SessionOpen) -> NgramSession:
        """An empty session."""
        return NgramSession(session_id, opened)

    def release(self, session: NgramSession) -> None:
        """Nothing is held outside the session."""

    def run(self, jobs: Sequence[Job[NgramSession]], make_room: MakeRoom) -> list[Outcome]:
        """One look-up per job that asks for a draft."""
        outcomes: list[Outcome] = []
        for job in jobs:
            if job.plan.kind is PlanKind.NONE:
                outcomes.append(Outcome())
                continue
            tree = job.session.draft(job.plan)
            outcomes.append(Outcome(tree=tree, ranked_ids=job.session.ranked(tree)))
        return outcomes
