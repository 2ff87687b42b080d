"""The EAGLE-3 head packed for drafting; `Eagle3Head` stays the definition (tested against it).

Knows no session and no tree.

Shapes: N rows, A raw feature width, C hidden size, V target vocabulary, W draft vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm

from drafter_service.attention import Attend
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.layer import DraftLayer
from drafter_service.eagle3.packed_layer import PackedLayer, RotaryTable


class PackedHead:
    """fuse, step, logits, feedback of one head; positions below `max_positions`."""

    def __init__(self, head: Eagle3Head, max_positions: int) -> None:
        self._head = head
        self._config = head.config
        self._shape = (head.config.hidden_size,)
        self._eps = head.config.norm_eps
        self._layers = [(layer, PackedLayer(layer, n)) for n, layer in enumerate(head.layers)]
        weight = head.lm_head.weight
        with torch.no_grad():
            positions = torch.arange(max_positions, device=weight.device)
            self._rotary = RotaryTable(*head.rotary(positions, weight.dtype))

    def fuse(self, features_NA: Tensor) -> Tensor:
        """See `Eagle3Head.fuse`."""
        return self._head.fuse(features_NA)

    def step(
        self, token_ids_N: Tensor, g_NC: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """See `Eagle3Head.step`."""
        embedded_NC = embedding(token_ids_N, self._head.embed_tokens.weight)
        rotary = self._rotary.at(positions_N)
        h_NC = g_NC
        for layer, packed in self._layers:
            z_NZ, residual_NC = self._mix(layer, embedded_NC, h_NC)
            h_NC = packed.run(z_NZ, residual_NC, rotary, attend)
        return h_NC

    def logits(self, y_NC: Tensor) -> Tensor:
        """See `Eagle3Head.logits`."""
        if self._config.norm_logits:
            y_NC = self._norm(y_NC, self._head.norm.weight)
        return linear(y_NC, self._head.lm_head.weight).to(torch.float32)

    def feedback(self, y_NC: Tensor) -> Tensor:
        """See `Eagle3Head.feedback`."""
        return self._norm(y_NC, self._head.norm.weight) if self._config.norm_feedback else y_NC

    def _mix(self, layer: DraftLayer, embedded_NC: Tensor, h_NC: Tensor) -> tuple[Tensor, Tensor]:
        assert layer.input_layernorm is not None  # no layer of this family is bare
        norm = layer.input_layernorm.weight
        if layer.hidden_norm is None:
            return self._norm(h_NC, norm), h_NC
        hidden_NC = self._norm(h_NC, norm) if self._config.input_norm_on_hidden else h_NC
        hidden_NC = self._norm(hidden_NC, layer.hidden_norm.weight)
        residual_NC = hidden_NC if self._config.norm_before_residual else h_NC
        return torch.cat([self._norm(embedded_NC, norm), hidden_NC], dim=-1), residual_NC

    def _norm(self, x_NC: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x_NC, self._shape, weight, self._eps)
