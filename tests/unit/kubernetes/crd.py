"""A KubeRay CRD as a JSON schema, as strict as `kubectl apply --validate=strict`.

The API server fills defaults before it checks `required`, and refuses unknown fields; plain
openAPIV3Schema says neither, so both are written into the schema.
"""

from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator


def validator(crd_file: Path) -> Draft202012Validator:
    """Checks RayService objects of version v1."""
    crd = yaml.load(crd_file.read_text(), Loader=yaml.CSafeLoader)
    (version,) = [v for v in crd["spec"]["versions"] if v["name"] == "v1"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(schema)


def faults(check: Draft202012Validator, manifest: object) -> list[str]:
    """Where and why the manifest breaks the schema; empty if it does not."""
    return [f"{e.json_path}: {e.message}" for e in check.iter_errors(manifest)]


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        kept = {k: v for k, v in schema.items() if k not in ("anyOf", "type")}
        return {**kept, "type": ["integer", "string"]}
    out = {key: _strict(value) for key, value in schema.items()}
    properties = schema.get("properties")
    if isinstance(properties, dict) and "type" in schema:
        out["properties"] = {name: _strict(inner) for name, inner in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
        required = schema.get("required", [])
        out["required"] = [name for name in required if "default" not in properties[name]]
    return out
