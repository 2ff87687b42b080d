"""The yardstick: a draft recomputed from nothing, node by node, through transformers' own forward.

No cache, no batch, no packed attention: every node costs a forward over its whole path. Slow on
purpose; the drafter is tested against it. Keeps no state between calls.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafter_service.growing import grower_for
from drafter_service.ranking import NodeRows, rank_children
from drafter_service.service import Outcome
from protos.exchange import Plan
from protos.params import SamplingParams
from protos.sparse import SparseQ


@torch.inference_mode()
def logits_after(model: PreTrainedModel, path: Sequence[int], num_ids: int) -> Tensor:
    """[V] float32 after a path of tokens."""
    logits: Tensor = model(input_ids=torch.tensor([list(path)]), use_cache=False).logits
    return logits[0, -1, :num_ids].to(torch.float32)


def draft_reference(
    model: PreTrainedModel,
    tokens: Sequence[int],
    params: SamplingParams,
    plan: Plan,
    num_ids: int,
) -> Outcome:
    """The planned draft after `tokens`. model: loaded with transformers' own attention."""
    grower = grower_for(plan)
    ids_V = torch.arange(num_ids)
    paths: list[list[int]] = [list(tokens)]
    q: list[SparseQ] = []
    while True:
        group = NodeRows(1, params, len(tokens) + grower.level)
        ranked = [
            rank_children(
                logits_after(model, path, num_ids)[None], [group], ids_V, grower.num_children
            )
            for path in paths
        ]
        q.extend(found for row in ranked for found in row.q if found is not None)
        grower.grow(
            np.concatenate([row.ids for row in ranked]),
            np.concatenate([row.scores for row in ranked]),
        )
        if grower.is_done:
            tree, ranked_ids = grower.finish()
            return Outcome(tree=tree, ranked_ids=ranked_ids, q=tuple(q))
        paths = [
            [*paths[parent], token]
            for parent, token in zip(
                grower.frontier_parents.tolist(), grower.frontier_tokens.tolist(), strict=True
            )
        ]
