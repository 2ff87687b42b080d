"""Rules a RayService must keep beyond KubeRay's schema, as a list of faults, all at once.

They are the operator's own checks (KubeRay 1.7, validation.go) and the traps that its users
report: names with no room for suffixes, workers that the autoscaler cannot reclaim, GPUs that it
cannot see, probes that never turn ready. Knows no Kubernetes API: a manifest is a parsed mapping,
and its shape is the CRD schema's business. Quantities are Kubernetes' ("500m", "8Gi").
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.fleet.lint import NodeGroup

Spec = Mapping[str, Any]

MAX_SERVICE_NAME = 47
MAX_GROUP_NAME = 30
"""Leaves room in a 63-character label for cluster name, suffixes and `worker`."""
GPU = "nvidia.com/gpu"
TOKEN_AUTH_SINCE = (2, 52)

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def name_faults(name: object, where: str, limit: int) -> Iterator[str]:
    """A DNS-1035 label (a-z first, then a-z, 0-9 and `-`) of at most `limit` characters."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield f"{where}: {name!r} is no DNS-1035 label (a-z first, then a-z, 0-9 and -)"
    elif len(name) > limit:
        yield f"{where}: {name!r} has {len(name)} characters, at most {limit} leave room"


def quantity(value: object) -> float:
    """A Kubernetes quantity as a number; ValueError if it is none."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is no Kubernetes quantity")
    return float(match[1]) * _UNITS[match[2] or ""]


def ray_service_faults(manifest: Spec) -> list[str]:
    """Every rule broken by a RayService whose shape the CRD schema already accepts."""
    faults = list(name_faults(manifest["metadata"].get("name"), "metadata.name", MAX_SERVICE_NAME))
    cluster = manifest["spec"]["rayClusterConfig"]
    workers = cluster.get("workerGroupSpecs") or []
    version = str(cluster.get("rayVersion", ""))
    faults += _head_faults(cluster)
    faults += _auth_faults(cluster, version)
    names = [group.get("groupName") for group in workers]
    faults += [f"groupName {n!r} is used more than once" for n in {*names} if names.count(n) > 1]
    for group in [cluster["headGroupSpec"], *workers]:
        name = group.get("groupName", "head")
        faults += [f"group {name}: {fault}" for fault in _group_faults(group, version)]
    for group in workers:
        name = group.get("groupName")
        faults += name_faults(name, f"group {name}: groupName", MAX_GROUP_NAME)
        faults += [f"group {name}: {f}" for f in _worker_faults(group, cluster)]
    return faults


def node_groups(manifest: Spec) -> list[NodeGroup]:
    """The worker groups as the Ray autoscaler sees them: group resources, else rayStartParams,
    else container limits, else requests. Labels only from the group's own field."""
    groups = []
    for spec in manifest["spec"]["rayClusterConfig"].get("workerGroupSpecs") or []:
        declared = {name: quantity(v) for name, v in (spec.get("resources") or {}).items()}
        params = spec.get("rayStartParams") or {}
        held = _container(spec).get("resources") or {}
        kube = {**held.get("requests", {}), **held.get("limits", {})}
        sources = (("CPU", "num-cpus", "cpu"), ("GPU", "num-gpus", GPU), ("memory",) * 3)
        for ray_name, param, kube_name in sources:
            value = params.get(param, kube.get(kube_name))
            if value is not None:
                declared.setdefault(ray_name, quantity(value))
        labels = dict(spec.get("labels") or {})
        groups.append(NodeGroup(spec["groupName"], declared, labels, spec["maxReplicas"]))
    return groups


def _container(group: Spec) -> Spec:
    """The Ray container: always the pod's first."""
    container: Spec = group["template"]["spec"]["containers"][0]
    return container


def _head_faults(cluster: Spec) -> Iterator[str]:
    head = cluster["headGroupSpec"]
    if (head.get("rayStartParams") or {}).get("num-cpus") != "0":
        yield 'head: rayStartParams num-cpus must be "0", or replicas land on the head'
    service = head.get("headService") or {}
    if "name" in (service.get("metadata") or {}):
        yield "head: headService.metadata.name blocks upgrades of a RayService; leave it out"
    if "external" in str(service.get("spec", {}).get("type", "")).lower() or service.get(
        "spec", {}
    ).get("type") in ("LoadBalancer", "NodePort"):
        yield "head: a head service open to the outside exposes Ray's job API"


def _auth_faults(cluster: Spec, version: str) -> Iterator[str]:
    if (cluster.get("authOptions") or {}).get("mode") == "disabled":
        yield "authOptions.mode is disabled: Ray's own gRPC would accept anyone in the cluster"
    numbers = re.match(r"(\d+)\.(\d+)\.\d+$", version)
    if numbers is None:
        yield f"rayVersion must be a full version, not {version!r}"
    elif (int(numbers[1]), int(numbers[2])) < TOKEN_AUTH_SINCE:
        yield f"token authentication needs rayVersion 2.52 or newer, not {version}"


def _group_faults(group: Spec, version: str) -> Iterator[str]:
    """Rules for head and workers alike."""
    params = group.get("rayStartParams") or {}
    for name, value in params.items():
        if not isinstance(value, str):
            yield f"rayStartParams {name} must be a string, not {value!r}"
    if "labels" in params:
        yield "rayStartParams labels are ignored; use the group's own field"
    if "resources" in params and group.get("resources"):
        yield "resources are given both in rayStartParams and in the group"
    container = _container(group)
    tag = container["image"].rpartition(":")[2]
    if tag != version and not tag.startswith(f"{version}-") and not tag.endswith(f"ray{version}"):
        yield f"image tag {tag!r} does not name rayVersion {version!r}"
    held = container.get("resources") or {}
    limit, request = (held.get(kind, {}).get(GPU) for kind in ("limits", "requests"))
    if limit != request:
        yield f"GPU limits ({limit!r}) and requests ({request!r}) must be equal"
    if "num-gpus" in params and str(limit or 0) != params["num-gpus"]:
        yield f"num-gpus {params['num-gpus']!r} disagrees with the container's limit {limit!r}"


def _worker_faults(group: Spec, cluster: Spec) -> Iterator[str]:
    low, count, high = (group.get(k) for k in ("minReplicas", "replicas", "maxReplicas"))
    if not all(isinstance(n, int) for n in (low, count, high)):
        yield "minReplicas, replicas and maxReplicas must all be given"
    elif not 0 <= low <= count <= high or high < 1:  # type: ignore[operator]  # ints, just checked
        yield f"0 <= minReplicas <= replicas <= maxReplicas is broken: {low}, {count}, {high}"
    pod = group["template"]["spec"]
    if cluster.get("enableInTreeAutoscaling") and pod.get("restartPolicy") != "Never":
        yield "restartPolicy must be Never where the autoscaler may reclaim the pod"
    held = _container(group).get("resources") or {}
    if "cpu" not in {**held.get("limits", {}), **held.get("requests", {})}:
        yield "no CPU is declared: the autoscaler cannot size the group"
