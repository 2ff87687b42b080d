"""What a block drafter is: the facts its checkpoint states, as one value, without torch.

Knows no file format; the readers in `drafter_service/checkpoint` fill it. One value covers DFlash,
DFlash 2, DSpark and JetSpec: they differ in switches only (`reference/dflash.md` 7). Invariant:
aux layers count layer outputs from 0 (design 2), -1 being the embedding's output.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from drafter_service.eagle3.config import Rope


class Layout(StrEnum):
    """Which outputs of a block are drafts (`reference/dflash.md` 1.4)."""

    IN_PLACE = "in_place"
    """Slot k fills its own position: slots 1 .. B-1 are drafts."""
    ANCHOR_FIRST = "anchor_first"
    """Slot k predicts the position after it: all B slots are drafts."""


class MarkovKind(StrEnum):
    """How the serial head sees the token before (`reference/dflash.md` 4.1)."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


class ConfidenceInput(StrEnum):
    """What the confidence head looks at."""

    HIDDEN = "hidden"
    HIDDEN_AND_TOKEN = "hidden_and_token"


@dataclass(frozen=True, slots=True)
class LayerMask:
    """What one layer's block rows may see.

    causal: block slots after the own one are hidden. window: keys that far back are hidden, None
    for none; counted from the row's own position, or for every row from the anchor's when
    `window_from_anchor` (speculators), which then shows one context row more.
    """

    causal: bool = False
    window: int | None = None
    window_from_anchor: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window holds at least 1 position, not {self.window}")


@dataclass(frozen=True, slots=True)
class Convolution:
    """Dynamic grouped convolution around attention and MLP (DFlash 2)."""

    taps: int
    group_size: int


@dataclass(frozen=True, slots=True)
class Selector:
    """Path selector over the `num_candidates` best ids of a slot (DFlash 2)."""

    rank: int
    num_candidates: int


@dataclass(frozen=True, slots=True)
class Markov:
    """Serial head: a bias of rank `rank` from the token before (DSpark)."""

    kind: MarkovKind
    rank: int


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """What a checkpoint says about its drafter. Widths in elements, lengths in tokens."""

    layout: Layout
    block_size: int
    mask_id: int
    hidden_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    masks: tuple[LayerMask, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: Rope
    norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_positions: int = 4096
    attention_bias: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None
    convolution: Convolution | None = None
    selector: Selector | None = None
    markov: Markov | None = None
    confidence: ConfidenceInput | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What the files leave open and how it was decided, for `check`."""

    def __post_init__(self) -> None:
        if not self.masks:
            raise ValueError("a block drafter has at least one layer")
        if self.num_drafts < 1:
            raise ValueError(f"a block of {self.block_size} in layout {self.layout} drafts nothing")
        if not 0 <= self.mask_id < self.vocab_size:
            raise ValueError(f"mask id {self.mask_id} is outside the vocabulary {self.vocab_size}")
        if not self.aux_layers or min(self.aux_layers) < -1:
            raise ValueError(f"expected aux layers counted from 0, got {self.aux_layers}")
        if list(self.aux_layers) != sorted(set(self.aux_layers)):
            raise ValueError(f"aux layers must be distinct and ascending, got {self.aux_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads are no multiple of {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft vocabulary {self.draft_vocab_size} of {self.vocab_size}")
        if self.selector is not None and self.draft_vocab_size != self.vocab_size:
            raise ValueError("a path selector over a reduced vocabulary is not supported")
        if self.markov is not None and self.selector is not None:
            raise ValueError("a serial head and a path selector exclude each other")
        needs_token = self.confidence is ConfidenceInput.HIDDEN_AND_TOKEN
        if needs_token and self.markov is None:
            raise ValueError("a confidence head over tokens needs the serial head's embedding")
        if self.convolution is not None and self.hidden_size % self.convolution.group_size:
            raise ValueError(
                f"hidden size {self.hidden_size} is no multiple of the convolution's groups of "
                f"{self.convolution.group_size}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.masks)

    @property
    def first_draft_slot(self) -> int:
        """The first slot whose output is a draft."""
        return 1 if self.layout is Layout.IN_PLACE else 0

    @property
    def num_drafts(self) -> int:
        """Tokens drafted by one full block."""
        return self.block_size - self.first_draft_slot

    @property
    def feature_size(self) -> int:
        """Width of a raw feature row."""
        return len(self.aux_layers) * self.target_hidden_size
