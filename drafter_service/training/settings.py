"""Settings that every recipe of `outrider train` shares: one YAML file, unknown keys refused.

A family adds its own in a subclass. Relative paths are taken from the working directory. Facts of
the target (sizes, rope, eps) are read from its config.json, never set here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from drafter_service.training.overrides import overridden, parse_override
from protos.errors import ConfigError


class TrainSettings(BaseModel, ABC):
    """Everything a run depends on besides the target, the recorded answers and its family."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answers: tuple[Path, ...] = Field(
        min_length=1, description="Framed msgpack files of prompts and answers; one or a list."
    )
    target: Path = Field(description="Target in Hugging Face form, safetensors.")
    features: Path = Field(description="Where feature shards are kept, a folder per answers file.")
    run: Path = Field(description="Where checkpoints and the log of the run go.")
    record_layers: tuple[int, ...] = Field(
        default=(1, 14, 26), description="Layers to record; must include those of the head."
    )
    held_out_share: float = Field(
        default=0.04, gt=0, lt=0.5, description="Share of records held out."
    )
    seed: int = Field(default=0, ge=0, description="Split, order of data and first weights.")
    threads: int = Field(default=2, ge=1, description="Threads of torch.")
    train_share: float = Field(
        default=1.0, gt=0, le=1, description="Share of the training records to use, for scaling."
    )
    rows_per_update: int = Field(
        default=1024, ge=1, description="Answer rows of one update, over all workers, about."
    )
    rows_per_pass: int | None = Field(
        default=None, ge=1, description="Rows of one backward pass; more are accumulated."
    )
    order_seed: int = Field(default=0, ge=0, description="Order of the data, besides the seed.")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW, matrices only.")
    clip_norm: float = Field(
        default=1.0, gt=0, description="Gradient norm above which it is scaled."
    )
    peak_rate: float = Field(default=1e-3, gt=0, description="Learning rate after warm-up.")
    warmup_updates: int = Field(default=60, ge=0, description="Updates of linear warm-up.")
    floor_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of the peak left at the end."
    )
    minutes: float | None = Field(
        default=None, gt=0, description="Wall-clock length; the rate reaches its floor at its end."
    )
    epochs: float | None = Field(
        default=3.0, gt=0, description="Length in passes, if not in minutes."
    )
    checkpoint_every_s: float = Field(default=300.0, gt=0, description="Time between checkpoints.")
    evaluate_every_s: float = Field(
        default=900.0, gt=0, description="Time between held-out checks."
    )
    compute_dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Arithmetic."
    )

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Aux layers that the family reads."""

    @field_validator("answers", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return [value] if isinstance(value, str | Path) else value

    @field_validator("answers")
    @classmethod
    def _told_apart(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        if len({path.stem for path in paths}) != len(paths):
            raise ValueError(
                "answers files need names of their own: their features are kept by name"
            )
        return paths

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (
            self.minutes is not None
            and self.epochs is not None
            and "epochs" in self.model_fields_set
        ):
            raise ValueError("the length is given twice: set minutes or epochs to null")
        if self.minutes is None and self.epochs is None:
            raise ValueError("no length: give minutes or epochs")
        return self


Settings = TypeVar("Settings", bound=TrainSettings)


def load_settings(
    path: Path, settings_type: type[Settings], overrides: Sequence[str] = ()
) -> Settings:
    """A file's settings, changed by `overrides` (each FIELD=VALUE, see `overrides`).

    Raises ConfigError for unreadable YAML, unknown keys and values out of bounds.
    """
    changes = [parse_override(text) for text in overrides]
    try:
        document = overridden(yaml.safe_load(path.read_text()), changes)
        return settings_type.model_validate(document)
    except (OSError, yaml.YAMLError, ValidationError, ConfigError) as error:
        changed = f", with {' '.join(overrides)}" if overrides else ""
        raise ConfigError(f"training settings {path.name}{changed}: {error}") from error
