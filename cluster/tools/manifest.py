"""`outrider manifest CONFIG`: a KubeRay RayService out of a cluster's configuration.

One worker group per deployment whose placement names a label or an accelerator, one replica a pod;
replicas without either (the ingress) sit beside the verifier. Reaches no cluster and reads no
checkpoint. What it returns passes its own lint, or it refuses, naming every fault.
"""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig, read_config
from cluster.fleet.kuberay import BUILDER, GPU, manifest_faults
from cluster.fleet.lint import Demand, demands_of
from protos.errors import ConfigError

HEADER = """\
# Written by `outrider manifest`; change the cluster's configuration instead of this file.
#
# Before `kubectl apply` (KubeRay 1.7 or newer):
#   the image     docker build -f configs/kubernetes/Dockerfile -t {image} .
#   the models    a PersistentVolumeClaim `{claim}`, mounted read-only at /models
#   the secrets   kubectl create secret generic {secret} \\
#                   --from-literal=token="$(openssl rand -hex 32)" --from-literal=api-keys=KEY1,KEY2
#   the nodes     kubectl label node NODE KEY=VALUE for every nodeSelector below
#
# Readiness: KubeRay asks the Serve proxy of each worker pod. A pod that holds no replica has no
# proxy and stays NotReady by design, a drafter pod that is about to be scaled away included; that
# is not a fault. Only port {port} is exposed, by the service `{name}-serve-svc`; verifiers reach
# drafters on ports that are never published. Ray's own ports ask for a token (authOptions).
"""

_POD_EXTRA_MB = 4096


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """What a cluster's configuration does not say. The image's tag names Ray's version."""

    name: str = "outrider"
    image: str = "outrider:0.1.0-ray2.60.0"
    secret: str = "outrider-secrets"
    models_claim: str = "outrider-models"

    @property
    def ray_version(self) -> str:
        """As the image's tag tells it: `...ray2.60.0`, or the tag itself."""
        tag = self.image.rpartition(":")[2]
        match = re.search(r"ray(\d+\.\d+\.\d+)", tag) or re.match(r"(\d+\.\d+\.\d+)(?:$|-)", tag)
        if match is None:
            raise ConfigError(f"the image's tag must name Ray's version, such as ray2.60.0: {tag}")
        return match[1]


def main(argv: Sequence[str]) -> int:
    """`outrider manifest CONFIG [--name N] [--image I] [--secret S] [--models-claim C]`."""
    given = ManifestOptions()
    parser = argparse.ArgumentParser(prog="outrider manifest", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="the cluster's YAML")
    parser.add_argument("--name", default=given.name, help="of the RayService")
    parser.add_argument("--image", default=given.image, help="tag names Ray's version")
    parser.add_argument("--secret", default=given.secret, help="Secret: token, api-keys")
    parser.add_argument("--models-claim", default=given.models_claim, help="claim behind /models")
    args = parser.parse_args(argv)
    options = ManifestOptions(args.name, args.image, args.secret, args.models_claim)
    sys.stdout.write(render(args.config, options))
    return 0


def render(path: Path, options: ManifestOptions) -> str:
    """The manifest as YAML. Raises ConfigError, naming every fault."""
    config = read_config(path)
    manifest = ray_service(config, options)
    faults = manifest_faults(manifest)
    if faults:
        raise ConfigError("\n".join(faults))
    header = HEADER.format(
        image=options.image,
        claim=options.models_claim,
        secret=options.secret,
        port=config.http.port,
        name=options.name,
    )
    return header + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=100)


def check_manifest(path: Path) -> list[str]:
    """All faults of a manifest file, hand-written or rendered."""
    try:
        manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"{path.name} cannot be read: {' '.join(str(error).split())}"]
    if not isinstance(manifest, dict) or manifest.get("kind") != "RayService":
        return [f"{path.name} holds no RayService"]
    return manifest_faults(manifest)


