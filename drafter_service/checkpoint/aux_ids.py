"""Aux layer ids of public checkpoints, made design 2's: outputs of decoder layers, from 0.

Two conventions are live (reference/eagle.md 4.1): ids of layer outputs, and ids of layer inputs
(id n = output of n - 1). Some projects write one, some the other, some whichever the trainer used.
Where a file does not decide it, both readings are handed on, to be scored on a text. Torch-free.
"""

from collections.abc import Sequence
from enum import StrEnum

from protos.errors import CheckpointError

Ids = tuple[int, ...]


class Convention(StrEnum):
    """What an id in a file counts."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"
    UNKNOWN = "unknown"


def read_aux_ids(
    ids: Sequence[int] | None, convention: Convention, num_target_layers: int | None
) -> dict[Convention, Ids]:
    """Every reading that can be meant, the likelier one first; one where the file decides.

    No ids: the original project's {2, L/2, L-3}, counted as inputs; equal ones collapse. Raises
    CheckpointError when that needs a depth that is not known, or no reading fits the target.
    """
    if not ids:
        if num_target_layers is None:
            raise CheckpointError("the head names no aux layers, and the target's depth is unknown")
        return {Convention.INPUTS: _inputs(_default_inputs(num_target_layers))}
    given = tuple(sorted(int(layer) for layer in ids))
    if len(set(given)) != len(given) or given[0] < 0:
        raise CheckpointError(f"aux layer ids must be distinct and counted from 0, got {given}")
    readings = {Convention.OUTPUTS: given, Convention.INPUTS: _inputs(given)}
    if convention is Convention.UNKNOWN:
        convention = _told_by_ids(given, num_target_layers)
    if num_target_layers is not None and given[-1] == num_target_layers:
        # Only an input can be numbered so: that of the final norm.
        convention = Convention.INPUTS
    if convention is not Convention.UNKNOWN:
        readings = {convention: readings[convention]}
    fitting = {
        name: layers
        for name, layers in readings.items()
        if layers[0] >= 0 and (num_target_layers is None or layers[-1] < num_target_layers)
    }
    if not fitting:
        raise CheckpointError(
            f"aux layer ids {given} do not fit a target of {num_target_layers} layers"
            + (" as inputs counted from 0" if given[0] == 0 else "")
        )
    return fitting


def _told_by_ids(given: Ids, num_target_layers: int | None) -> Convention:
    """SGLang's rule (a first id of 1 is an output), and the original's default as inputs."""
    if given[0] <= 1:
        return Convention.OUTPUTS
    if num_target_layers is not None and given == _default_inputs(num_target_layers):
        return Convention.INPUTS
    return Convention.UNKNOWN


def _default_inputs(num_target_layers: int) -> Ids:
    return tuple(sorted({2, num_target_layers // 2, num_target_layers - 3}))


def _inputs(ids: Ids) -> Ids:
    return tuple(layer - 1 for layer in ids)
