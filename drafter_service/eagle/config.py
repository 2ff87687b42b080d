"""What an EAGLE-1 head is: the facts its checkpoint states, as one value, without torch.

Knows no file format. The head regresses the target's final state and drafts with the target's
lm_head, so its width and vocabulary are the target's.
"""

from dataclasses import dataclass

from drafter_service.eagle3.config import LayerFacts, Rope


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """`layer`: sizes and switches of every layer; the first has no input norm."""

    layer: LayerFacts
    rope: Rope
    vocab_size: int
    max_positions: int = 2048
    num_layers: int = 1
    fc_bias: bool = True

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"expected at least one layer, got {self.num_layers}")
        if self.layer.num_heads % self.layer.num_kv_heads:
            raise ValueError(
                f"{self.layer.num_heads} heads are no multiple of {self.layer.num_kv_heads}"
            )

    @property
    def hidden_size(self) -> int:
        """The target's width too."""
        return self.layer.hidden_size
