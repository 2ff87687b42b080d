"""Our loggers in a Serve replica: same files, format and level as Serve's own.

Without this only warnings would be seen, and only on a worker's stderr.
"""

import logging
from typing import Final

_OURS: Final = ("cluster", "verifier_service", "drafter_service", "protos")


def join_serve_logs() -> None:
    """Hand our packages' records to Serve's handlers. Called by every replica's constructor."""
    serve_logger = logging.getLogger("ray.serve")
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.setLevel(serve_logger.getEffectiveLevel())
        logger.handlers = list(serve_logger.handlers)
        logger.propagate = not logger.handlers
