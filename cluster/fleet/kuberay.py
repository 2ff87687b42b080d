"""Rules a RayService must keep beyond KubeRay's schema, as a list of faults, all at once.

They are the operator's own checks (KubeRay 1.7, validation.go) and the traps that its users
report: names with no room for suffixes, workers that the autoscaler cannot reclaim, GPUs that it
cannot see, probes that never turn ready. Knows no Kubernetes API: a manifest is a parsed mapping,
and its shape is the CRD schema's business. Quantities are Kubernetes' ("500m", "8Gi").
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.config import ClusterConfig, parse_config
from cluster.fleet.lint import NodeGroup, demands_of, parse_yaml, placement_faults, serve_faults
from protos.errors import ConfigError

Spec = Mapping[str, Any]

BUILDER = "cluster.fleet.app:build_app"

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


def manifest_faults(manifest: Spec) -> list[str]:
    """Everything wrong with a RayService: the operator's rules, its Serve config, our builder's
    arguments, and replicas that fit no worker group. The CRD schema is checked elsewhere."""
    try:
        faults = ray_service_faults(manifest)
        groups = node_groups(manifest)
        text = manifest["spec"]["serveConfigV2"]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        return [f"this is no RayService: {type(error).__name__} {error}"]
    serve, broken = parse_yaml(str(text), "serveConfigV2")
    if broken:
        return faults + broken
    faults += [f"serveConfigV2: {fault}" for fault in serve_faults(serve)]
    faults += _proxy_faults(manifest, serve)
    applications = serve.get("applications")
    for app in applications if isinstance(applications, list) else ():
        if not isinstance(app, dict):
            continue
        if app.get("import_path") != BUILDER:
            faults.append(f"import_path {app.get('import_path')!r} is not {BUILDER}")
            continue
        try:
            config = parse_config(app.get("args") or {})
        except ConfigError as error:
            faults += [f"args: {line}" for line in str(error).splitlines()]
            continue
        faults += placement_faults(demands_of(config), groups)
        faults += _secret_faults(manifest, config)
    return faults


def _proxy_faults(manifest: Spec, serve: Spec) -> Iterator[str]:
    """The probe that KubeRay injects asks the Serve proxy of every worker pod."""
    location = serve.get("proxy_location", "EveryNode")
    port = (serve.get("http_options") or {}).get("port", 8000)
    for group in manifest["spec"]["rayClusterConfig"].get("workerGroupSpecs") or []:
        container, name = _container(group), group.get("groupName")
        if location != "EveryNode" and "readinessProbe" not in container:
            yield f"group {name}: never ready with proxy_location {location} and no own probe"
        ports = {p.get("name"): p.get("containerPort") for p in container.get("ports") or []}
        served = ports.get("serve", 8000)
        if served != port:
            yield f"group {name}: port `serve` is {served}, http_options say {port}"


def _secret_faults(manifest: Spec, config: ClusterConfig) -> Iterator[str]:
    """Variables that the config reads secrets from must come from a Secret, on every worker."""
    wanted = [config.security.token_env, config.http.api_keys_env]
    for group in manifest["spec"]["rayClusterConfig"].get("workerGroupSpecs") or []:
        given = {env.get("name"): env for env in _container(group).get("env") or []}
        for name in filter(None, wanted):
            if "secretKeyRef" not in (given.get(name, {}).get("valueFrom") or {}):
                yield f"group {group.get('groupName')}: {name} does not come from a Secret"
    if config.security.insecure or config.security.token_env is None:
        yield "args: security.token_env must name a variable: replicas of two pods share one token"


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
        groups.append(NodeGroup(spec["groupName"], declared, labels, spec.get("maxReplicas") or 0))
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
