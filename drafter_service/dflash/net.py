"""The block drafter's parameters under their public names, and the maths of one pass.

One definition for serving, tests and training: DFlash, DFlash 2, DSpark, JetSpec. Every layer
attends from the block's rows to context rows (projected target features) and to the block. The
caller owns cache and mask: a layer hands rotated queries, keys and values of the block to an
`attend` callback. Equations: `reference/dflash.md` 1.2, 1.3, 4.1, 4.2. Knows no files, sessions or
trees.

Shapes: T context rows, B block rows, A raw feature width, C hidden size, V vocabulary, W draft
vocabulary, Q query heads, K key-value heads, D head_dim, G groups of a convolution, R rank.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter_service.dflash.config import BlockConfig, Convolution
from drafter_service.dflash.heads import ConfidenceHead, MarkovHead, PathSelector
from drafter_service.eagle3.rope import inverse_frequencies, rotary_factors, rotate

CosSin = tuple[Tensor, Tensor]
LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [B, Q, D], k [B, K, D], v [B, K, D]) -> [B, Q * D]"""


class BlockAttention(nn.Module):
    """Projections of one layer; the same key and value weights serve context and block."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c, bias = config.hidden_size, config.attention_bias
        self._dim = config.head_dim
        self.q_proj = nn.Linear(c, config.num_heads * config.head_dim, bias)
        self.k_proj = nn.Linear(c, config.num_kv_heads * config.head_dim, bias)
        self.v_proj = nn.Linear(c, config.num_kv_heads * config.head_dim, bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, c, bias)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)

    def queries(self, x_BC: Tensor, cos_sin: CosSin) -> Tensor:
        """Rotated queries [B, Q, D]."""
        return rotate(self.q_norm(self.q_proj(x_BC).unflatten(-1, (-1, self._dim))), cos_sin)

    def keys_values(self, x_NC: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values, each [N, K, D]; N context or block rows."""
        k_NKD = self.k_norm(self.k_proj(x_NC).unflatten(-1, (-1, self._dim)))
        v_NKD: Tensor = self.v_proj(x_NC).unflatten(-1, (-1, self._dim))
        return rotate(k_NKD, cos_sin), v_NKD


class BlockMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c, inter = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(c, inter, bias=False)
        self.up_proj = nn.Linear(c, inter, bias=False)
        self.down_proj = nn.Linear(inter, c, bias=False)

    def forward(self, x_BC: Tensor) -> Tensor:
        gated: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BC)) * self.up_proj(x_BC))
        return gated


class DynamicConv(nn.Module):
    """Two-sided convolution along the block, its kernel partly made from the rows themselves.

    y_i = sum over taps t of (base_t + delta_{i, t, group}) * x_{i - t}, zero before slot 0. The
    input side and the output side have kernels of their own, both made from the input.
    """

    def __init__(self, hidden_size: int, shape: Convolution) -> None:
        super().__init__()
        self._shape = shape
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.taps, hidden_size))
        num_groups = hidden_size // shape.group_size
        self.kernel_projection = nn.Linear(hidden_size, 2 * shape.taps * num_groups, bias=False)

    def deltas(self, x_BC: Tensor) -> Tensor:
        """[B, side, tap, G] of the block's rows before the input side."""
        flat_BX: Tensor = self.kernel_projection(x_BC)
        return flat_BX.view(len(x_BC), 2, self._shape.taps, -1)

    def side(self, x_BC: Tensor, deltas_BSTG: Tensor, side: int, block_size: int) -> Tensor:
        """One side over rows of whole blocks of `block_size`, each block on its own."""
        blocks_NBC = x_BC.view(-1, block_size, x_BC.shape[-1])
        total = torch.zeros_like(blocks_NBC)
        for tap in range(self._shape.taps):
            delta_BC = deltas_BSTG[:, side, tap].repeat_interleave(self._shape.group_size, dim=-1)
            kernel_NBC = (self.base_kernel[side, tap] + delta_BC).view_as(blocks_NBC)
            shifted_NBC = functional.pad(blocks_NBC, (0, 0, tap, 0))[:, :block_size]
            total = total + kernel_NBC * shifted_NBC
        return total.view_as(x_BC)


class BlockLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        c, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nn.RMSNorm(c, eps)
        self.post_attention_layernorm = nn.RMSNorm(c, eps)
        self.self_attn = BlockAttention(config)
        self.mlp = BlockMlp(config)
        conv = config.convolution
        self.attention_conv = DynamicConv(c, conv) if conv else None
        self.mlp_conv = DynamicConv(c, conv) if conv else None


