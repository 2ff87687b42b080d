"""Settings of block drafters, besides those that every recipe shares."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from drafter_service.training.settings import TrainSettings


class BlockHeadSettings(BaseModel):
    """Shape of the drafter to train; what is not here follows the target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aux_layers: tuple[int, ...] = Field(
        default=(1, 14, 26), description="Layer outputs (from 0) whose residual streams are fused."
    )
    num_layers: int = Field(default=3, ge=1, le=16, description="Decoder layers.")
    block_size: int = Field(default=8, ge=2, le=32, description="Slots, the anchor's included.")
    num_heads: int = Field(default=9, ge=1, description="Query heads.")
    num_kv_heads: int = Field(default=3, ge=1, description="Key-value heads.")
    head_dim: int = Field(default=64, ge=2, description="Width of a head.")
    intermediate_size: int = Field(default=1536, ge=1, description="Width of the MLP.")
    mask_id: int = Field(
        default=16,
        ge=0,
        description="Token that stands for a slot to fill; one the target never reads or writes "
        "(SmolLM2: 16, <empty_output>).",
    )
    start: Literal["random", "target_layers"] = Field(
        default="random",
        description="First weights of the layers; target_layers copies the target's last ones.",
    )


class BlockSettings(TrainSettings):
    """What every recipe of a block drafter may set."""

    head: BlockHeadSettings = BlockHeadSettings()
    anchors_per_update: int = Field(
        default=256, ge=1, description="Answer rows of an update that start a block, about."
    )
    loss_vocab_size: int | None = Field(
        default=8192,
        ge=1,
        description="The loss compares the most frequent answer ids only; null for all ids.",
    )
    gamma: float = Field(
        default=4.0, gt=0, description="Weight of the k-th draft is exp(-(k - 1) / gamma)."
    )
    check_batches: int | None = Field(
        default=6, ge=1, description="Batches of held-out answers to check; null for all."
    )

    @property
    def layers(self) -> tuple[int, ...]:
        """See the base."""
        return self.head.aux_layers

    @property
    def anchor_share(self) -> float:
        """Share of the answer rows that are anchors."""
        return min(1.0, self.anchors_per_update / self.rows_per_update)
