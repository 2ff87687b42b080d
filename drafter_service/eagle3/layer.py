"""One decoder layer of a draft head, under the names of the public checkpoints.

The caller owns cache and mask: a layer hands rotated queries, keys and values to an `attend`
callback and gets the mixture back. Knows nothing of files, sessions or trees.

    doubled    input (embedding, hidden), a norm on each                       EAGLE-3, layer 0
    ordinary   input hidden, one norm                                          further layers
    bare       input hidden as it is                                           EAGLE-1, layer 0

Shapes: N rows, C hidden size, Z input width of q, k and v, Q query heads, K key-value heads,
D head_dim.
"""

from enum import StrEnum

from torch import Tensor, nn
from torch.nn import functional

from drafter_service.eagle3.config import LayerFacts
from drafter_service.eagle3.rope import rotate


class LayerInput(StrEnum):
    """What a layer takes."""

    DOUBLED = "doubled"
    ORDINARY = "ordinary"
    BARE = "bare"


class DraftLayer(nn.Module):
    """Parameters of a layer, and what is computed before and after attention."""

    def __init__(self, facts: LayerFacts, takes: LayerInput) -> None:
        super().__init__()
        self.facts, self.takes = facts, takes
        c, eps, dim = facts.hidden_size, facts.norm_eps, facts.head_dim
        wide = 2 * c if takes is LayerInput.DOUBLED else c
        q_size, kv_size = facts.num_heads * dim, facts.num_kv_heads * dim
        qkv_bias = facts.attention_bias or facts.qkv_bias
        self.input_layernorm = None if takes is LayerInput.BARE else nn.RMSNorm(c, eps)
        self.hidden_norm = nn.RMSNorm(c, eps) if takes is LayerInput.DOUBLED else None
        self.post_attention_layernorm = nn.RMSNorm(c, eps)
        self.q_proj = nn.Linear(wide, q_size, qkv_bias)
        self.k_proj = nn.Linear(wide, kv_size, qkv_bias)
        self.v_proj = nn.Linear(wide, kv_size, qkv_bias)
        self.o_proj = nn.Linear(q_size, c, facts.attention_bias)
        self.q_norm = nn.RMSNorm(dim, eps) if facts.qk_norm else None
        self.k_norm = nn.RMSNorm(dim, eps) if facts.qk_norm else None
        self.gate_proj = nn.Linear(c, facts.intermediate_size, facts.mlp_bias)
        self.up_proj = nn.Linear(c, facts.intermediate_size, facts.mlp_bias)
        self.down_proj = nn.Linear(facts.intermediate_size, c, facts.mlp_bias)

    def queries(self, z_NZ: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [N, Q, D]."""
        q_NQD = self.q_proj(z_NZ).unflatten(-1, (self.facts.num_heads, -1))
        if self.q_norm is not None:
            q_NQD = self.q_norm(q_NQD)
        return rotate(q_NQD, cos_sin)

    def keys_values(self, z_NZ: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [N, K, D]."""
        k_NKD = self.k_proj(z_NZ).unflatten(-1, (self.facts.num_kv_heads, -1))
        v_NKD = self.v_proj(z_NZ).unflatten(-1, (self.facts.num_kv_heads, -1))
        if self.k_norm is not None:
            k_NKD = self.k_norm(k_NKD)
        return rotate(k_NKD, cos_sin), v_NKD

    def finish(self, residual_NC: Tensor, attended_NO: Tensor) -> Tensor:
        """The layer's output [N, C] from the residual and attention's mixture [N, Q * D]."""
        u_NC: Tensor = residual_NC + self.o_proj(attended_NO)
        return u_NC + self.mlp(self.post_attention_layernorm(u_NC))

    def mlp(self, x_NC: Tensor) -> Tensor:
        """SwiGLU."""
        gated: Tensor = self.down_proj(functional.silu(self.gate_proj(x_NC)) * self.up_proj(x_NC))
        return gated