def ray_service(config: ClusterConfig, options: ManifestOptions) -> dict[str, Any]:
    """The manifest as plain values, unchecked."""
    serve = {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.http.host, "port": config.http.port},
        "applications": [
            {
                "name": "outrider",
                "route_prefix": "/",
                "import_path": BUILDER,
                "args": config.model_dump(mode="json", exclude_unset=True),
            }
        ],
    }
    head = {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": {"spec": _pod(config, options, {"cpu": "2", "memory": "8Gi"}, is_head=True)},
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": options.name},
        "spec": {
            "serveConfigV2": yaml.safe_dump(serve, sort_keys=False, width=90),
            "rayClusterConfig": {
                "rayVersion": options.ray_version,
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 300},
                "authOptions": {"mode": "token"},
                "headGroupSpec": head,
                "workerGroupSpecs": _groups(config, options),
            },
        },
    }


def _groups(config: ClusterConfig, options: ManifestOptions) -> list[dict[str, Any]]:
    """One group per placed deployment, one replica per pod; the rest rides with the verifier."""
    demands = demands_of(config)
    placed = [d for d in demands if d.label_selector or d.accelerator_type]
    if not any(d.who == "verifier" for d in placed):
        raise ConfigError("verifier.placement must name a label_selector or an accelerator_type")
    loose_cpus = sum(d.num_cpus * d.max_replicas for d in demands if d not in placed)
    lows = {
        f"drafter {e.name}": e.autoscaling.min_replicas for e in config.drafters if e.autoscaling
    }
    groups = []
    for demand in placed:
        extra = loose_cpus / demand.max_replicas if demand.who == "verifier" else 0.0
        low = lows.get(demand.who, demand.max_replicas)
        groups.append(_group(config, options, demand, low, extra))
    return groups


def _group(
    config: ClusterConfig, options: ManifestOptions, demand: Demand, low: int, extra_cpus: float
) -> dict[str, Any]:
    for key, value in demand.label_selector.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]+", value):
            raise ConfigError(f"{demand.who}: label {key} must be one plain value, not {value!r}")
    gpus = math.ceil(demand.num_gpus)
    memory_mb = math.ceil(demand.memory / 2**20)
    held = {"cpu": str(math.ceil(demand.num_cpus + extra_cpus))}
    # Beside what the replica reserves, the pod holds Ray's own processes and its object store.
    held["memory"] = f"{memory_mb + _POD_EXTRA_MB}Mi" if memory_mb else "16Gi"
    if gpus:
        held[GPU] = str(gpus)
    group: dict[str, Any] = {
        "groupName": demand.who.replace(" ", "-").replace("_", "-"),
        "replicas": low,
        "minReplicas": low,
        "maxReplicas": max(1, demand.max_replicas),
        "labels": dict(demand.label_selector),
        "rayStartParams": {},
    }
    if demand.accelerator_type:
        # The autoscaler does not infer this resource for a group without nodes.
        group["resources"] = {
            "CPU": held["cpu"],
            "GPU": str(gpus),
            f"accelerator_type:{demand.accelerator_type}": "1",
        }
    spec = _pod(config, options, held, is_head=False)
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": _grace_s(config), **spec}
    if demand.label_selector:
        spec["nodeSelector"] = dict(demand.label_selector)
    if gpus:
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    group["template"] = {"spec": spec}
    return group


def _pod(
    config: ClusterConfig, options: ManifestOptions, held: Mapping[str, str], is_head: bool
) -> dict[str, Any]:
    ports = {"serve": config.http.port, "metrics": 8080}
    if is_head:
        ports = {"gcs-server": 6379, "dashboard": 8265, **ports}
    secrets = {config.security.token_env: "token", config.http.api_keys_env: "api-keys"}
    env = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": options.secret, "key": key}}}
        for name, key in secrets.items()
        if name is not None
    ]
    return {
        "containers": [
            {
                "name": "ray-head" if is_head else "ray-worker",
                "image": options.image,
                "ports": [{"name": n, "containerPort": p} for n, p in ports.items()],
                "env": env,
                "resources": {"limits": dict(held), "requests": dict(held)},
                "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
            }
        ],
        "volumes": [
            {
                "name": "models",
                "persistentVolumeClaim": {"claimName": options.models_claim, "readOnly": True},
            }
        ],
    }


def _grace_s(config: ClusterConfig) -> int:
    """Longer than the longest drain, so that Kubernetes kills nothing that still finishes."""
    drains = [config.verifier.drain_s, config.http.drain_s, *(e.drain_s for e in config.drafters)]
    return math.ceil(max(drains)) + 30


class _Dumper(yaml.SafeDumper):
    """Writes texts of many lines as literal blocks, and nothing as an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