class BlockNet(nn.Module):
    """context, embed, forward, logits: what a block drafter computes."""

    target_ids: Tensor

    def __init__(self, config: BlockConfig, target_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        c = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, c)
        self.fc = nn.Linear(config.feature_size, c, bias=False)
        self.hidden_norm = nn.RMSNorm(c, config.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(c, config.norm_eps)
        self.lm_head = nn.Linear(c, config.draft_vocab_size, bias=False)
        vocab, markov, selector = config.vocab_size, config.markov, config.selector
        self.markov_head: MarkovHead | None = None
        if markov is not None:
            self.markov_head = MarkovHead(markov, vocab, config.draft_vocab_size, c)
        self.candidate_selector = PathSelector(selector, vocab, c) if selector else None
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence is not None:
            self.confidence_head = ConfidenceHead(config.confidence, c, markov)
        ids = torch.arange(config.draft_vocab_size) if target_ids is None else target_ids
        self.register_buffer("target_ids", ids, persistent=False)
        self.reset_frequencies()

    def reset_frequencies(self) -> None:
        """Compute the rotary frequencies; again after the net was made on the meta device.

        A plain attribute, because a buffer would be rounded by `.to(bfloat16)`.
        """
        self._inv_freq = inverse_frequencies(self.config.rope, self.config.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Compute type."""
        return self.fc.weight.dtype

    def fuse(self, features_TA: Tensor) -> Tensor:
        """Raw feature rows to context rows [T, C]: fc, then the norm."""
        fused_TC: Tensor = self.hidden_norm(self.fc(features_TA))
        return fused_TC

    def embed(self, ids_B: Tensor) -> Tensor:
        """Rows of the block's tokens before the first layer [B, C]."""
        embedded_BC: Tensor = self.embed_tokens(ids_B)
        scale = self.config.embedding_scale
        return embedded_BC if scale == 1.0 else embedded_BC * scale

    def rotary(self, positions_N: Tensor) -> CosSin:
        """(cos, sin), each [N, 1, D]; angles are computed in float32."""
        return rotary_factors(self.config.rope, self._inv_freq, positions_N, self.dtype)

    def context_keys_values(
        self, fused_TC: Tensor, positions_T: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [T, K, D] of context rows, per layer."""
        cos_sin = self.rotary(positions_T)
        return [layer.self_attn.keys_values(fused_TC, cos_sin) for layer in self._layers()]

    def states(
        self, ids_B: Tensor, positions_B: Tensor, attend: LayerAttend, block_size: int
    ) -> list[Tensor]:
        """Residual stream [B, C] after every layer, for rows of whole blocks."""
        h_BC = self.embed(ids_B)
        cos_sin = self.rotary(positions_B)
        states: list[Tensor] = []
        for index, layer in enumerate(self._layers()):
            h_BC = self._layer(index, layer, h_BC, cos_sin, attend, block_size)
            states.append(h_BC)
        return states

    def logits(self, hidden_BC: Tensor) -> Tensor:
        """Draft logits [B, W] in float32 of rows that went through `norm`."""
        logits_BW: Tensor = self.lm_head(hidden_BC).to(torch.float32)
        if self.config.output_multiplier != 1.0:
            logits_BW = logits_BW * self.config.output_multiplier
        cap = self.config.softcap
        return logits_BW if cap is None else cap * torch.tanh(logits_BW / cap)

    def _layers(self) -> Sequence[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def _layer(
        self,
        index: int,
        layer: BlockLayer,
        h_BC: Tensor,
        cos_sin: CosSin,
        attend: LayerAttend,
        block_size: int,
    ) -> Tensor:
        x_BC = layer.input_layernorm(h_BC)
        conv, deltas = layer.attention_conv, None
        if conv is not None:
            deltas = conv.deltas(x_BC)
            x_BC = conv.side(x_BC, deltas, 0, block_size)
        q_BQD = layer.self_attn.queries(x_BC, cos_sin)
        k_BKD, v_BKD = layer.self_attn.keys_values(x_BC, cos_sin)
        mixed_BC = layer.self_attn.o_proj(attend(index, q_BQD, k_BKD, v_BKD))
        if conv is not None and deltas is not None:
            mixed_BC = conv.side(mixed_BC, deltas, 1, block_size)
        h_BC = h_BC + mixed_BC
        x_BC = layer.post_attention_layernorm(h_BC)
        if layer.mlp_conv is None:
            x_BC = layer.mlp(x_BC)
        else:
            deltas = layer.mlp_conv.deltas(x_BC)
            x_BC = layer.mlp(layer.mlp_conv.side(x_BC, deltas, 0, block_size))
            x_BC = layer.mlp_conv.side(x_BC, deltas, 1, block_size)
        summed_BC: Tensor = h_BC + x_BC
        return summed_BC
