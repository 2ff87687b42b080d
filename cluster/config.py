"""One YAML is one cluster: models, verifier, drafters, router, HTTP, security.

Torch-free, so that a head node without a GPU can check all of it. Unknown keys are errors and
every fault is named at once. Facts of models come from checkpoints, never from here. The defaults
run on a laptop with two cores.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.http.limits import Limits
from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.kinds import check_kind
from protos.errors import ConfigError
from verifier_service.config import (
    DEVICE_MEANS,
    EMBEDDED,
    Device,
    EngineSection,
    TlsSection,
    TraceSection,
)

NGRAM = "ngram"
_RESERVED = ("auto", "off")

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_.-]{0,61}[a-z0-9])?$")]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class Section(BaseModel):
    """A part of the file: nothing unknown, nothing changed after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Placement(Section):
    """What each replica asks of a node, in Ray's terms."""

    num_cpus: float = Field(default=0.5, ge=0, le=1024, description="CPUs reserved (a share).")
    num_gpus: float = Field(default=0.0, ge=0, le=64, description="GPUs reserved (a share).")
    memory_mb: int = Field(default=0, ge=0, le=2**24, description="MiB reserved; 0: not counted.")
    accelerator_type: str | None = Field(
        default=None, max_length=64, description="Ray's name of the accelerator, such as H100."
    )
    label_selector: dict[str, str] = Field(
        default_factory=dict, description="Node labels that must match."
    )

    def ray_options(self) -> dict[str, object]:
        """As Serve's ray_actor_options."""
        options: dict[str, object] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.memory_mb:
            options["memory"] = self.memory_mb * 2**20
        if self.accelerator_type is not None:
            options["accelerator_type"] = self.accelerator_type
        if self.label_selector:
            options["label_selector"] = dict(self.label_selector)
        return options


def _require_reserved(device: Device, placement: Placement) -> None:
    """A GPU that is named is reserved, and one that is reserved is used."""
    if device == "cuda" and not placement.num_gpus:
        raise ValueError("device cuda needs placement.num_gpus")
    if device == "cpu" and placement.num_gpus:
        raise ValueError("placement.num_gpus reserves GPUs that device cpu leaves idle")


class VerifierSection(Section):
    """The target and the replicas that run it."""

    target: str = Field(
        default=EMBEDDED,
        min_length=1,
        max_length=4096,
        description="Hugging Face directory of the target, a GGUF file, or `embedded` (SmolLM2).",
    )
    dtype: Literal["bf16", "fp32", "fp16"] = Field(default="bf16", description="Compute type.")
    device: Device = Field(default="auto", description=DEVICE_MEANS)
    num_threads: int = Field(default=2, ge=1, le=256, description="Torch threads of a replica.")
    replicas: int = Field(default=1, ge=1, le=1024, description="Replicas.")
    engine: EngineSection = Field(default_factory=EngineSection, description="Bounds.")
    drain_s: Seconds = Field(default=60.0, description="How long running requests may finish.")
    traces: TraceSection | None = Field(
        default=None, description="Record rounds, on each replica's own machine; null: none."
    )
    placement: Placement = Field(
        default_factory=lambda: Placement(num_cpus=1.0), description="Resources of a replica."
    )

    @model_validator(mode="after")
    def _device_is_reserved(self) -> Self:
        _require_reserved(self.device, self.placement)
        return self


class Scaling(Section):
    """Bounds of a pool of drafters and what one replica should carry."""

    min_replicas: int = Field(default=1, ge=0, le=1024, description="Fewest replicas.")
    max_replicas: int = Field(default=1, ge=1, le=1024, description="Most replicas.")
    target_sessions: float = Field(default=16.0, gt=0, le=1e6, description="Open sessions.")
    target_busy: float = Field(default=0.6, gt=0, le=1, description="Share of time computing.")
    target_waiting: float = Field(default=4.0, gt=0, le=1e6, description="Sessions that wait.")
    upscale_delay_s: float = Field(default=5.0, ge=0, le=3600, description="Calm before adding.")
    downscale_delay_s: float = Field(
        default=60.0, ge=0, le=86400, description="Calm before removing."
    )
    look_back_s: float = Field(default=30.0, gt=0, le=600, description="Window of the statistics.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas must not exceed max_replicas")
        return self


