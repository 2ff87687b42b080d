"""The shipped RayService: right by KubeRay's schema, by the operator's rules, by Ray Serve, and
placeable; and each rule refuses a manifest that was broken on purpose."""

import copy
import re
from pathlib import Path

import crd
import pytest
import yaml

from cluster.config import read_config
from cluster.fleet.kuberay import manifest_faults, name_faults, node_groups, quantity
from cluster.tools.manifest import ManifestOptions, check_manifest, main, ray_service, render
from protos.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "kubernetes"
SHIPPED = FOLDER / "rayservice.yaml"
CLUSTER = FOLDER / "cluster.yaml"


@pytest.fixture(scope="module")
def manifest():
    return yaml.safe_load(SHIPPED.read_text())


@pytest.fixture(scope="module")
def schema(shared_dir):
    path = shared_dir / "data" / "kuberay" / "ray.io_rayservices.yaml"
    if not path.is_file():
        pytest.skip("KubeRay's CRD is not in the reference folder")
    return crd.validator(path)


def test_the_shipped_manifest_has_no_fault(manifest):
    assert manifest_faults(manifest) == []
    assert check_manifest(SHIPPED) == []


def test_the_shipped_manifest_is_what_the_generator_writes():
    assert SHIPPED.read_text() == render(CLUSTER, ManifestOptions())


