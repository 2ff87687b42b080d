"""The EAGLE-3, EAGLE-3.1 and P-EAGLE draft head: decoder layers on fused target features.

One definition for serving, training and tests. The caller owns cache and mask (see `layer`).
Knows nothing of files, sessions or trees. Every fact comes from `Eagle3Config`, which a
checkpoint reader fills. Equations: `reference/eagle.md` 4.2 (papers 2503.01840, 2602.01469).

Shapes: N rows, A features of a row (num_aux * H), C hidden size of the head, V target vocabulary,
W draft vocabulary, Q query heads, K key-value heads, D head_dim.
"""

import torch
from torch import Tensor, nn

from drafter_service.attention import Attend
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.layer import DraftLayer, LayerInput
from drafter_service.eagle3.rope import inverse_frequencies, rotary_factors


class Eagle3Head(nn.Module):
    """fuse, step, logits, feedback: the four verbs of a draft.

    `layer` is the first one, with the doubled input; `later` the further ones. Training drives
    the layers itself, through enter and take.
    """

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
        self.fc = nn.Linear(config.feature_size, c, config.fc_bias) if config.has_fc else None
        self.layer = DraftLayer(config.layer_facts, LayerInput.DOUBLED)
        later = LayerInput.DOUBLED if config.doubled_layers else LayerInput.ORDINARY
        self.later = nn.ModuleList(
            DraftLayer(config.layer_facts, later) for _ in range(config.num_layers - 1)
        )
        self.norm = nn.RMSNorm(c, eps)
        self.lm_head = nn.Linear(c, config.draft_vocab_size, bias=False)
        has_mask = config.mask_token_id is not None
        self.mask_hidden = nn.Parameter(torch.randn(config.feature_size)) if has_mask else None
        ids = torch.arange(config.draft_vocab_size) if target_ids is None else target_ids
        self.register_buffer("target_ids", ids, persistent=False)
        self.reset_frequencies()

    def reset_frequencies(self) -> None:
        """Compute the rotary frequencies; again after the head was made on the meta device.

        A plain attribute, because a buffer would be rounded by `.to(bfloat16)`.
        """
        self._inv_freq = inverse_frequencies(self.config.rope, self.config.head_dim)

    @property
    def layers(self) -> tuple[DraftLayer, ...]:
        """All layers, in order."""
        return (self.layer, *self.later)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, how many rows back it attends (None: all)."""
        return self.config.windows

    def fuse(self, features_NA: Tensor) -> Tensor:
        """Raw features to g [N, C]: the norms before fc, then fc."""
        if self.input_norm is not None:
            features_NA = self.input_norm(features_NA)
        if self.fc_norm is not None:
            parts = features_NA.chunk(self.config.num_aux, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features_NA = torch.cat(normed, dim=-1)
        g_NC: Tensor = features_NA if self.fc is None else self.fc(features_NA)
        return g_NC

    def masked(self) -> Tensor:
        """g [C] of P-EAGLE's masked rows: the learnt placeholder in place of features."""
        assert self.mask_hidden is not None  # asked of P-EAGLE heads only
        return self.fuse(self.mask_hidden[None])[0]

    def step(
        self, token_ids_N: Tensor, g_NC: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """y [N, C] of rows (feature or feedback g, the token after it), before the final norm."""
        embedded_NC, h_NC = self.enter(token_ids_N, g_NC)
        cos_sin = self.rotary(positions_N, g_NC.dtype)
        for index, layer in enumerate(self.layers):
            z_NZ, residual_NC = self.take(layer, embedded_NC, h_NC)
            q_NQD = layer.queries(z_NZ, cos_sin)
            k_NKD, v_NKD = layer.keys_values(z_NZ, cos_sin)
            h_NC = layer.finish(residual_NC, attend(index, q_NQD, k_NKD, v_NKD))
        return h_NC

    def enter(self, token_ids_N: Tensor, g_NC: Tensor) -> tuple[Tensor, Tensor]:
        """(what every layer is given beside the hidden state, what the first takes for it)."""
        return self.embed_tokens(token_ids_N), g_NC

    def take(self, layer: DraftLayer, embedded_NC: Tensor, h_NC: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input [N, C or 2C], embedding first; residual [N, C]) of a layer."""
        assert layer.input_layernorm is not None  # no layer of this family is bare
        if layer.hidden_norm is None:
            return layer.input_layernorm(h_NC), h_NC
        hidden_NC = layer.input_layernorm(h_NC) if self.config.input_norm_on_hidden else h_NC
        hidden_NC = layer.hidden_norm(hidden_NC)
        residual_NC = hidden_NC if self.config.norm_before_residual else h_NC
        return torch.cat([layer.input_layernorm(embedded_NC), hidden_NC], dim=-1), residual_NC

    def rotary(self, positions_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, 1, D]; angles are computed in float32."""
        return rotary_factors(self.config.rope, self._inv_freq, positions_N, dtype)

    def logits(self, y_NC: Tensor) -> Tensor:
        """Draft logits [N, W] in float32, in the order of the draft vocabulary."""
        normed_NC = self.norm(y_NC) if self.config.norm_logits else y_NC
        logits_NW: Tensor = self.lm_head(normed_NC).to(torch.float32)
        return logits_NW

    def feedback(self, y_NC: Tensor) -> Tensor:
        """What the next step takes as g: y, or norm(y) for EAGLE-3.1."""
        fed_NC: Tensor = self.norm(y_NC) if self.config.norm_feedback else y_NC
        return fed_NC
