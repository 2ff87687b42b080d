"""JSON bodies become models; what is wrong with one becomes a short error that names the field.

Pure. Invariant: nothing of the input is echoed, and every message is bounded.
"""

from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError

from cluster.http.refused import refuse_unsupported
from protos.errors import InvalidRequest

_MAX_MESSAGE: Final = 300
_MAX_PATH: Final = 100
"""Keys of a body may be as long as the body."""

BodyT = TypeVar("BodyT", bound=BaseModel)


def read(kind: type[BodyT], body: bytes) -> BodyT:
    """A JSON body of known shape, its fields not yet weighed against each other.

    Raises: InvalidRequest with a bounded message, naming the field where there is one.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_error(error) from None
    refuse_unsupported(request.model_extra or {})
    return request


def _first_error(error: ValidationError) -> InvalidRequest:
    """The first fault as an InvalidRequest; inputs are not echoed."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['msg']}"[:_MAX_MESSAGE])
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    path = path[:_MAX_PATH]
    return InvalidRequest(f"{path or 'body'}: {first['msg']}"[:_MAX_MESSAGE], path or None)
