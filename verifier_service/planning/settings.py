"""The planner's few numbers. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """How bold the planner is.

    extra_share: extra time a step may cost above a plain one without any gain to pay from.
    plain_every: one step in so many is plain, to keep the comparison honest. choose_every: steps
    between two choices among all options, and one more for every request of the step; between
    them only node counts are decided. max_nodes:
    draft nodes of one request. depths: depths asked of drafters that pay per level. hysteresis:
    how much better another option must promise to be before the choice moves; feeding_margin: and
    when drafters would have to absorb requests for it first. probe_depth: chain
    asked of a source that is switched off; with the anchor it fills the four rows that cost what
    one costs. fixed_deadline_s: wait for requests whose plan is given. grant_steps: plain steps
    that may be lost before anything was gained. loan_steps: plain steps that one request may
    lose of what others gained. fade_per_step: trust kept in a source per step without it.
    price_probe_every: steps after which a size of step that was not tried is tried, if drafts are
    at hand and the bank can pay a plain step: a price that was measured wrong must not stay.
    """

    extra_share: float = 0.05
    plain_every: int = 100
    choose_every: int = 4
    max_nodes: int = 31
    depths: tuple[int, ...] = (1, 2, 3, 4, 6)
    hysteresis: float = 0.03
    feeding_margin: float = 0.1
    probe_depth: int = 3
    fixed_deadline_s: float = 0.25
    grant_steps: float = 2.0
    loan_steps: float = 4.0
    fade_per_step: float = 0.998
    price_probe_every: int = 32
