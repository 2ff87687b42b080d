"""The strict Serve lint: what Ray would ignore is named, and replicas must fit the node groups."""

import copy

import pytest

from cluster.fleet.lint import (
    Demand,
    NodeGroup,
    accelerator_types,
    parse_yaml,
    placement_faults,
    selects,
    serve_faults,
)

GOOD = {
    "proxy_location": "EveryNode",
    "http_options": {"host": "0.0.0.0", "port": 8000},
    "applications": [
        {
            "name": "outrider",
            "route_prefix": "/",
            "import_path": "cluster.fleet.app:build_app",
            "args": {"anything": {"the": "builder checks"}},
            "deployments": [
                {
                    "name": "drafter",
                    "autoscaling_config": {
                        "min_replicas": 1,
                        "max_replicas": 4,
                        "policy": {
                            "policy_function": "cluster.fleet.autoscaling.DrafterPolicy",
                            "policy_kwargs": {"num_sessions": 8.0},
                        },
                    },
                    "ray_actor_options": {"num_gpus": 1, "runtime_env": {"env_vars": {"A": "b"}}},
                }
            ],
        }
    ],
}


def test_a_good_config_passes():
    assert serve_faults(GOOD) == []


APP = ("applications", 0)
DEPLOYMENT = (*APP, "deployments", 0)
BAD = [
    ((), "applicatons", [], "applicatons"),
    (("http_options",), "prot", 8001, "http_options.prot"),
    (("http_options",), "port", "many", "http_options.port"),
    (APP, "max_ongoing_requests", 5, "applications[0].max_ongoing_requests"),
    (APP, "route_prefix", "no-slash", "route_prefix"),
    (APP, "import_path", "nowhere", "import_path"),
    (APP, "runtime_env", {"working_dir": "/local/path"}, "runtime_env"),
    (DEPLOYMENT, "max_ongoing_request", 5, "deployments[0].max_ongoing_request"),
    (DEPLOYMENT, "num_replicas", -1, "num_replicas"),
    (DEPLOYMENT, "num_replicas", 2, "num_replicas"),
    ((*DEPLOYMENT, "ray_actor_options"), "num_gpu", 1, "ray_actor_options.num_gpu"),
    ((*DEPLOYMENT, "ray_actor_options"), "num_gpus", -1, "num_gpus"),
    ((*DEPLOYMENT, "ray_actor_options"), "label_selector", {"a": "in("}, "label_selector"),
    ((*DEPLOYMENT, "autoscaling_config"), "max_ongoing_requests", 1, "autoscaling_config.max"),
    ((*DEPLOYMENT, "autoscaling_config"), "min_replicas", 5, "autoscaling_config"),
    ((*DEPLOYMENT, "autoscaling_config"), "min_replicas", -1, "min_replicas"),
    ((*DEPLOYMENT, "autoscaling_config"), "initial_replicas", 9, "autoscaling_config"),
    ((*DEPLOYMENT, "autoscaling_config"), "upscale_delay_s", -1.0, "upscale_delay_s"),
    ((*DEPLOYMENT, "autoscaling_config", "policy"), "function", "x", "policy.function"),
    (
        (*DEPLOYMENT, "autoscaling_config", "policy"),
        "policy_function",
        "cluster.nowhere:policy",
        "nowhere",
    ),
]


def mutate(base, path, key, value):
    out = copy.deepcopy(base)
    at = out
    for step in path:
        at = at[step]
    at[key] = value
    return out


@pytest.mark.parametrize(("path", "key", "value", "named"), BAD)
def test_each_mistake_is_named(path, key, value, named):
    faults = serve_faults(mutate(GOOD, path, key, value))
    assert any(named in fault for fault in faults), faults


def test_all_faults_are_named_at_once():
    config = mutate(mutate(GOOD, (), "nonsense", 1), DEPLOYMENT, "typo", 2)
    config = mutate(config, (*DEPLOYMENT, "autoscaling_config"), "min_replicas", 9)
    assert len(serve_faults(config)) == 3


@pytest.mark.parametrize("key", ["name", "route_prefix"])
def test_applications_must_not_clash(key):
    second = {**GOOD["applications"][0], "name": "other", "route_prefix": "/other"}
    config = {**GOOD, "applications": [GOOD["applications"][0], second]}
    assert serve_faults(config) == []
    second[key] = GOOD["applications"][0][key]
    assert serve_faults(config)


def test_no_application_is_a_fault():
    assert serve_faults({"applications": []})
    assert serve_faults({})


@pytest.mark.parametrize("text", ["", "- a", "a: [", "3"])
def test_a_document_that_is_no_mapping_is_a_fault(text):
    _, faults = parse_yaml(text, "serveConfigV2")
    assert len(faults) == 1
    assert "serveConfigV2" in faults[0]


@pytest.mark.parametrize(
    ("selector", "value", "expected"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", "a", False),
        ("!a", None, True),
        ("in(a, b)", "b", True),
        ("in(a, b)", "c", False),
        ("!in(a, b)", "c", True),
        ("!in(a,b)", "b", False),
    ],
)
def test_selectors_read_as_ray_reads_them(selector, value, expected):
    assert selects(selector, value) is expected


BIG = NodeGroup("big", {"CPU": 8, "GPU": 1, "accelerator_type:H100": 1}, {"tier": "verifier"}, 2)
SMALL = NodeGroup("small", {"CPU": 4, "GPU": 1, "memory": 16e9}, {"tier": "drafter"}, 4)
GROUPS = (BIG, SMALL)


def drafter(**changed):
    values = {"num_gpus": 1.0, "label_selector": {"tier": "drafter"}, "max_replicas": 4}
    return Demand("drafter", **{**values, **changed})


def test_what_fits_passes():
    verifier = Demand("verifier", 6, 1, accelerator_type="H100", max_replicas=2)
    assert placement_faults([verifier, drafter(), Demand("ingress", 1)], GROUPS) == []


def test_fractions_of_a_gpu_share_a_node():
    assert placement_faults([drafter(num_gpus=0.5, max_replicas=8)], GROUPS) == []
    assert placement_faults([drafter(num_gpus=0.5, max_replicas=9)], GROUPS)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"label_selector": {"tier": "draftr"}}, "tier"),
        ({"label_selector": {"teir": "drafter"}}, "teir"),
        ({"num_gpus": 2.0}, "GPU is 1, wanted 2"),
        ({"num_cpus": 5.0}, "CPU is 4, wanted 5"),
        ({"memory": 32e9}, "memory"),
        ({"max_replicas": 5}, "only 4 fit"),
        ({"accelerator_type": "L4"}, "does not declare accelerator_type:L4"),
        ({"accelerator_type": "H100_80G"}, "unknown to Ray"),
    ],
)
def test_what_does_not_fit_is_named(changed, named):
    faults = placement_faults([drafter(**changed)], GROUPS)
    assert len(faults) == 1
    assert named in faults[0]


def test_deployments_are_placed_beside_each_other():
    hungry = Demand("ingress", 4, label_selector={"tier": "drafter"}, max_replicas=1)
    assert placement_faults([hungry, drafter(num_cpus=1.0, max_replicas=4)], GROUPS)
    assert placement_faults([hungry, drafter(num_cpus=1.0, max_replicas=3)], GROUPS) == []


def test_accelerator_names_are_rays():
    assert {"H100", "L4", "A100-80G"} <= accelerator_types()
