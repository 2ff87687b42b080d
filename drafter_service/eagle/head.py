"""The EAGLE-1 draft head: feature regression on the target's final states.

    x_t = fc(embed(token t + 1), f_t)         f_t: the target's state after its last norm
    y_t = decoder layers(x)                   the first layer has no input norm, no norm at the end
    logits = lm_head(y_t), the target's       y_t stands for f_{t+1} in the next step

The embedding enters at every step, so a verifier cannot fuse rows ahead: they are taken raw. The
caller owns cache and mask. Every fact comes from `EagleConfig`. Paper 2401.15077, equations
`reference/eagle.md` 2.

Shapes: N rows, C hidden size, V target vocabulary, D head_dim.
"""

import torch
from torch import Tensor, nn

from drafter_service.attention import Attend
from drafter_service.eagle.config import EagleConfig
from drafter_service.eagle3.layer import DraftLayer, LayerInput
from drafter_service.eagle3.rope import inverse_frequencies, rotary_factors


class EagleHead(nn.Module):
    """fuse, step, logits, feedback: the four verbs of a draft."""

    target_ids: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        c = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, c)
        self.fc = nn.Linear(2 * c, c, config.fc_bias)
        self.layer = DraftLayer(config.layer, LayerInput.BARE)
        self.later = nn.ModuleList(
            DraftLayer(config.layer, LayerInput.ORDINARY) for _ in range(config.num_layers - 1)
        )
        self.lm_head = nn.Linear(c, config.vocab_size, bias=False)
        self.register_buffer("target_ids", torch.arange(config.vocab_size), persistent=False)
        self.reset_frequencies()

    def reset_frequencies(self) -> None:
        """Compute what is no parameter; again after the head was made on the meta device."""
        self._inv_freq = inverse_frequencies(self.config.rope, self.config.layer.head_dim)
        self.target_ids = torch.arange(self.config.vocab_size)

    @property
    def layers(self) -> tuple[DraftLayer, ...]:
        """All layers, in order."""
        return (self.layer, *self.later)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Every layer attends to all rows."""
        return (None,) * self.config.num_layers

    def fuse(self, features_NC: Tensor) -> Tensor:
        """Features as they are: the projection needs the next token too."""
        return features_NC

    def mix(self, token_ids_N: Tensor, f_NC: Tensor) -> Tensor:
        """x [N, C] of rows (feature or feedback, the token after it)."""
        x_NC: Tensor = self.fc(torch.cat([self.embed_tokens(token_ids_N), f_NC], dim=-1))
        return x_NC

    def enter(self, token_ids_N: Tensor, f_NC: Tensor) -> tuple[Tensor, Tensor]:
        """(what every layer is given beside the hidden state: nothing here; x)."""
        x_NC = self.mix(token_ids_N, f_NC)
        return x_NC[:, :0], x_NC

    def take(self, layer: DraftLayer, _embedded_NC: Tensor, h_NC: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input [N, C], residual [N, C]) of a layer."""
        z_NC = h_NC if layer.input_layernorm is None else layer.input_layernorm(h_NC)
        return z_NC, h_NC

    def step(
        self, token_ids_N: Tensor, g_NC: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """y [N, C] of rows."""
        embedded_NC, h_NC = self.enter(token_ids_N, g_NC)
        cos_sin = self.rotary(positions_N, h_NC.dtype)
        for index, layer in enumerate(self.layers):
            z_NC, residual_NC = self.take(layer, embedded_NC, h_NC)
            q_NQD = layer.queries(z_NC, cos_sin)
            k_NKD, v_NKD = layer.keys_values(z_NC, cos_sin)
            h_NC = layer.finish(residual_NC, attend(index, q_NQD, k_NKD, v_NKD))
        return h_NC

    def rotary(self, positions_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, 1, D]; angles are computed in float32."""
        return rotary_factors(self.config.rope, self._inv_freq, positions_N, dtype)

    def logits(self, y_NC: Tensor) -> Tensor:
        """Draft logits [N, V] in float32."""
        logits_NV: Tensor = self.lm_head(y_NC).to(torch.float32)
        return logits_NV

    def feedback(self, y_NC: Tensor) -> Tensor:
        """What the next step takes: the predicted feature."""
        return y_NC
