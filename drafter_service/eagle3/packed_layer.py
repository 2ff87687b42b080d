"""A draft layer packed for drafting: the same numbers out of fewer operations.

One qkv matrix, one gate-up matrix, rotary factors out of a table, no module calls. At one to ten
rows a depth costs about as much in operator calls as in arithmetic, so calls are what is saved.
`DraftLayer` stays the definition (tested against it); its parameters become views of the packed
ones, so that nothing is held twice. Knows no head, no session and no tree.

Shapes: N rows, C hidden size, Z input width, Q query heads, K key-value heads, D head_dim,
P positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from drafter_service.attention import Attend
from drafter_service.eagle3.layer import DraftLayer


class RotaryTable:
    """Factors of all positions, looked up once per step for all layers."""

    def __init__(self, cos_P1D: Tensor, sin_P1D: Tensor) -> None:
        self.half = cos_P1D.shape[-1] // 2
        self._cos_P1D = cos_P1D
        # The rotation subtracts on the first half: (a, b) -> (a cos - b sin, b cos + a sin).
        self._sin_P1D = torch.cat([-sin_P1D[..., : self.half], sin_P1D[..., self.half :]], dim=-1)

    def at(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), each [N, 1, D]."""
        return self._cos_P1D[positions_N], self._sin_P1D[positions_N]


class PackedLayer:
    """Attention and MLP of one layer, from its normed input on."""

    def __init__(self, layer: DraftLayer, number: int) -> None:
        facts = layer.facts
        self._layer, self._facts, self._number = layer, facts, number
        self._shape = (facts.hidden_size,)
        projections = (layer.q_proj, layer.k_proj, layer.v_proj)
        with torch.no_grad():
            self._qkv, self._qkv_bias = _pack(projections)
            self._gate_up, self._gate_up_bias = _pack((layer.gate_proj, layer.up_proj))

    def run(
        self, z_NZ: Tensor, residual_NC: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Output [N, C]. `rotary`: what `RotaryTable.at` gave."""
        layer = self._layer
        q_NQD, k_NKD, v_NKD = self._heads(z_NZ, rotary)
        mixed = attend(self._number, q_NQD, k_NKD, v_NKD)
        u_NC = residual_NC + linear(mixed, layer.o_proj.weight, layer.o_proj.bias)
        norm = layer.post_attention_layernorm.weight
        normed_NC = rms_norm(u_NC, self._shape, norm, self._facts.norm_eps)
        gate, up = linear(normed_NC, self._gate_up, self._gate_up_bias).chunk(2, dim=-1)
        return u_NC + linear(silu(gate) * up, layer.down_proj.weight, layer.down_proj.bias)

    def _heads(self, z_NZ: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, Q, D] and keys [N, K, D], and values [N, K, D]."""
        facts, layer = self._facts, self._layer
        qkv = linear(z_NZ, self._qkv, self._qkv_bias).view(len(z_NZ), -1, facts.head_dim)
        num_heads, num_kv = facts.num_heads, facts.num_kv_heads
        if layer.q_norm is None or layer.k_norm is None:
            qk = qkv[:, : num_heads + num_kv]
        else:
            q_NQD = layer.q_norm(qkv[:, :num_heads])
            k_NKD = layer.k_norm(qkv[:, num_heads : num_heads + num_kv])
            qk = torch.cat([q_NQD, k_NKD], dim=1)
        cos_N1D, sin_N1D = rotary
        qk = qk * cos_N1D + torch.roll(qk, facts.head_dim // 2, dims=-1) * sin_N1D
        return qk[:, :num_heads], qk[:, num_heads:], qkv[:, num_heads + num_kv :]


def _pack(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Rows of all weights in one matrix, biases in one vector; the weights become views of it."""
    packed = torch.cat([layer.weight for layer in linears])
    biases: list[Tensor] = [layer.bias for layer in linears if layer.bias is not None]
    first = 0
    for layer in linears:
        rows = slice(first, first + layer.out_features)
        layer.weight = nn.Parameter(packed[rows], requires_grad=False)
        first = rows.stop
    return packed, torch.cat(biases) if biases else None