def test_the_command_prints_the_manifest(capsys):
    assert main([str(CLUSTER), "--name", "other"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["metadata"]["name"] == "other"


def test_the_shipped_manifest_fits_kuberays_schema(schema, manifest):
    assert crd.faults(schema, manifest) == []


def test_the_schema_check_refuses_a_misspelt_key(schema, manifest):
    broken = copy.deepcopy(manifest)
    group = broken["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group["minReplica"] = group.pop("minReplicas")
    assert any("minReplica" in fault for fault in crd.faults(schema, broken))
    broken = copy.deepcopy(manifest)
    broken["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    assert crd.faults(schema, broken)


def test_rays_own_autoscaler_reads_the_groups_as_we_do(manifest):
    """Ray's private translation of a RayCluster into node types, next to `node_groups`."""
    from ray.autoscaler._private.kuberay import autoscaling_config

    cluster = manifest["spec"]["rayClusterConfig"]
    types = autoscaling_config._generate_available_node_types_from_ray_cr_spec(cluster)
    for group in node_groups(manifest):
        theirs = types[group.name]
        assert theirs["labels"] == group.labels
        assert theirs["max_workers"] == group.max_nodes
        assert {k: v for k, v in theirs["resources"].items() if v} == group.resources


def test_large_gpus_hold_verifiers_and_an_autoscaled_group_holds_drafters(manifest):
    cluster = manifest["spec"]["rayClusterConfig"]
    verifier, drafter = cluster["workerGroupSpecs"]
    assert verifier["labels"] != drafter["labels"]
    assert drafter["minReplicas"] < drafter["maxReplicas"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert all(g.resources["GPU"] == 1 for g in node_groups(manifest))


def test_dockerfile_and_manifest_name_one_ray(manifest):
    version = manifest["spec"]["rayClusterConfig"]["rayVersion"]
    named = set(re.findall(r"\d+\.\d+\.\d+(?=-py|\"|$)", (FOLDER / "Dockerfile").read_text()))
    assert named == {version}
    constraints = (FOLDER.parent / "constraints-cpu.txt").read_text()
    assert f"ray=={version}\n" in constraints


HEAD = ("spec", "rayClusterConfig", "headGroupSpec")
VERIFIER = ("spec", "rayClusterConfig", "workerGroupSpecs", 0)
DRAFTER = ("spec", "rayClusterConfig", "workerGroupSpecs", 1)
POD = ("template", "spec")
CONTAINER = (*POD, "containers", 0)
GPU = "nvidia.com/gpu"
DELETE = object()
BROKEN = [
    (("metadata",), "name", "o" * 48, "48 characters"),
    (("metadata",), "name", "1abc", "DNS-1035"),
    (("metadata",), "name", "a.b", "DNS-1035"),
    (("metadata",), "name", "A_b", "DNS-1035"),
    (("metadata",), "name", "ends-", "DNS-1035"),
    (DRAFTER, "groupName", "g" * 31, "31 characters"),
    (DRAFTER, "groupName", "verifier", "more than once"),
    (DRAFTER, "minReplicas", 5, "is broken"),
    (DRAFTER, "minReplicas", -1, "is broken"),
    (DRAFTER, "replicas", 9, "is broken"),
    (DRAFTER, "maxReplicas", DELETE, "must all be given"),
    (DRAFTER, "labels", {"outrider/tier": "verifier"}, "fits no worker group"),
    (DRAFTER, "labels", DELETE, "fits no worker group"),
    (DRAFTER, "maxReplicas", 2, "only 2 fit"),
    ((*DRAFTER, *POD), "restartPolicy", "Always", "restartPolicy"),
    ((*DRAFTER, *POD), "restartPolicy", DELETE, "restartPolicy"),
    ((*DRAFTER, *CONTAINER, "resources", "requests"), GPU, "2", "must be equal"),
    ((*DRAFTER, *CONTAINER, "resources", "requests"), GPU, DELETE, "must be equal"),
    ((*DRAFTER, *CONTAINER, "resources"), "limits", {}, "must be equal"),
    ((*DRAFTER, *CONTAINER), "resources", {}, "no CPU is declared"),
    ((*DRAFTER, *CONTAINER), "image", "outrider:0.1.0-ray2.59.0", "does not name rayVersion"),
    ((*DRAFTER, *CONTAINER), "image", "outrider", "does not name rayVersion"),
    ((*DRAFTER, *CONTAINER), "env", [], "does not come from a Secret"),
    ((*DRAFTER, *CONTAINER, "ports", 0), "containerPort", 8001, "http_options say 8000"),
    ((*DRAFTER, "rayStartParams"), "num-gpus", "4", "disagrees"),
    ((*DRAFTER, "rayStartParams"), "num-cpus", 4, "must be a string"),
    ((*DRAFTER, "rayStartParams"), "labels", "a=b", "are ignored"),
    ((*HEAD, "rayStartParams"), "num-cpus", DELETE, 'num-cpus must be "0"'),
    (HEAD, "headService", {"metadata": {"name": "x"}}, "blocks upgrades"),
    (HEAD, "headService", {"spec": {"type": "LoadBalancer"}}, "open to the outside"),
    (("spec", "rayClusterConfig"), "rayVersion", "2.51.0", "needs rayVersion 2.52"),
    (("spec", "rayClusterConfig"), "rayVersion", DELETE, "must be a full version"),
    (("spec", "rayClusterConfig"), "authOptions", {"mode": "disabled"}, "authOptions"),
    (("spec",), "serveConfigV2", "a: [", "not YAML"),
    (("spec",), "serveConfigV2", "", "must hold a mapping"),
    (("spec",), "serveConfigV2", DELETE, "no RayService"),
    (("spec", "rayClusterConfig"), "headGroupSpec", DELETE, "no RayService"),
]


def broken_copy(manifest, path, key, value):
    out = copy.deepcopy(manifest)
    at = out
    for step in path:
        at = at[step]
    if value is DELETE:
        del at[key]
    else:
        at[key] = value
    return out


@pytest.mark.parametrize(("path", "key", "value", "named"), BROKEN)
def test_each_broken_manifest_is_refused_by_name(manifest, path, key, value, named):
    faults = manifest_faults(broken_copy(manifest, path, key, value))
    assert any(named in fault for fault in faults), faults


ARGS = ("applications", 0, "args")
BROKEN_SERVE = [
    ((), "proxy_locatio", "EveryNode", "proxy_locatio"),
    ((), "proxy_location", "HeadOnly", "never ready"),
    (("applications", 0), "import_path", "cluster.fleet.app:build", "is not cluster.fleet.app"),
    (("applications", 0), "route_prefix", "x", "must begin with /"),
    ((*ARGS, "verifier"), "replica", 2, "verifier.replica"),
    ((*ARGS, "verifier", "placement"), "num_gpus", 2, "GPU is 1, wanted 2"),
    ((*ARGS, "verifier", "placement"), "accelerator_type", "H100_80G", "unknown to Ray"),
    ((*ARGS, "verifier", "placement"), "accelerator_type", "H100", "does not declare"),
    ((*ARGS, "verifier"), "replicas", 3, "only 2 fit"),
    ((*ARGS, "drafters", 0), "kind", "oracle", "oracle"),
    ((*ARGS, "drafters", 0), "replicas", 2, "not both"),
    ((*ARGS, "drafters", 0, "autoscaling"), "min_replicas", 9, "min_replicas"),
    ((*ARGS, "drafters", 0, "autoscaling"), "max_replicas", 9, "only 4 fit"),
    ((*ARGS, "drafters", 0, "limits"), "max_width", 0, "max_width"),
    ((*ARGS, "http"), "drain_s", -1, "drain_s"),
    ((*ARGS, "security"), "token_env", DELETE, "token_env"),
    ((*ARGS, "security"), "insecure", True, "token_env"),
]


@pytest.mark.parametrize(("path", "key", "value", "named"), BROKEN_SERVE)
def test_each_broken_serve_config_is_refused_by_name(manifest, path, key, value, named):
    serve = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    text = yaml.safe_dump(broken_copy(serve, path, key, value))
    faults = manifest_faults(broken_copy(manifest, ("spec",), "serveConfigV2", text))
    assert any(named in fault for fault in faults), faults


def test_faults_of_all_parts_are_named_at_once(manifest):
    broken = broken_copy(manifest, ("metadata",), "name", "A_b")
    broken = broken_copy(broken, (*DRAFTER, *POD), "restartPolicy", "Always")
    serve = yaml.safe_load(broken["spec"]["serveConfigV2"])
    serve["applications"][0]["args"]["verifier"]["replicas"] = 3
    serve["oddity"] = 1
    broken["spec"]["serveConfigV2"] = yaml.safe_dump(serve)
    assert len(manifest_faults(broken)) == 4


@pytest.mark.parametrize("name", ["o" * 48, "1abc", "a.b", "A_b", ""])
def test_the_generator_refuses_names_kubernetes_would_refuse(name):
    with pytest.raises(ConfigError, match=r"metadata\.name"):
        render(CLUSTER, ManifestOptions(name=name))


def test_the_longest_name_that_fits_passes():
    assert list(name_faults("o" * 47, "name", 47)) == []


def test_the_generator_refuses_an_image_that_hides_rays_version():
    with pytest.raises(ConfigError, match="Ray's version"):
        render(CLUSTER, ManifestOptions(image="outrider:latest"))


def test_a_plain_ray_tag_names_the_version_too():
    assert ManifestOptions(image="rayproject/ray:2.60.0-py311").ray_version == "2.60.0"
    assert ManifestOptions(image="outrider:0.1.0-ray2.60.0").ray_version == "2.60.0"


def test_an_accelerator_type_is_declared_where_the_autoscaler_looks():
    config = read_config(CLUSTER)
    placement = config.verifier.placement.model_copy(update={"accelerator_type": "H100"})
    verifier = config.verifier.model_copy(update={"placement": placement})
    manifest = ray_service(config.model_copy(update={"verifier": verifier}), ManifestOptions())
    assert manifest_faults(manifest) == []
    assert node_groups(manifest)[0].resources["accelerator_type:H100"] == 1


@pytest.mark.parametrize("text", ["", "a: [", "kind: Service", "- 1"])
def test_a_file_without_a_ray_service_is_a_fault(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert len(check_manifest(path)) == 1


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("2", 2), ("8Gi", 8 * 2**30), ("1.5", 1.5), (4, 4)]
)
def test_quantities_read_as_kubernetes_reads_them(text, value):
    assert quantity(text) == value


def test_what_is_no_quantity_is_refused():
    with pytest.raises(ValueError, match="quantity"):
        quantity("lots")
