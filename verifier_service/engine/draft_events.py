"""What reader threads tell the engine's thread, through one queue. Values only."""

from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from protos.codec import DraftAnswer
from protos.errors import ProtocolError
from protos.exchange import Capabilities, ContextAck, DrafterLoad


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Connected; both streams stand. trouble: why the pair is not used, if it was tested."""

    peer_id: int
    capabilities: Capabilities
    load: DrafterLoad
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The connection is gone; the link goes on trying."""

    peer_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """A replica that had fallen silent was asked for its description."""

    peer_id: int
    has_answered: bool


@dataclass(frozen=True, slots=True)
class AnswerIn:
    """A reply to one step's message. at_s: monotonic time of its arrival."""

    peer_id: int
    answer: DraftAnswer
    at_s: float


@dataclass(frozen=True, slots=True)
class AckIn:
    """A piece of rows was taken. error: the acknowledgement itself broke the contract."""

    peer_id: int
    ack: ContextAck | None
    error: ProtocolError | None = None


@dataclass(frozen=True, slots=True)
class AnswerBroken:
    """A reply whose envelope broke the contract; it answers nobody."""

    peer_id: int
    error: ProtocolError


Event: TypeAlias = PeerUp | PeerDown | ProbeDone | AnswerIn | AckIn | AnswerBroken
EventQueue: TypeAlias = SimpleQueue[Event]
