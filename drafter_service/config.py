"""What a drafter can be told: kind, checkpoint, limits and where to listen.

Torch-free, so that a head node without a GPU can check a whole cluster. Facts of a drafter (layers,
widths, vocabulary) are not here: they come from its checkpoint. Unknown keys are refused.
"""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from drafter_service.kinds import check_kind
from protos.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DrafterLimits(_Section):
    """Bounds of one drafter. Lengths in tokens."""

    max_sessions: int = Field(default=64, ge=1, le=65536, description="Sessions held at once.")
    max_context: int = Field(
        default=8192, ge=16, le=2**20, description="Committed tokens of one session."
    )
    max_depth: int = Field(default=16, ge=1, le=64, description="Levels of a draft.")
    max_width: int = Field(default=10, ge=1, le=64, description="Nodes expanded per level.")
    max_nodes: int = Field(
        default=64, ge=1, le=256, description="Draft nodes of a tree, the anchor not counted."
    )
    cache_mb: int = Field(
        default=64, ge=1, le=65536, description="Budget of the drafter's own KV, in MiB."
    )
    max_works: int = Field(
        default=256, ge=1, le=4096, description="Sessions named by one message of the Draft stream."
    )


class DrafterSettings(_Section):
    """One drafter. `name` is what plans and statistics call it; it defaults to the kind."""

    kind: str = Field(max_length=64, description="The algorithm: ours, or an installed package's.")
    name: str = Field(default="", max_length=64, description="Name of this drafter.")
    checkpoint: str = Field(
        default="", description="Directory of the checkpoint, or the name of a shipped head."
    )
    variant: str = Field(
        default="",
        max_length=128,
        description="Which reading of a checkpoint whose files leave one open; see the check.",
    )
    target: str = Field(
        default="", description="Directory of the target: its embedding and its digest."
    )
    dtype: Literal["bf16", "fp32"] = Field(default="bf16", description="Compute type.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute; auto takes a GPU where there is one."
    )
    num_threads: int = Field(default=1, ge=0, le=256, description="Torch threads; 0 leaves them.")
    limits: DrafterLimits = Field(default_factory=DrafterLimits, description="Bounds.")
    idle_session_s: float = Field(
        default=60.0, gt=0, le=86400, description="A session unused for so long is dropped."
    )

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        return check_kind(kind)

    @property
    def label(self) -> str:
        """The name, or the kind where none is given."""
        return self.name or self.kind


class TlsSection(_Section):
    """PEM files for mutual TLS."""

    authority: Path = Field(description="Certificate authority that both sides trust.")
    certificate: Path = Field(description="This drafter's certificate.")
    key: Path = Field(description="Its private key.")


class DrafterServerSettings(DrafterSettings):
    """A drafter behind a gRPC server of its own."""

    listen: str = Field(
        default="127.0.0.1:0", max_length=255, description="host:port; port 0 takes a free one."
    )
    token: str = Field(default="", max_length=512, description="Bearer token asked of callers.")
    tls: TlsSection | None = Field(default=None, description="Mutual TLS.")
    insecure: bool = Field(
        default=False, description="Allow listening beyond loopback with neither token nor TLS."
    )
    drain_s: float = Field(
        default=10.0, ge=0, le=600, description="How long a stopping server waits for sessions."
    )


def load_settings(path: Path, overrides: dict[str, object] | None = None) -> DrafterServerSettings:
    """Read a YAML file; values in `overrides` win. Raises ConfigError, naming every bad key."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the drafter's configuration cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"expected a mapping of keys, not {type(document).__name__}")
    return parse_settings({**document, **(overrides or {})})


def parse_settings(values: dict[str, object]) -> DrafterServerSettings:
    """Settings out of plain values. Raises ConfigError, naming every bad key."""
    try:
        return DrafterServerSettings.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'settings'}: {item['msg']}"
            for item in error.errors()
        )
        raise ConfigError(problems) from error
