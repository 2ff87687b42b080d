"""Every error the project raises on purpose, in one tree.

    OutriderError
     +- InvalidRequest          a user's request is wrong (HTTP 400); `param` names the field
     |   +- ContextTooLong      prompt plus output does not fit the context
     +- UnknownModel            no such model is served (404)
     +- Unauthenticated         key or token missing or wrong (401 / UNAUTHENTICATED)
     +- Overloaded              queue full, try again after `retry_after_s` (503)
     +- Cancelled               the caller gave the request up
     +- DeadlineExceeded        the time that the caller or the operator allowed is over (504)
     +- ConfigError             a configuration file or option cannot be used
     +- CheckpointError         weights, or their description, cannot be used
     |   +- IncompatiblePair    drafter and target do not belong together
     +- ProtocolError           a peer's message breaks PROTOCOL.md
     |   +- MalformedTree       a draft that is no tree over the target's vocabulary
     |   +- MalformedRows       feature rows of a wrong size, type or place
     |   +- VersionMismatch     the peer speaks another protocol version
     +- PeerUnavailable         a peer cannot be reached, or went away

A message says what was expected and what came. None holds a path or a secret.
"""


class OutriderError(Exception):
    """Root of all errors raised on purpose."""


class InvalidRequest(OutriderError):
    """A user's request that cannot be served; `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """Prompt (and asked output) exceed the target's context."""


class UnknownModel(OutriderError):
    """The named model is not served here."""


class Unauthenticated(OutriderError):
    """API key or bearer token missing or wrong."""


class Overloaded(OutriderError):
    """No room in the queue; worth another try after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(OutriderError):
    """The caller gave the request up before it finished."""


class DeadlineExceeded(OutriderError):
    """The request took longer than it was allowed; the message names the limit."""


class ConfigError(OutriderError):
    """A configuration that cannot be used; says which key and why."""


class CheckpointError(OutriderError):
    """Weights or their description that cannot be used; names the tensor or key."""


class IncompatiblePair(CheckpointError):
    """A drafter and a target that do not belong together."""


class ProtocolError(OutriderError):
    """A peer's message that breaks PROTOCOL.md; it ends one session, not the stream."""


class MalformedTree(ProtocolError):
    """A draft that is no tree over the target's vocabulary."""


class MalformedRows(ProtocolError):
    """Feature rows of a wrong size, type or place."""


class VersionMismatch(ProtocolError):
    """The peer speaks another protocol version."""


class PeerUnavailable(OutriderError):
    """A peer cannot be reached, or went away in the middle."""
