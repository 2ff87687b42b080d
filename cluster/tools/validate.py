"""`outrider validate`: every fault of every file at once, before anything is started.

Takes our cluster files, Ray Serve configs and KubeRay manifests; a file's own keys say which it is.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from cluster.config import ClusterConfig, Placement, faults_of
from protos.errors import OutriderError
from protos.features import DType
from verifier_service.config import EMBEDDED
from verifier_service.model.families import check_family
from verifier_service.model.gguf import is_gguf


def validate_files(paths: Sequence[Path]) -> int:
    """Print the faults; 0 when there are none, else 1."""
    num_faults = 0
    for path in paths:
        faults = file_faults(path)
        num_faults += len(faults)
        for fault in faults:
            print(f"{path}: {fault}", file=sys.stderr)
        if not faults:
            print(f"{path}: ok")
    return 1 if num_faults else 0


def file_faults(path: Path) -> list[str]:
    """Faults of one file, of whichever of the three kinds it is."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ["cannot be read"]
    except yaml.YAMLError as error:
        return [f"is not YAML: {' '.join(str(error).split())}"]
    if not isinstance(document, dict) or not document:
        return ["must hold a mapping of sections"]
    if "applications" in document:
        return _serve_faults(document)
    if "apiVersion" in document:
        from cluster.tools.manifest import check_manifest

        return check_manifest(path)
    return cluster_faults(document)


def cluster_faults(document: dict[str, object]) -> list[str]:
    """Faults of a cluster file, those that only the disk or Ray can show included."""
    try:
        config = ClusterConfig.model_validate(document)
    except ValidationError as error:
        return faults_of(error)
    return [*disk_faults(config), *_placement_faults(config)]


def _serve_faults(document: dict[str, object]) -> list[str]:
    from cluster.fleet.lint import serve_faults

    faults = list(serve_faults(document))
    listed = document.get("applications")
    for number, app in enumerate(listed if isinstance(listed, list) else ()):
        args = app.get("args") if isinstance(app, dict) else None
        if isinstance(args, dict):
            faults += [f"applications.{number}.args.{fault}" for fault in cluster_faults(args)]
    return faults


def disk_faults(config: ClusterConfig) -> list[str]:
    """What a config names that is not there, or cannot be used, on this machine."""
    from cluster.fleet.assembly import describe_entry
    from drafter_service.checkpoint.describe import target_layers

    faults: list[str] = []
    target = config.verifier.target
    num_layers: int | None = None
    if is_gguf(target):
        if not Path(target).expanduser().is_file():
            faults.append("verifier.target: no such file")
    elif target != EMBEDDED:
        try:
            check_family(Path(target).expanduser(), DType(config.verifier.dtype))
            num_layers = target_layers(Path(target).expanduser())
        except OutriderError as error:
            faults.append(f"verifier.target: {error}")
    for number, entry in enumerate(config.drafters):
        try:
            describe_entry(entry, num_layers)
        except OutriderError as error:
            faults.append(f"drafters.{number}.checkpoint: {error}")
    for name, file in (config.security.tls.model_dump() if config.security.tls else {}).items():
        if isinstance(file, Path) and not file.is_file():
            faults.append(f"security.tls.{name}: no such file")
    if config.http.api_keys_file and not Path(config.http.api_keys_file).is_file():
        faults.append("http.api_keys_file: no such file")
    return faults


def _placement_faults(config: ClusterConfig) -> list[str]:
    """Accelerators that Ray does not know: their replicas would wait for ever."""
    from cluster.fleet.lint import accelerator_types

    known = accelerator_types()
    places: list[tuple[str, Placement]] = [
        ("verifier", config.verifier.placement),
        ("http", config.http.placement),
        *((f"drafters.{n}", entry.placement) for n, entry in enumerate(config.drafters)),
    ]
    return [
        f"{where}.placement.accelerator_type: {placement.accelerator_type!r} is not one of Ray's "
        f"({', '.join(sorted(known))})"
        for where, placement in places
        if placement.accelerator_type is not None and placement.accelerator_type not in known
    ]
