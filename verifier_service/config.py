"""What a verifier that runs on its own can be told: target, sizes, drafters, where to listen.

Torch-free, so that a head node without a GPU can check it. Facts of a model (layers, vocabulary,
context) are not here: they come from its checkpoint. Unknown keys are refused.
"""

from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from protos.errors import ConfigError

EMBEDDED = "embedded"

Device = Literal["auto", "cpu", "cuda"]
DEVICE_MEANS = "Where to compute; auto takes a GPU where torch finds one."

THREAD_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}
"""Environment of every process that computes, set before torch is loaded.

Idle OpenMP threads that spin starve the neighbours, and threads that sleep between a step's few
hundred parallel regions cost a third of the step in wake-ups: about 40 us of spinning, then sleep.
"""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RemoteDrafter(_Section):
    """A drafter at a fixed address. Directories of running replicas belong to the cluster."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$", description="What plans and statistics call it."
    )
    address: str = Field(min_length=3, max_length=255, description="host:port of the drafter.")
    checkpoint: str = Field(
        default="",
        max_length=4096,
        description="Directory of its checkpoint; with it, its input projection is applied here "
        "and fused rows are sent, else raw ones.",
    )


class TlsSection(_Section):
    """PEM files for mutual TLS, used towards callers and drafters alike."""

    authority: Path = Field(description="Certificate authority that both sides trust.")
    certificate: Path = Field(description="This side's certificate.")
    key: Path = Field(description="Its private key.")
    server_name: str = Field(
        default="", max_length=255, description="Name in a drafter's certificate, if not its host."
    )


class EngineSection(_Section):
    """Bounds of the engine. Lengths in tokens."""

    page_size: int = Field(default=64, ge=1, le=1024, description="Slots of a page of KV.")
    num_slots: int | None = Field(
        default=None, ge=64, le=2**28, description="Token places of KV; null: 16384, or by kv_mb."
    )
    kv_mb: int | None = Field(
        default=None,
        ge=1,
        le=2**24,
        description="MiB for KV and feature rows, instead of slots; kept keys may take half more.",
    )
    max_tokens_per_step: int = Field(default=512, ge=1, le=2**20, description="Rows of a forward.")
    max_prefill_chunk: int = Field(
        default=512, ge=1, le=2**20, description="Rows that one prompt may take of a step."
    )
    max_prefill_while_decoding: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Rows that all prompts together may take of a step in which others decode; "
        "null: one max_prefill_chunk, at most 256.",
    )
    prefix_cache: bool = Field(
        default=True, description="Find the KV of a prefix that was computed before again."
    )
    max_running: int = Field(default=16, ge=1, le=4096, description="Requests in a step.")
    max_queued: int = Field(default=256, ge=0, le=2**16, description="Requests that may wait.")
    max_context: int | None = Field(
        default=None, ge=2, le=2**24, description="Longest prompt plus answer; null: the target's."
    )
    max_draft_wait_s: float = Field(
        default=0.5, gt=0, le=60, description="The longest that a step may wait for drafts."
    )
    min_agreement: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="A drafter whose first guesses on the test text are right less often is not "
        "used; 0 uses any.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_slots is not None and self.kv_mb is not None:
            raise ValueError("give num_slots or kv_mb, not both")
        if self.max_running > self.max_tokens_per_step:
            raise ValueError("max_running must not exceed max_tokens_per_step")
        return self


class TraceSection(_Section):
    """Where rounds are recorded, for `outrider explain`. Traces hold the tokens of answers and
    drafts, so they belong to whoever may read what users were told."""

    dir: str = Field(
        min_length=1,
        max_length=4096,
        description="Folder (an absolute path) for the files of every verifier that names it; "
        "they are readable by their owner only.",
    )
    share: float = Field(
        default=1.0, gt=0, le=1, description="Share of requests, chosen by their ids."
    )
    max_mb: int = Field(
        default=256, ge=1, le=2**20, description="MiB in the folder; the oldest files go."
    )

    @field_validator("dir")
    @classmethod
    def _absolute(cls, folder: str) -> str:
        # Replicas of a cluster run in directories that nobody chose.
        try:
            is_absolute = Path(folder).expanduser().is_absolute()
        except RuntimeError as error:  # ~name, and nobody is called so
            raise ValueError("begins with a home directory that nobody has") from error
        if not is_absolute:
            raise ValueError("must be an absolute path")
        return folder


class VerifierSettings(_Section):
    """A verifier behind a gRPC server of its own."""

    target: str = Field(
        default=EMBEDDED,
        min_length=1,
        max_length=4096,
        description="Hugging Face directory of the target, a GGUF file, or `embedded` (SmolLM2).",
    )
    dtype: Literal["bf16", "fp32", "fp16"] = Field(default="bf16", description="Compute type.")
    device: Device = Field(default="auto", description=DEVICE_MEANS)
    num_threads: int = Field(default=0, ge=0, le=1024, description="Torch threads; 0 leaves them.")
    engine: EngineSection = Field(default_factory=EngineSection, description="Bounds.")
    planner: Literal["adaptive", "override_only"] = Field(
        default="adaptive",
        description="adaptive: learn what to draft; override_only: draft only for requests whose "
        "own override names a plan.",
    )
    drafters: list[RemoteDrafter] = Field(
        default_factory=list, max_length=32, description="Drafters to ask."
    )
    describe_s: float = Field(
        default=10.0, gt=0, le=600, description="How long a starting verifier waits for a drafter."
    )
    listen: str = Field(
        default="127.0.0.1:0", max_length=255, description="host:port; port 0 takes a free one."
    )
    token: str = Field(
        default="",
        max_length=512,
        repr=False,
        description="Bearer token asked of callers and shown to drafters.",
    )
    tls: TlsSection | None = Field(default=None, description="Mutual TLS.")
    insecure: bool = Field(
        default=False, description="Allow listening beyond loopback with neither token nor TLS."
    )
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="How long a stopping verifier finishes requests."
    )
    traces: TraceSection | None = Field(default=None, description="Record rounds; null: none.")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [drafter.name for drafter in self.drafters]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"drafters: names must differ, {', '.join(twice)} stands twice")
        return self


def load_settings(path: Path, overrides: dict[str, object] | None = None) -> VerifierSettings:
    """Read a YAML file; values in `overrides` win. Raises ConfigError, naming every bad key."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path.name} must hold a mapping of keys")
    return parse_settings({**document, **(overrides or {})})


def parse_settings(values: dict[str, object]) -> VerifierSettings:
    """Settings out of plain values. Raises ConfigError, naming every bad key."""
    try:
        return VerifierSettings.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'settings'}: {item['msg']}"
            for item in error.errors()
        )
        raise ConfigError(problems) from error
