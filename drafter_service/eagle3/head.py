"""The EAGLE-3 and EAGLE-3.1 draft head: one decoder layer on fused target features.

One definition of the layer for serving, training and tests. The caller owns cache and mask: the
layer hands rotated queries, keys and values to an `attend` callback and gets the mixture back.
Knows nothing of files, sessions or trees. Every fact comes from `Eagle3Config`, which a
checkpoint reader fills. Equations: `reference/eagle.md` 4.2 (paper 2503.01840).

Shapes: N rows, A features of a row (num_aux * H), C hidden size of the head, V target vocabulary,
W draft vocabulary, Q query heads, K key-value heads, D head_dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.rope import inverse_frequencies, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""attend(q [N, Q, D], k [N, K, D], v [N, K, D]) -> [N, Q * D]"""


class Eagle3Layer(nn.Module):
    """Parameters of the one decoder layer, under the names of the public checkpoints."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        c, wide = config.hidden_size, 2 * config.hidden_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.input_layernorm = nn.RMSNorm(c, config.norm_eps)
        self.hidden_norm = nn.RMSNorm(c, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c, config.norm_eps)
        self.q_proj = nn.Linear(wide, q_size, bias)
        self.k_proj = nn.Linear(wide, kv_size, bias)
        self.v_proj = nn.Linear(wide, kv_size, bias)
        self.o_proj = nn.Linear(q_size, c, bias)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.gate_proj = nn.Linear(c, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, c, bias=False)

    def mlp(self, x_NC: Tensor) -> Tensor:
        gated: Tensor = self.down_proj(functional.silu(self.gate_proj(x_NC)) * self.up_proj(x_NC))
        return gated


class Eagle3Head(nn.Module):
    """fuse, step, logits, feedback: the four verbs of a draft."""

    target_ids: Tensor

    def __init__(self, config: Eagle3Config, target_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        c = config.hidden_size
        eps = config.norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, c)
        self.input_norm = nn.RMSNorm(config.feature_size, eps) if config.norm_before_fc else None
        norms = [nn.RMSNorm(config.target_hidden_size, eps) for _ in config.aux_layers]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(config.feature_size, c, config.fc_bias)
        self.layer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(c, eps)
        self.lm_head = nn.Linear(c, config.draft_vocab_size, bias=False)
        ids = torch.arange(config.draft_vocab_size) if target_ids is None else target_ids
        self.register_buffer("target_ids", ids, persistent=False)
        self.reset_frequencies()

    def reset_frequencies(self) -> None:
        """Compute the rotary frequencies; again after the head was made on the meta device.

        A plain attribute, because a buffer would be rounded by `.to(bfloat16)`.
        """
        self._inv_freq = inverse_frequencies(self.config.rope, self.config.head_dim)

    def fuse(self, features_NA: Tensor) -> Tensor:
        """Raw features to g [N, C]: the norms before fc, then fc."""
        if self.input_norm is not None:
            features_NA = self.input_norm(features_NA)
        if self.fc_norm is not None:
            parts = features_NA.chunk(self.config.num_aux, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features_NA = torch.cat(normed, dim=-1)
        g_NC: Tensor = self.fc(features_NA)
        return g_NC

    def step(
        self, token_ids_N: Tensor, g_NC: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """y [N, C] of rows (feature or feedback g, the token after it), before the final norm."""
        z_NZ, residual_NC = self.mix(token_ids_N, g_NC)
        cos_sin = self.rotary(positions_N, z_NZ.dtype)
        q_NQD = self.queries(z_NZ, cos_sin)
        k_NKD, v_NKD = self.keys_values(z_NZ, cos_sin)
        return self.finish(residual_NC, attend(q_NQD, k_NKD, v_NKD))

    def mix(self, token_ids_N: Tensor, g_NC: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input [N, 2C], embedding first; residual [N, C])."""
        layer = self.layer
        embedded_NC = layer.input_layernorm(self.embed_tokens(token_ids_N))
        hidden_NC = layer.input_layernorm(g_NC) if self.config.input_norm_on_hidden else g_NC
        hidden_NC = layer.hidden_norm(hidden_NC)
        residual_NC = hidden_NC if self.config.norm_before_residual else g_NC
        return torch.cat([embedded_NC, hidden_NC], dim=-1), residual_NC

    def rotary(self, positions_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, 1, D]; angles are computed in float32."""
        angles = positions_N.to(torch.float32)[:, None] * self._inv_freq.to(positions_N.device)
        angles_N1D = torch.cat([angles, angles], dim=-1)[:, None]
        return angles_N1D.cos().to(dtype), angles_N1D.sin().to(dtype)

    def queries(self, z_NZ: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [N, Q, D]."""
        q_NQD = self.layer.q_proj(z_NZ).unflatten(-1, (self.config.num_heads, -1))
        if self.layer.q_norm is not None:
            q_NQD = self.layer.q_norm(q_NQD)
        return rotate(q_NQD, cos_sin)

    def keys_values(self, z_NZ: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [N, K, D]."""
        k_NKD = self.layer.k_proj(z_NZ).unflatten(-1, (self.config.num_kv_heads, -1))
        v_NKD = self.layer.v_proj(z_NZ).unflatten(-1, (self.config.num_kv_heads, -1))
        if self.layer.k_norm is not None:
            k_NKD = self.layer.k_norm(k_NKD)
        return rotate(k_NKD, cos_sin), v_NKD

    def finish(self, residual_NC: Tensor, attended_NO: Tensor) -> Tensor:
        """y [N, C] from the residual and the attention's mixture [N, Q * D]."""
        u_NC: Tensor = residual_NC + self.layer.o_proj(attended_NO)
        return u_NC + self.layer.mlp(self.layer.post_attention_layernorm(u_NC))

    def logits(self, y_NC: Tensor) -> Tensor:
        """Draft logits [N, W] in float32, in the order of the draft vocabulary."""
        normed_NC = self.norm(y_NC) if self.config.norm_logits else y_NC
        logits_NW: Tensor = self.lm_head(normed_NC).to(torch.float32)
        return logits_NW

    def feedback(self, y_NC: Tensor) -> Tensor:
        """What the next step takes as g: y, or norm(y) for EAGLE-3.1."""
        fed_NC: Tensor = self.norm(y_NC) if self.config.norm_feedback else y_NC
        return fed_NC
