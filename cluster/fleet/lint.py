"""What Ray Serve would accept in silence and should not: a strict check of a Serve config.

Serve ignores unknown keys at most levels of its schema, so a misspelt limit does nothing; this
walks the schema's own fields and names every key that no field has. It also checks that each
deployment's resources fit some group of nodes, which Ray would only show as a replica that waits
for ever. Pure functions from parsed YAML to a list of faults, all of them at once; nothing is
started and no GPU is needed.
"""

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pydantic
import ray.util.accelerators.accelerators as known_accelerators
import yaml
from pydantic import BaseModel
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from cluster.config import ClusterConfig, Placement

_WILD = frozenset({"args", "user_config", "runtime_env", "policy_kwargs", "resources"})


@dataclass(frozen=True, slots=True)
class Demand:
    """What each replica of one deployment asks for. memory in bytes; labels are selectors."""

    who: str
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory: float = 0.0
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] = field(default_factory=dict)
    max_replicas: int = 1


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one kind. resources: Ray's names (CPU, GPU, memory, accelerator_type:X)."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    max_nodes: int


def parse_yaml(text: str, what: str) -> tuple[dict[str, Any], list[str]]:
    """(parsed, faults): a document that is not a mapping is a fault."""
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return {}, [f"{what} is not YAML: {' '.join(str(error).split())}"]
    if not isinstance(parsed, dict):
        return {}, [f"{what} must hold a mapping, not {type(parsed).__name__}"]
    return parsed, []


def serve_faults(config: Mapping[str, object]) -> list[str]:
    """Faults of a parsed ServeDeploySchema: unknown keys, bad values, clashing names."""
    faults = list(unknown_keys(ServeDeploySchema, config))
    try:
        ServeDeploySchema.model_validate(config)
    except pydantic.ValidationError as error:
        faults += [f"{_dotted(e['loc'])}: {e['msg']}" for e in error.errors()]
    except (ImportError, ValueError) as error:
        faults.append(str(error))
    listed = config.get("applications")
    apps = [app for app in listed if isinstance(app, dict)] if isinstance(listed, list) else []
    for app in apps:
        prefix = app.get("route_prefix", "/")
        if prefix is not None and not str(prefix).startswith("/"):
            faults.append(f"applications: route_prefix {prefix!r} must begin with /")
        for deployment in app.get("deployments") or ():
            if isinstance(deployment, dict):
                faults += _scaling_faults(deployment)
    if not listed:
        faults.append("applications: at least one is needed")
    return faults


def _scaling_faults(deployment: Mapping[str, object]) -> list[str]:
    """Serve leaves a deployment's autoscaling_config unchecked until it deploys."""
    scaling = deployment.get("autoscaling_config")
    if not isinstance(scaling, dict):
        return []
    where = f"deployment {deployment.get('name')}: autoscaling_config"
    try:
        AutoscalingConfig.model_validate(scaling)
    except pydantic.ValidationError as error:
        return [f"{where}.{_dotted(e['loc'])}: {e['msg']}" for e in error.errors()]
    except (ImportError, ValueError) as error:
        return [f"{where}: {error}"]
    return []


def unknown_keys(model: type[BaseModel], data: object, path: str = "") -> Iterator[str]:
    """Keys of `data` that `model` has no field for, at every depth, as dotted paths."""
    if not isinstance(data, Mapping):
        return
    names = {alias: name for name, f in model.model_fields.items() for alias in (name, f.alias)}
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in names:
            known = ", ".join(sorted(str(name) for name in model.model_fields))
            yield f"{where}: unknown key; known here: {known}"
        elif key not in _WILD:
            annotation = model.model_fields[str(names[key])].annotation
            for inner, item, at in _models_of(annotation, value, where):
                yield from unknown_keys(inner, item, at)


def _models_of(
    annotation: object, value: object, path: str
) -> Iterator[tuple[type[BaseModel], object, str]]:
    """Pairs a value with the pydantic model that its annotation names, through lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, value, path
        return
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for argument in arguments:
            yield from _models_of(argument, value, path)
    elif typing.get_origin(annotation) is list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _models_of(arguments[0], item, f"{path}[{index}]")


def demands_of(config: ClusterConfig) -> list[Demand]:
    """What every deployment that a cluster's builder makes asks of its nodes."""
    http, verifier = config.http, config.verifier
    demands = [
        _demand("ingress", http.placement, http.replicas),
        _demand("verifier", verifier.placement, verifier.replicas),
    ]
    for entry in config.drafters:
        if not entry.colocated:
            most = entry.autoscaling.max_replicas if entry.autoscaling else entry.replicas
            most = 1 if most is None else most
            demands.append(_demand(f"drafter {entry.name}", entry.placement, most))
    return demands


