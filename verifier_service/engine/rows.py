"""Feature rows of running requests, read from beside the KV: the draft exchange's `RowReader`.

Knows requests and the target's pool, nothing of drafters. Made before the engine, because the
exchange is made with it and the engine with the exchange. Invariant: rows are those of committed,
computed positions only; what does not exist is None, never invented.
"""

from protos.features import FeatureRows
from verifier_service.engine.request import RunningRequest
from verifier_service.step import Target


class PagedRows:
    """Rows by request key; used by the engine's thread."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._requests: dict[int, RunningRequest] = {}

    def add(self, request: RunningRequest) -> None:
        """From now on this request's rows can be read."""
        self._requests[request.key] = request

    def remove(self, key: int) -> None:
        """The request left."""
        self._requests.pop(key, None)

    def __call__(self, key: int, tap: str, start: int, end: int) -> FeatureRows | None:
        """Rows [start, end) of request `key` under `tap`; None when they do not exist."""
        request = self._requests.get(key)
        if request is None or not 0 <= start < end <= request.computed_len:
            return None
        try:
            width = self._target.row_width(tap)
        except KeyError:
            return None
        return FeatureRows(
            start=start,
            count=end - start,
            width=width,
            dtype=self._target.row_dtype(tap),
            data=self._target.read_rows(tap, request.slots(end)[start:]),
        )
