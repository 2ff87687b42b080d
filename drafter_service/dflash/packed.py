"""The block net packed for drafting: the same numbers out of fewer operations.

One qkv matrix and one gate-up matrix per layer, rotary factors out of a table, no module calls.
`BlockNet` stays the definition (tested against it); its parameters become views of the packed
ones, so that nothing is held twice. Knows no session and no tree.

Shapes: N rows, C hidden size, Q query heads, K key-value heads, D head_dim, P positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from drafter_service.dflash.net import BlockLayer, BlockNet, DynamicConv, LayerAttend


@dataclass(frozen=True, slots=True)
class _Rotary:
    """Rows of the table for the positions at hand, [N, 1, D] each."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    """Packed weights: rows of qkv are queries, keys, values."""

    qkv: Tensor
    qkv_bias: Tensor | None
    gate_up: Tensor
    plain: BlockLayer


class PackedBlock:
    """Context rows and whole blocks of one net; positions below `max_positions`."""

    def __init__(self, net: BlockNet, max_positions: int) -> None:
        config = net.config
        self._net = net
        self._shape = (config.hidden_size,)
        self._eps = config.norm_eps
        self._dim = config.head_dim
        self._half = config.head_dim // 2
        self._num_heads, self._num_kv = config.num_heads, config.num_kv_heads
        with torch.no_grad():
            self._layers = [_packed(layer) for layer in net.layers if isinstance(layer, BlockLayer)]
            positions = torch.arange(max_positions, device=net.fc.weight.device)
            self._cos_P1D, sin_P1D = net.rotary(positions)
        # The rotation subtracts on the first half: (a, b) -> (a cos - b sin, b cos + a sin).
        self._sin_P1D = torch.cat([-sin_P1D[..., : self._half], sin_P1D[..., self._half :]], -1)

    def context(self, fused_NC: Tensor, positions_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [N, K, D] of context rows, per layer."""
        rotary = self._rotary(positions_N)
        made: list[tuple[Tensor, Tensor]] = []
        first = self._num_heads * self._dim
        for layer in self._layers:
            bias = None if layer.qkv_bias is None else layer.qkv_bias[first:]
            kv = linear(fused_NC, layer.qkv[first:], bias).view(len(fused_NC), -1, self._dim)
            k_NKD = self._normed(kv[:, : self._num_kv], layer.plain.self_attn.k_norm)
            made.append((self._rotate(k_NKD, rotary), kv[:, self._num_kv :]))
        return made

    def run(
        self, ids_N: Tensor, positions_N: Tensor, attend: LayerAttend, block_size: int
    ) -> Tensor:
        """[N, C] of whole blocks, after the final norm."""
        net = self._net
        h_NC = embedding(ids_N, net.embed_tokens.weight)
        if net.config.embedding_scale != 1.0:
            h_NC = h_NC * net.config.embedding_scale
        rotary = self._rotary(positions_N)
        for index, layer in enumerate(self._layers):
            h_NC = self._layer(index, layer, h_NC, rotary, attend, block_size)
        return self._rms(h_NC, net.norm)

    def _layer(
        self,
        index: int,
        layer: _Layer,
        h_NC: Tensor,
        rotary: _Rotary,
        attend: LayerAttend,
        block_size: int,
    ) -> Tensor:
        plain = layer.plain
        x_NC = self._rms(h_NC, plain.input_layernorm)
        around = _Around(plain.attention_conv, x_NC, block_size)
        q_NQD, k_NKD, v_NKD = self._heads(layer, around.before(x_NC), rotary)
        mixed_NO = attend(index, q_NQD, k_NKD, v_NKD)
        output = plain.self_attn.o_proj
        h_NC = h_NC + around.after(linear(mixed_NO, output.weight, output.bias))
        x_NC = self._rms(h_NC, plain.post_attention_layernorm)
        around = _Around(plain.mlp_conv, x_NC, block_size)
        gate, up = linear(around.before(x_NC), layer.gate_up).chunk(2, dim=-1)
        return h_NC + around.after(linear(silu(gate) * up, plain.mlp.down_proj.weight))

    def _heads(self, layer: _Layer, x_NC: Tensor, rotary: _Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, Q, D] and keys [N, K, D], and values [N, K, D]."""
        num_heads, num_kv = self._num_heads, self._num_kv
        qkv = linear(x_NC, layer.qkv, layer.qkv_bias).view(len(x_NC), -1, self._dim)
        attention = layer.plain.self_attn
        q_NQD = self._normed(qkv[:, :num_heads], attention.q_norm)
        k_NKD = self._normed(qkv[:, num_heads : num_heads + num_kv], attention.k_norm)
        qk = self._rotate(torch.cat([q_NQD, k_NKD], dim=1), rotary)
        return qk[:, :num_heads], qk[:, num_heads:], qkv[:, num_heads + num_kv :]

    def _rotary(self, positions_N: Tensor) -> _Rotary:
        return _Rotary(self._cos_P1D[positions_N], self._sin_P1D[positions_N])

    def _rotate(self, x_NXD: Tensor, rotary: _Rotary) -> Tensor:
        return x_NXD * rotary.cos + torch.roll(x_NXD, self._half, dims=-1) * rotary.sin

    def _normed(self, x_NXD: Tensor, norm: nn.RMSNorm) -> Tensor:
        return rms_norm(x_NXD, (self._dim,), norm.weight, self._eps)

    def _rms(self, x_NC: Tensor, norm: nn.RMSNorm) -> Tensor:
        return rms_norm(x_NC, self._shape, norm.weight, self._eps)


class _Around:
    """A sub-layer's convolution, both sides made from its input; nothing where there is none."""

    def __init__(self, conv: DynamicConv | None, x_NC: Tensor, block_size: int) -> None:
        self._conv = conv
        self._block_size = block_size
        self._deltas = conv.deltas(x_NC) if conv is not None else x_NC

    def before(self, x_NC: Tensor) -> Tensor:
        if self._conv is None:
            return x_NC
        return self._conv.side(x_NC, self._deltas, 0, self._block_size)

    def after(self, x_NC: Tensor) -> Tensor:
        if self._conv is None:
            return x_NC
        return self._conv.side(x_NC, self._deltas, 1, self._block_size)


def _packed(layer: BlockLayer) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = _pack(projections)
    biases: list[Tensor] = [p.bias for p in projections if p.bias is not None]
    gate_up = _pack((mlp.gate_proj, mlp.up_proj))
    return _Layer(qkv, torch.cat(biases) if biases else None, gate_up, layer)


def _pack(linears: Sequence[nn.Linear]) -> Tensor:
    """Rows of all weights in one matrix; the weights become views of it."""
    packed = torch.cat([layer.weight for layer in linears])
    first = 0
    for layer in linears:
        rows = slice(first, first + layer.out_features)
        layer.weight = nn.Parameter(packed[rows], requires_grad=False)
        first = rows.stop
    return packed
