"""What an EAGLE-3 head is: the facts its checkpoint states, as one value, without torch.

Knows no file format; the readers in `drafter_service/checkpoint` fill it. Invariant: aux layers
count layer outputs from 0 (design 2), whatever the checkpoint's own convention is.
"""

from dataclasses import dataclass

ROPE_KINDS = ("default", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """Base and scaling; the last four matter for `llama3` only."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r}, expected one of {ROPE_KINDS}")
        if self.theta <= 0:
            raise ValueError(f"rope_theta must be positive, got {self.theta}")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What a checkpoint says about its head. `aux_layers` counts layer outputs from 0."""

    hidden_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: Rope
    norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_positions: int = 2048
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_feedback: bool = False
    norm_logits: bool = True
    attention_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    input_norm_on_hidden: bool = False

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if min(self.aux_layers, default=-1) < 0:
            raise ValueError(f"expected aux layers counted from 0, got {self.aux_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads are no multiple of {self.num_kv_heads}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft vocabulary {self.draft_vocab_size} > {self.vocab_size}")

    @property
    def num_aux(self) -> int:
        return len(self.aux_layers)

    @property
    def feature_size(self) -> int:
        """Width of a raw feature row."""
        return self.num_aux * self.target_hidden_size
