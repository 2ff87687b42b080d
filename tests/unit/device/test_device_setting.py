"""`device` says where a replica computes, is checked against what is reserved and what is there."""

import pytest
import torch
import yaml

from cluster.config import parse_config, read_config
from cluster.tools.manifest import ManifestOptions, ray_service
from protos.errors import ConfigError
from verifier_service.__main__ import _parser, _settings
from verifier_service.config import parse_settings
from verifier_service.device import describe_device, resolve_device, ship
from verifier_service.model.layout import lay_out
from verifier_service.step import Span


@pytest.mark.parametrize(
    ("name", "has_gpu", "expected"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda:0"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda:0"),
    ],
)
def test_auto_takes_a_gpu_where_there_is_one(monkeypatch, name, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert str(resolve_device(name)) == expected


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda is not available"):
        resolve_device("cuda")


def test_the_cpu_adds_nothing_to_a_fingerprint_and_copies_nothing():
    assert describe_device(torch.device("cpu")) == ""
    layout = lay_out([Span(1, (3, 4), 0, torch.arange(1, 3))], 4, torch.float32)
    assert ship(layout, torch.device("cpu")) is layout


def test_a_verifier_on_its_own_takes_the_device_from_file_or_option(tmp_path):
    path = tmp_path / "verifier.yaml"
    path.write_text("device: cpu\n")
    arguments = ["--config", str(path)]
    assert _settings(_parser().parse_args(arguments)).device == "cpu"
    assert _settings(_parser().parse_args([*arguments, "--device", "cuda"])).device == "cuda"
    assert parse_settings({}).device == "auto"
    with pytest.raises(ConfigError, match="device"):
        parse_settings({"device": "tpu"})


@pytest.mark.parametrize(
    ("verifier", "words"),
    [
        ({"device": "cuda"}, "device cuda needs placement.num_gpus"),
        ({"device": "cpu", "placement": {"num_gpus": 1}}, "leaves idle"),
    ],
)
def test_a_cluster_reserves_the_gpus_that_it_names_and_no_others(verifier, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({"verifier": verifier})
    drafter = {"name": "eagle3", "kind": "eagle3", **verifier}
    with pytest.raises(ConfigError, match=words):
        parse_config({"drafters": [drafter]})


def test_the_shipped_kubernetes_cluster_computes_on_the_gpus_it_reserves(root):
    config = read_config(root / "configs" / "kubernetes" / "cluster.yaml")
    assert config.verifier.device == "cuda"
    manifest = ray_service(config, ManifestOptions())
    serve = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    assert serve["applications"][0]["args"]["verifier"]["device"] == "cuda"
    groups = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    held = {
        group["groupName"]: group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for group in groups
    }
    assert held["verifier"]["nvidia.com/gpu"] == "1"
