"""The target's own choice after the tokens of a record: the best id of every list it kept.

Knows no head. Shapes: N tokens of a record, A rows from the prompt's last on.
"""

import torch
from torch import Tensor

from drafter_service.training.records import Record

GREEDY_SHARE = 0.95  # recorded answers come from other kernels, so a few near-ties differ


def is_greedy(record: Record, top_ids_AK: Tensor) -> bool:
    """Whether the target wrote this answer by taking its argmax."""
    answer = torch.from_numpy(record.ids[record.prompt_len :])
    agreed = top_ids_AK[:-1, 0].to(torch.int64) == answer
    return bool(agreed.float().mean() >= GREEDY_SHARE)