class DrafterEntry(Section):
    """One drafter: a Serve deployment of its own, or a part of each verifier (`colocated`)."""

    name: Name = Field(description="What plans, statistics and requests call it.")
    kind: str = Field(max_length=64, description="The algorithm.")
    checkpoint: str = Field(
        default="", max_length=4096, description="Its directory, or the name of a shipped head."
    )
    variant: str = Field(
        default="",
        max_length=128,
        description="Which reading of a checkpoint whose files leave one open (`outrider check` "
        "names them); empty: verifiers keep the one that scores best, drafters of their own "
        "process take the first.",
    )
    dtype: Literal["bf16", "fp32"] = Field(default="bf16", description="Compute type.")
    device: Device = Field(default="auto", description=DEVICE_MEANS)
    num_threads: int = Field(default=1, ge=1, le=256, description="Torch threads of a replica.")
    limits: DrafterLimits = Field(default_factory=DrafterLimits, description="Bounds.")
    idle_session_s: Seconds = Field(default=60.0, description="Unused sessions are dropped after.")
    colocated: bool = Field(default=False, description="Run inside each verifier replica.")
    replicas: int | None = Field(default=None, ge=1, le=1024, description="A fixed count.")
    autoscaling: Scaling | None = Field(default=None, description="Or bounds for scaling.")
    drain_s: float = Field(default=10.0, ge=0, le=600, description="Wait for sessions to leave.")
    placement: Placement = Field(
        default_factory=lambda: Placement(num_cpus=0.4), description="Resources of a replica."
    )

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        return check_kind(kind)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "+" in self.name or self.name in _RESERVED:
            raise ValueError(f"{self.name!r} cannot name a drafter")
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("give replicas or autoscaling, not both")
        if self.colocated and (self.replicas is not None or self.autoscaling is not None):
            raise ValueError("a colocated drafter has no replicas of its own")
        if not self.colocated:
            _require_reserved(self.device, self.placement)
        return self

    def settings(self, target: str, checkpoint: str) -> DrafterSettings:
        """What drafter_service builds it from; both directories are resolved."""
        return DrafterSettings.model_validate(
            {
                "kind": self.kind,
                "name": self.name,
                "checkpoint": checkpoint,
                "variant": self.variant,
                "target": target,
                "dtype": self.dtype,
                "device": self.device,
                "num_threads": self.num_threads,
                "limits": self.limits,
                "idle_session_s": self.idle_session_s,
            }
        )


class RouterSection(Section):
    """How the ingress and the verifiers learn who is alive."""

    period_s: float = Field(default=2.0, ge=0.1, le=60, description="Time between two looks.")
    timeout_s: float = Field(
        default=5.0, gt=0, le=60, description="How long each has to answer a look."
    )
    silence_s: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="A verifier that has a request, gives no tokens and makes no steps for so long "
        "is lost.",
    )


class HttpSection(Section):
    """The HTTP face."""

    host: str = Field(default="127.0.0.1", max_length=255, description="Address to listen on.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port.")
    replicas: int = Field(default=1, ge=1, le=256, description="Ingress replicas.")
    api_keys_env: str | None = Field(
        default=None, max_length=128, description="Variable with API keys, comma-separated."
    )
    api_keys_file: str | None = Field(
        default=None, max_length=4096, description="File with one API key a line."
    )
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024, le=2**30, description="Largest body.")
    max_prompts: int = Field(default=16, ge=1, le=1024, description="Prompts of one call.")
    max_requests: int = Field(
        default=128, ge=1, le=2**16, description="Requests in the house per ingress replica."
    )
    retry_after_s: float = Field(default=1.0, gt=0, le=600, description="Told when refused.")
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        description="The longest that a call may take, whatever its own timeout_s says; null: any.",
    )
    drain_s: Seconds = Field(default=60.0, description="How long running replies may finish.")
    placement: Placement = Field(
        default_factory=lambda: Placement(num_cpus=0.2), description="Resources of a replica."
    )

    def limits(self) -> Limits:
        """As the ingress wants them."""
        return Limits(
            self.max_body_bytes,
            self.max_prompts,
            self.max_requests,
            self.retry_after_s,
            timeout_s=self.timeout_s,
        )


class SecuritySection(Section):
    """Between verifier and drafters."""

    token_env: str | None = Field(
        default=None,
        max_length=128,
        description="Variable with the bearer token; null: a new one for every start.",
    )
    tls: TlsSection | None = Field(
        default=None, description="Mutual TLS besides; the files are there on every node."
    )
    insecure: bool = Field(default=False, description="No token at all. For experiments.")


class ClusterConfig(Section):
    """A whole cluster. Also the one argument of the Serve builder."""

    models: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=lambda: ["smollm2-135m-instruct"],
        min_length=1,
        max_length=16,
        description="Names that requests may use; the first is the one in replies.",
    )
    verifier: VerifierSection = Field(default_factory=VerifierSection, description="The target.")
    drafters: list[DrafterEntry] = Field(
        default_factory=list,
        max_length=32,
        description="Drafters beside `ngram`, which every verifier has.",
    )
    router: RouterSection = Field(default_factory=RouterSection, description="Discovery.")
    http: HttpSection = Field(default_factory=HttpSection, description="The HTTP face.")
    security: SecuritySection = Field(default_factory=SecuritySection, description="The wire.")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [NGRAM, *(entry.name for entry in self.drafters)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"drafters: names must differ, {', '.join(twice)} stands twice")
        return self


def read_config(path: Path) -> ClusterConfig:
    """The cluster that a file describes. Raises: ConfigError with every fault, one a line."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path.name} must hold a mapping of sections")
    return parse_config(document)


def parse_config(document: dict[str, object]) -> ClusterConfig:
    """As `read_config`, of plain values."""
    try:
        return ClusterConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(faults_of(error))) from error


def faults_of(error: ValidationError) -> list[str]:
    """Every fault as `key.path: what is wrong`."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in found]
