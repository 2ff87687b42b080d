"""Attention of a transformers model over one flat batch of many sessions' rows.

The model runs with batch dimension 1 and no cache object; here its rows fall apart into sessions,
each of which writes its keys and values into the slab and reads its own back. No session's rows
are ever read for another. What a family asks of attention is honoured or refused by name.

Shapes: N rows of a part, Q query heads, K key-value heads, G = Q / K, D head_dim, L rows read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from drafter_service.cache import KvSlab
from protos.errors import CheckpointError

ATTENTION_NAME = "outrider_packed"

_HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
)
"""Keywords that some families hand down to attention and that change nothing here."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """One session's share of a forward.

        slab rows   [ cached, in order of position | expanded draft nodes | these rows ]
                      start ........... committed_len

    Rows [0, committed_len) stand at their positions. `tail`: which of the last rows each new row
    sees, bool [N, at most L], the new rows as its last N columns; everything before is seen by
    all, as far as a window lets. None: all of it.
    """

    start: int
    cached_len: int
    committed_len: int
    positions: tuple[int, ...]
    tail: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """New rows."""
        return len(self.positions)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[N, L] to be added to the scores; None where every row sees everything."""
        length = self.cached_len + self.num_rows
        reach = min(self.committed_len, length)
        if window is None or max(self.positions) < window:
            window = None
        if self.tail is None and window is None:
            return None
        visible_NL = torch.ones(self.num_rows, length, dtype=torch.bool)
        if self.tail is not None:
            visible_NL[:, length - self.tail.shape[1] :] = self.tail
        if window is not None:
            oldest_N1 = torch.tensor(self.positions)[:, None] - window
            visible_NL[:, :reach] &= torch.arange(reach) > oldest_N1
        return torch.zeros(self.num_rows, length, dtype=dtype).masked_fill_(
            ~visible_NL, float("-inf")
        )


class PackedStep:
    """What the attention layers of one forward share."""

    def __init__(self, slab: KvSlab, parts: Sequence[PackedRows]) -> None:
        self.num_calls = 0
        self._slab = slab
        self._parts = parts
        self._biases: dict[tuple[int, int | None], Tensor | None] = {}

    def attend(
        self, layer: int, q_QND: Tensor, kv_2KND: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """[N, Q, D] of all sessions' rows."""
        self.num_calls += 1
        mixed: list[Tensor] = []
        first = 0
        for number, part in enumerate(self._parts):
            rows = slice(first, first + part.num_rows)
            first = rows.stop
            k_NKD, v_NKD = kv_2KND[:, :, rows].transpose(1, 2)
            self._slab.write(part.start + part.cached_len, k_NKD, v_NKD, layer)
            k_KLD, v_KLD = self._slab.read(part.start, part.cached_len + part.num_rows, layer)
            bias = self._bias(number, part, window, q_QND)
            mixed.append(_attend_part(q_QND[:, rows], k_KLD, v_KLD, bias, scale))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _bias(
        self, number: int, part: PackedRows, window: int | None, like: Tensor
    ) -> Tensor | None:
        key = (number, window)
        if key not in self._biases:
            bias = part.bias(window, like.dtype)
            self._biases[key] = None if bias is None else bias.to(like.device)
        return self._biases[key]


def _attend_part(
    q_QND: Tensor, k_KLD: Tensor, v_KLD: Tensor, bias_NL: Tensor | None, scale: float
) -> Tensor:
    """[N, Q, D]. Query heads of one key-value head are folded into rows, which is several times
    faster on a CPU in bf16 than asking SDPA for grouped heads."""
    num_heads, num_rows, head_dim = q_QND.shape
    num_kv = k_KLD.shape[0]
    group = num_heads // num_kv
    q_KRD = q_QND.reshape(num_kv, group * num_rows, head_dim)
    bias = None if bias_NL is None else bias_NL.repeat(group, 1)
    mixed_KRD = scaled_dot_product_attention(
        q_KRD[None], k_KLD[None], v_KLD[None], attn_mask=bias, scale=scale
    )
    return mixed_KRD.view(num_heads, num_rows, head_dim).transpose(0, 1)


def register_attention() -> None:
    """Make it known to transformers under ATTENTION_NAME.

    No mask function is registered under that name, so transformers builds no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    outrider_packed: PackedStep,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """AttentionInterface's signature: query [1, Q, N, D], key and value [1, K, N, D]."""
    unknown = sorted(
        name
        for name, asked in others.items()
        if name not in _HARMLESS and asked is not None and asked is not False
    )
    if attention_mask is not None:
        unknown.append("attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if unknown:
        raise CheckpointError(f"attention of this family needs {', '.join(unknown)}")
    if key.shape != value.shape:
        raise CheckpointError("keys and values of different shapes are not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # attributes of modules are untyped
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    kv_2KND = torch.cat([key, value])
    mixed_NQD = outrider_packed.attend(layer, query[0], kv_2KND, scale, sliding_window)
    return mixed_NQD[None], None
