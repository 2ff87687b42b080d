"""The EAGLE-3 head packed for drafting: the same numbers out of fewer operations.

One qkv matrix, one gate-up matrix, rotary factors out of a table, no module calls. At one to ten
rows a depth costs about as much in operator calls as in arithmetic, so calls are what is saved.
`Eagle3Head` stays the definition (tested against it); its parameters become views of the packed
ones, so that nothing is held twice. Knows no session and no tree.

Shapes: N rows, A raw feature width, C hidden size, Z = 2C, Q query heads, K key-value heads,
D head_dim, V target vocabulary, W draft vocabulary, P positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from drafter_service.attention import Attend
from drafter_service.eagle3.head import Eagle3Head


class PackedHead:
    """fuse, step, logits, feedback of one head; positions below `max_positions`."""

    def __init__(self, head: Eagle3Head, max_positions: int) -> None:
        config, layer = head.config, head.layer
        self._head = head
        self._config = config
        self._shape = (config.hidden_size,)
        self._eps = config.norm_eps
        projections = (layer.q_proj, layer.k_proj, layer.v_proj)
        with torch.no_grad():
            self._qkv = _pack(projections)
            biases: list[Tensor] = [p.bias for p in projections if p.bias is not None]
            self._qkv_bias = torch.cat(biases) if biases else None
            self._gate_up = _pack((layer.gate_proj, layer.up_proj))
            positions = torch.arange(max_positions, device=head.lm_head.weight.device)
            cos_P1D, sin_P1D = head.rotary(positions, head.lm_head.weight.dtype)
        half = config.head_dim // 2
        self._cos_P1D = cos_P1D
        # The rotation subtracts on the first half: (a, b) -> (a cos - b sin, b cos + a sin).
        self._sin_P1D = torch.cat([-sin_P1D[..., :half], sin_P1D[..., half:]], dim=-1)
        self._half = half

    def fuse(self, features_NA: Tensor) -> Tensor:
        """See `Eagle3Head.fuse`."""
        return self._head.fuse(features_NA)

    def step(
        self, token_ids_N: Tensor, g_NC: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """See `Eagle3Head.step`."""
        config, layer, eps = self._config, self._head.layer, self._eps
        embedded_NC = embedding(token_ids_N, self._head.embed_tokens.weight)
        embedded_NC = rms_norm(embedded_NC, self._shape, layer.input_layernorm.weight, eps)
        hidden_NC = g_NC
        if config.input_norm_on_hidden:
            hidden_NC = rms_norm(hidden_NC, self._shape, layer.input_layernorm.weight, eps)
        hidden_NC = rms_norm(hidden_NC, self._shape, layer.hidden_norm.weight, eps)
        residual_NC = hidden_NC if config.norm_before_residual else g_NC
        z_NZ = torch.cat([embedded_NC, hidden_NC], dim=-1)
        q_NQD, k_NKD, v_NKD = self._heads(z_NZ, positions_N)
        mixed = attend(q_NQD, k_NKD, v_NKD)
        u_NC = residual_NC + linear(mixed, layer.o_proj.weight, layer.o_proj.bias)
        normed_NC = rms_norm(u_NC, self._shape, layer.post_attention_layernorm.weight, eps)
        gate, up = linear(normed_NC, self._gate_up).chunk(2, dim=-1)
        return u_NC + linear(silu(gate) * up, layer.down_proj.weight)

    def logits(self, y_NC: Tensor) -> Tensor:
        """See `Eagle3Head.logits`."""
        head = self._head
        if self._config.norm_logits:
            y_NC = rms_norm(y_NC, self._shape, head.norm.weight, self._eps)
        return linear(y_NC, head.lm_head.weight).to(torch.float32)

    def feedback(self, y_NC: Tensor) -> Tensor:
        """See `Eagle3Head.feedback`."""
        if not self._config.norm_feedback:
            return y_NC
        return rms_norm(y_NC, self._shape, self._head.norm.weight, self._eps)

    def _heads(self, z_NZ: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, Q, D] and keys [N, K, D], and values [N, K, D]."""
        config, layer = self._config, self._head.layer
        qkv = linear(z_NZ, self._qkv, self._qkv_bias).view(len(z_NZ), -1, config.head_dim)
        num_heads, num_kv = config.num_heads, config.num_kv_heads
        if layer.q_norm is None or layer.k_norm is None:
            qk = qkv[:, : num_heads + num_kv]
        else:
            q_NQD = layer.q_norm(qkv[:, :num_heads])
            k_NKD = layer.k_norm(qkv[:, num_heads : num_heads + num_kv])
            qk = torch.cat([q_NQD, k_NKD], dim=1)
        swapped = torch.roll(qk, self._half, dims=-1)
        qk = qk * self._cos_P1D[positions_N] + swapped * self._sin_P1D[positions_N]
        return qk[:, :num_heads], qk[:, num_heads:], qkv[:, num_heads + num_kv :]


def _pack(linears: Sequence[nn.Linear]) -> Tensor:
    """Rows of all weights in one matrix; the weights become views of it."""
    packed = torch.cat([layer.weight for layer in linears])
    first = 0
    for layer in linears:
        rows = slice(first, first + layer.out_features)
        layer.weight = nn.Parameter(packed[rows], requires_grad=False)
        first = rows.stop
    return packed
