"""What an EAGLE-3 head is: the facts its checkpoint states, as one value, without torch.

Knows no file format; the readers in `drafter_service/checkpoint` fill it. Invariant: aux layers
count layer outputs from 0 (design 2), whatever the checkpoint's own convention is.
"""

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """Base and scaling. `original_max_positions`: the length before scaling (for `dynamic`, the
    length up to which nothing is scaled). What a kind does not use stays at its default."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r}, expected one of {ROPE_KINDS}")
        if min(self.theta, self.factor, self.original_max_positions) <= 0:
            raise ValueError(f"rope_theta, factor and length must be positive, got {self}")


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One decoder layer's sizes and switches, Llama's or Qwen3's (`qk_norm`).

    attention_bias: on q, k, v and o; qkv_bias: on q, k and v only.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What a checkpoint says about its head. `aux_layers` counts layer outputs from 0.

    windows: per layer, how many rows back it attends (None: all). doubled_layers: every layer
    takes (embedding, hidden), not only the first. has_fc: False where the one feature is taken as
    it is. mask_token_id: set for P-EAGLE, which fills masked rows in one pass.
    """

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
    qkv_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    input_norm_on_hidden: bool = False
    num_layers: int = 1
    doubled_layers: bool = False
    windows: tuple[int | None, ...] = (None,)
    has_fc: bool = True
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if min(self.aux_layers, default=-1) < 0:
            raise ValueError(f"expected aux layers counted from 0, got {self.aux_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads are no multiple of {self.num_kv_heads}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft vocabulary {self.draft_vocab_size} > {self.vocab_size}")
        if self.num_layers < 1 or len(self.windows) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers with windows {self.windows}")
        if not self.has_fc and self.feature_size != self.hidden_size:
            raise ValueError(f"features of {self.feature_size} without fc in {self.hidden_size}")
        mask = self.mask_token_id
        if mask is not None and not 0 <= mask < self.vocab_size:
            raise ValueError(f"mask_token_id {mask} outside the vocabulary of {self.vocab_size}")

    @property
    def num_aux(self) -> int:
        return len(self.aux_layers)

    @property
    def feature_size(self) -> int:
        """Width of a raw feature row."""
        return self.num_aux * self.target_hidden_size

    @property
    def layer_facts(self) -> LayerFacts:
        """Every layer's sizes and switches."""
        return LayerFacts(
            self.hidden_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.intermediate_size,
            self.norm_eps,
            self.attention_bias,
            self.qkv_bias,
            self.mlp_bias,
            self.qk_norm,
        )
