"""Settings of a process that belongs to one drafter. Never called where a verifier runs too."""

import sys

import torch

from drafter_service.config import DrafterSettings

SWITCH_INTERVAL_S = 0.0005
"""How long the computing thread may keep the event loop waiting for the interpreter."""


def prepare_process(settings: DrafterSettings) -> None:
    """Set torch's threads and the interpreter's switch interval."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
