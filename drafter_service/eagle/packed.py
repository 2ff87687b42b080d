"""The EAGLE-1 head packed for drafting; `EagleHead` stays the definition (tested against it).

Shapes: N rows, C hidden size, V target vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm

from drafter_service.attention import Attend
from drafter_service.eagle.head import EagleHead
from drafter_service.eagle3.packed_layer import PackedLayer, RotaryTable


class PackedEagle:
    """fuse, step, logits, feedback of one head; positions below `max_positions`."""

    def __init__(self, head: EagleHead, max_positions: int) -> None:
        self._head = head
        self._shape = (head.config.hidden_size,)
        self._eps = head.config.layer.norm_eps
        self._layers = [(layer, PackedLayer(layer, n)) for n, layer in enumerate(head.layers)]
        weight = head.lm_head.weight
        with torch.no_grad():
            positions = torch.arange(max_positions, device=weight.device)
            self._rotary = RotaryTable(*head.rotary(positions, weight.dtype))

    def fuse(self, features_NC: Tensor) -> Tensor:
        """See `EagleHead.fuse`."""
        return features_NC

    def step(
        self, token_ids_N: Tensor, g_NC: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """See `EagleHead.step`."""
        head = self._head
        embedded_NC = embedding(token_ids_N, head.embed_tokens.weight)
        h_NC = linear(torch.cat([embedded_NC, g_NC], dim=-1), head.fc.weight, head.fc.bias)
        rotary = self._rotary.at(positions_N)
        for layer, packed in self._layers:
            norm = layer.input_layernorm
            z_NC = h_NC if norm is None else rms_norm(h_NC, self._shape, norm.weight, self._eps)
            h_NC = packed.run(z_NC, h_NC, rotary, attend)
        return h_NC

    def logits(self, y_NC: Tensor) -> Tensor:
        """See `EagleHead.logits`."""
        return linear(y_NC, self._head.lm_head.weight).to(torch.float32)

    def feedback(self, y_NC: Tensor) -> Tensor:
        """See `EagleHead.feedback`."""
        return y_NC