def _demand(who: str, placement: Placement, max_replicas: int) -> Demand:
    return Demand(
        who,
        placement.num_cpus,
        placement.num_gpus,
        placement.memory_mb * 2.0**20,
        placement.accelerator_type,
        dict(placement.label_selector),
        max_replicas,
    )


def placement_faults(demands: Sequence[Demand], groups: Sequence[NodeGroup]) -> list[str]:
    """Replicas that fit no group, and deployments whose maximum the groups cannot hold together."""
    faults = []
    known = accelerator_types()
    placeable = []
    for demand in demands:
        kind = demand.accelerator_type
        if kind is not None and kind not in known:
            faults.append(
                f"{demand.who}: accelerator_type {kind!r} is unknown to Ray, which has "
                f"{', '.join(sorted(known))}"
            )
            continue
        reasons = {group.name: _misfit(demand, group) for group in groups}
        if all(reasons.values()):
            listed = "; ".join(f"{name}: {why}" for name, why in reasons.items())
            faults.append(f"{demand.who}: fits no worker group ({listed or 'there is none'})")
            continue
        placeable.append(demand)
    return faults + _crowding(placeable, groups)


def accelerator_types() -> set[str]:
    """Ray's own list of accelerator names."""
    constants = vars(known_accelerators)
    return {v for name, v in constants.items() if name.isupper() and isinstance(v, str)}


def needs_of(demand: Demand) -> dict[str, float]:
    """A replica's Ray resources. A named accelerator type costs 0.001 of its own resource."""
    needs = {"CPU": demand.num_cpus, "GPU": demand.num_gpus, "memory": demand.memory}
    if demand.accelerator_type is not None:
        needs[f"accelerator_type:{demand.accelerator_type}"] = 0.001
    return {name: amount for name, amount in needs.items() if amount > 0}


def selects(selector: str, value: str | None) -> bool:
    """Ray's label selectors: `v`, `!v`, `in(a, b)`, `!in(a, b)`. A missing label is no value."""
    text = selector.strip()
    wanted = not text.startswith("!")
    text = text.removeprefix("!")
    options = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
    return (value in {option.strip() for option in options}) is wanted


def _misfit(demand: Demand, group: NodeGroup) -> str:
    """Why a replica does not fit an empty node of the group; empty if it does."""
    for key, selector in demand.label_selector.items():
        if not selects(selector, group.labels.get(key)):
            return f"label {key} is {group.labels.get(key)!r}, wanted {selector!r}"
    for name, amount in needs_of(demand).items():
        if group.resources.get(name, 0.0) < amount:
            held = group.resources.get(name, 0.0)
            if name.startswith("accelerator_type:"):
                return f"does not declare {name} (the autoscaler never infers it)"
            return f"{name} is {held:g}, wanted {amount:g}"
    return ""


def _crowding(demands: Sequence[Demand], groups: Sequence[NodeGroup]) -> list[str]:
    """First fit, largest first, of every deployment at its maximum into every group at its own."""
    nodes: dict[str, list[dict[str, float]]] = {group.name: [] for group in groups}
    faults = []
    for demand in sorted(demands, key=lambda d: (d.num_gpus, d.num_cpus), reverse=True):
        fitting = [group for group in groups if not _misfit(demand, group)]
        placed = 0
        while placed < demand.max_replicas and _place(needs_of(demand), fitting, nodes):
            placed += 1
        if placed < demand.max_replicas:
            names = ", ".join(f"{group.name} (at most {group.max_nodes})" for group in fitting)
            faults.append(
                f"{demand.who}: {demand.max_replicas} replicas at most, but only {placed} fit "
                f"beside the others in {names}"
            )
    return faults


def _place(
    needs: Mapping[str, float],
    groups: Sequence[NodeGroup],
    nodes: dict[str, list[dict[str, float]]],
) -> bool:
    """Takes the needs from the first node with room, opening one if the group still may."""
    for group in groups:
        free = [n for n in nodes[group.name] if all(n[k] + 1e-9 >= v for k, v in needs.items())]
        if not free and len(nodes[group.name]) < group.max_nodes:
            nodes[group.name].append(dict(group.resources))
            free = nodes[group.name][-1:]
        if free:
            for name, amount in needs.items():
                free[0][name] -= amount
            return True
    return False


def _dotted(location: Sequence[object]) -> str:
    return ".".join(str(part) for part in location) or "config"
