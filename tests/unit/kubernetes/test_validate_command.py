"""`outrider validate` on broken files: non-zero exit, every fault named, before anything starts."""

import copy
from pathlib import Path

import pytest
import yaml

from cluster.tools.cli import main

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SERVE = {
    "http_options": {"port": 8000},
    "applications": [
        {"name": "a", "route_prefix": "/", "import_path": "cluster.fleet.app:build_app", "args": {}}
    ],
}


def test_shipped_files_pass(capsys):
    files = [CONFIGS / "local.yaml", CONFIGS / "kubernetes" / "rayservice.yaml"]
    assert main(["validate", *map(str, files)]) == 0
    assert capsys.readouterr().out.count("ok") == 2


def serve_with(**changed):
    config = copy.deepcopy(SERVE)
    config["applications"][0] |= changed
    return config


TWICE = copy.deepcopy(SERVE)
TWICE["applications"].append({**TWICE["applications"][0], "name": "b"})
BROKEN = {
    "empty": ("", "mapping"),
    "no yaml": ("a: [", "not YAML"),
    "a list": ([1], "mapping"),
    "unknown section": ({"verifer": {}}, "verifer"),
    "unknown kind": ({"drafters": [{"name": "a", "kind": "oracle"}]}, "oracle"),
    "width zero": (
        {"drafters": [{"name": "a", "kind": "ngram", "limits": {"max_width": 0}}]},
        "max_width",
    ),
    "missing checkpoint": (
        {"drafters": [{"name": "a", "kind": "eagle3", "checkpoint": "/nowhere/head"}]},
        "drafters.0.checkpoint",
    ),
    "missing target": ({"verifier": {"target": "/nowhere/model"}}, "verifier.target"),
    "negative timeout": ({"router": {"timeout_s": -1}}, "router.timeout_s"),
    "no such port": ({"http": {"port": 70000}}, "http.port"),
    "both counts": (
        {"drafters": [{"name": "a", "kind": "ngram", "replicas": 1, "autoscaling": {}}]},
        "not both",
    ),
    "unknown accelerator": (
        {"verifier": {"placement": {"accelerator_type": "H100_80G"}}},
        "H100_80G",
    ),
    "serve: unknown key": ({**SERVE, "applicaton": 1}, "applicaton"),
    "serve: import path": (serve_with(import_path="nowhere"), "import_path"),
    "serve: routes clash": (TWICE, "route"),
    "serve: bad args": (serve_with(args={"verifier": {"replica": 2}}), "args.verifier.replica"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path, capsys, name):
    document, named = BROKEN[name]
    path = tmp_path / "broken.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    assert main(["validate", str(path)]) == 1
    assert named in capsys.readouterr().err


def test_all_faults_of_all_files_are_named_at_once(tmp_path, capsys):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("verifier: {replica: 2}\nhttp: {port: 0}\n")
    second.write_text("")
    assert main(["validate", str(first), str(second)]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 3
