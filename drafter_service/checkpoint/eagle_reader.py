"""An EAGLE-1 checkpoint as a head ready to draft. Reads safetensors only.

Shapes: V target vocabulary, H target hidden size.
"""

from pathlib import Path

import torch

from drafter_service.checkpoint.description import CheckpointDescription
from drafter_service.checkpoint.eagle3_reader import SharedWeights, lend, read_weights
from drafter_service.eagle.config import EagleConfig
from drafter_service.eagle.head import EagleHead


def eagle_head_of(
    described: CheckpointDescription[EagleConfig],
    directory: Path,
    shared: SharedWeights,
    dtype: torch.dtype,
) -> EagleHead:
    """The head in `dtype`, in eval mode, without gradients.

    Raises CheckpointError when the embedding or the lm_head is neither here nor shared.
    """
    with torch.device("meta"):
        head = EagleHead(described.config)
    weights = read_weights(directory, described)
    lend(weights, described, directory, described.config.hidden_size, shared)
    head.load_state_dict({n: w.to(dtype) for n, w in weights.items()}, strict=True, assign=True)
    head.reset_frequencies()
    return head.eval().requires_grad_(False)
