"""Settings of `outrider train eagle3`, besides those that every recipe shares."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from drafter_service.training.loss import Comparison, LossKind
from drafter_service.training.settings import TrainSettings


class HeadSettings(BaseModel):
    """Shape of the head to train; what is not here follows the target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aux_layers: tuple[int, ...] = Field(
        default=(1, 14, 26), description="Layer outputs (from 0) whose residual streams are fused."
    )
    num_layers: int = Field(
        default=1, ge=1, le=4, description="Decoder layers; further ones take the hidden alone."
    )
    draft_vocab_size: int = Field(
        default=8192, ge=1, description="Most frequent answer ids to keep."
    )
    num_heads: int = Field(default=9, ge=1, description="Query heads.")
    num_kv_heads: int = Field(default=3, ge=1, description="Key-value heads.")
    intermediate_size: int = Field(default=1536, ge=1, description="Width of the MLP.")
    norm_before_residual: bool = Field(
        default=True, description="Residual starts from the normed hidden."
    )
    fc_norm: bool = Field(
        default=True, description="One norm per aux feature before fc (EAGLE-3.1)."
    )
    norm_feedback: bool = Field(
        default=True, description="Feed back the normed hidden (EAGLE-3.1)."
    )
    start: Literal["random", "target_layers"] = Field(
        default="random",
        description="First weights of the layers; target_layers copies the target's last ones.",
    )


class Eagle3Settings(TrainSettings):
    """`outrider train eagle3`."""

    head: HeadSettings = HeadSettings()
    num_steps: int = Field(default=3, ge=1, le=8, description="Steps of training-time test.")
    step_decay: float = Field(
        default=0.8, gt=0, le=1, description="Weight of step j is this to the j."
    )
    missed_share: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of rows that missed and still take the next step; 1 for all rows.",
    )
    loss: LossKind = Field(
        default=LossKind.KL,
        description="kl; lk_alpha: -log of the acceptance; lk_hybrid: kl first, acceptance later.",
    )
    lk_eta: float = Field(
        default=3.0, ge=0, description="How fast lk_hybrid leaves kl as acceptance grows."
    )
    targets: Literal["full", "top"] = Field(
        default="full",
        description="Target's distribution: from its lm_head, or from the ids recorded (faster).",
    )

    @property
    def comparison(self) -> Comparison:
        """Of q with p."""
        return Comparison(self.loss, self.lk_eta)

    @property
    def layers(self) -> tuple[int, ...]:
        """See the base."""
        return self.head.aux_layers
