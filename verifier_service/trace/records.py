"""What a trace says, as values: a request opens, has chunks and rounds, perhaps waits, and closes.

Knows no file and no engine. Times are seconds; `at_s` and `arrived_s` are readings of the
verifier's monotonic clock, which `Header` ties to the time of day. Token ids of the prompt are
not here; those of drafts and of the answer are.

    Opened  Chunk*  Round  Round ...  [Preempted  Chunk*  Round ...]  Closed
            the prompt     one a step
"""

from dataclasses import dataclass

from protos.exchange import Plan
from protos.generation import RunCounts
from protos.tree import CandidateTree


@dataclass(frozen=True, slots=True)
class Header:
    """Who wrote a file. writer: a random name of the engine; wall_s was read at clock_s."""

    writer: str
    target: str
    digest: str
    fingerprint: str
    wall_s: float
    clock_s: float

    def time_of(self, at_s: float) -> float:
        """Time of day (seconds since the epoch) of a reading of the clock."""
        return self.wall_s + at_s - self.clock_s


@dataclass(frozen=True, slots=True)
class Opened:
    """A request came in. num_output: committed tokens that it arrived with.

    settings: what was asked for and differs from the defaults, as (name, value) for people;
    mode: who decides about its drafts.
    """

    request_id: str
    key: int
    arrived_s: float
    num_prompt: int
    num_output: int
    settings: tuple[tuple[str, str], ...]
    mode: str


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step of the engine, told once for all its requests. at_s: its end.

    step_s is the whole of it; wait_s, forward_s, choose_s are parts. On a GPU the forward goes on
    while the choices are being drawn, and what is left of it counts as choose_s. why, plain_s
    (verification without drafts), predicted_s (with them) and expected (tokens of all requests)
    are what the planner says, if it says anything: empty and 0 otherwise.
    """

    number: int
    at_s: float
    step_s: float
    wait_s: float
    forward_s: float
    choose_s: float
    num_requests: int
    num_rows: int
    why: str = ""
    plain_s: float = 0.0
    predicted_s: float = 0.0
    expected: float = 0.0

    @property
    def rest_s(self) -> float:
        """Scheduling, planning, merging, committing."""
        return max(self.step_s - self.wait_s - self.forward_s - self.choose_s, 0.0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens [start, start + num_rows) were computed, and nothing was committed.

    num_cached: tokens of the prompt found in the prefix cache. queue_s: in the queue so far.
    """

    request_id: str
    key: int
    step: StepFacts
    start: int
    num_rows: int
    num_cached: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What one source was asked for; a plan of kind none feeds it."""

    source: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one source answered, before admission. latency_s: of the reply, drafter_s of it inside
    the drafter. was_late: to a question of an earlier round."""

    source: str
    num_nodes: int
    latency_s: float
    drafter_s: float
    was_late: bool


@dataclass(frozen=True, slots=True)
class Round:
    """One round: what was asked, the tree that was verified, the walk through it.

    base_len: committed tokens before it. Known tokens [start, start + num_rows) were computed:
    the anchor alone, or (is_prompt) the end of a prompt. sources: per draft node, who proposed it.
    nodes: accepted ones, from the anchor down; choices: their tokens, then the bonus, of which
    the first num_committed joined the text. number: rounds of the request so far, this included.
    """

    request_id: str
    key: int
    step: StepFacts
    number: int
    start: int
    num_rows: int
    base_len: int
    is_prompt: bool
    asked: tuple[Asked, ...]
    drafted: tuple[Drafted, ...]
    tree: CandidateTree
    sources: tuple[tuple[str, ...], ...]
    nodes: tuple[int, ...]
    choices: tuple[int, ...]
    num_committed: int
    num_cached: int
    queue_s: float

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens that joined the text."""
        return self.choices[: self.num_committed]


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request lost its pages and went back to the queue with base_len tokens."""

    request_id: str
    key: int
    at_s: float
    base_len: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The request left."""

    request_id: str
    key: int
    at_s: float
    reason: str
    error: str
    counts: RunCounts


@dataclass(frozen=True, slots=True)
class Lost:
    """Steps whose records could not be kept, because the disk was slower or failed."""

    num_steps: int


Record = Opened | Chunk | Round | Preempted | Closed
"""What belongs to a request."""
