"""Settings of `outrider train eagle` (EAGLE-1), besides those that every recipe shares."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from drafter_service.training.settings import TrainSettings
from protos.features import FINAL_LAYER


class EagleHeadSettings(BaseModel):
    """Shape of the head to train; what is not here follows the target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: int = Field(default=1, ge=1, le=4, description="Decoder layers.")
    num_heads: int = Field(default=9, ge=1, description="Query heads.")
    num_kv_heads: int = Field(default=3, ge=1, description="Key-value heads.")
    intermediate_size: int = Field(default=1536, ge=1, description="Width of the MLP.")
    fc_bias: bool = Field(default=True, description="A bias on fc.")


class EagleSettings(TrainSettings):
    """`outrider train eagle`."""

    head: EagleHeadSettings = EagleHeadSettings()
    feature_weight: float = Field(
        default=1.0, ge=0, description="Weight of SmoothL1 on the target's next final state."
    )
    token_weight: float = Field(
        default=0.1, ge=0, description="Weight of the cross entropy through the target's lm_head."
    )
    noise_std: float = Field(
        default=0.2,
        ge=0,
        description="Features get uniform noise of this width times 512 / tokens of the record.",
    )
    token_loss: Literal["frequent", "top"] = Field(
        default="frequent",
        description="Ids compared: the most frequent ones, or each row's recorded best (fastest).",
    )
    loss_vocab_size: int | None = Field(
        default=8192, ge=1, description="How many ids are frequent; null for all."
    )
    targets: Literal["full", "top"] = Field(
        default="top",
        description="Target's distribution over frequent ids: computed, or from recorded ids.",
    )
    check_batches: int | None = Field(
        default=2, ge=1, description="Batches of held-out answers to check; null for all."
    )

    @property
    def layers(self) -> tuple[int, ...]:
        """The state after the target's last norm."""
        return (FINAL_LAYER,)
