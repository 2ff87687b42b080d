"""The cluster's configuration: defaults, every fault at once, what it builds."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from cluster.config import ClusterConfig, parse_config, read_config
from cluster.tools.cli import main
from cluster.tools.validate import disk_faults
from protos.errors import ConfigError

BAD: list[tuple[dict, str]] = [
    ({"verifer": {}}, "verifer"),
    ({"verifier": {"num_thread": 1}}, "verifier.num_thread"),
    ({"verifier": {"replicas": 0}}, "verifier.replicas"),
    ({"verifier": {"dtype": "fp8"}}, "verifier.dtype"),
    ({"verifier": {"engine": {"page_size": 0}}}, "verifier.engine.page_size"),
    ({"verifier": {"engine": {"max_draft_wait_s": -1}}}, "verifier.engine.max_draft_wait_s"),
    ({"verifier": {"placement": {"num_gpus": -1}}}, "verifier.placement.num_gpus"),
    ({"drafters": [{"name": "a", "kind": "nope"}]}, "drafters.0.kind"),
    ({"drafters": [{"name": "A b", "kind": "ngram"}]}, "drafters.0.name"),
    ({"drafters": [{"name": "auto", "kind": "ngram"}]}, "drafters.0"),
    ({"drafters": [{"name": "ngram", "kind": "ngram"}]}, "config"),
    ({"drafters": [{"name": "a", "kind": "ngram"}] * 2}, "config"),
    ({"drafters": [{"name": "a", "kind": "ngram", "replicas": 0}]}, "drafters.0.replicas"),
    (
        {"drafters": [{"name": "a", "kind": "ngram", "replicas": 1, "autoscaling": {}}]},
        "drafters.0",
    ),
    ({"drafters": [{"name": "a", "kind": "ngram", "colocated": True, "replicas": 1}]}, "drafters"),
    (
        {
            "drafters": [
                {"name": "a", "kind": "ngram", "autoscaling": {"min_replicas": 3}},
            ]
        },
        "drafters.0.autoscaling",
    ),
    ({"drafters": [{"name": "a", "kind": "ngram", "limits": {"max_width": 0}}]}, "max_width"),
    ({"http": {"port": 0}}, "http.port"),
    ({"http": {"port": "abc"}}, "http.port"),
    ({"router": {"timeout_s": 0}}, "router.timeout_s"),
    ({"models": []}, "models"),
]


@pytest.mark.parametrize(("document", "key"), BAD)
def test_bad_values_are_refused_by_key(document: dict, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(document)
    assert key in str(caught.value)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"http": {"port": 0, "nope": 1}, "verifier": {"replicas": 0}})
    assert len(str(caught.value).splitlines()) == 3


def test_every_field_is_described() -> None:
    seen: set[type[BaseModel]] = set()

    def walk(model: type[BaseModel]) -> None:
        if model in seen:
            return
        seen.add(model)
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                walk(field.annotation)

    walk(ClusterConfig)
    assert len(seen) > 5


def test_defaults_fit_two_cpus() -> None:
    config = ClusterConfig()
    entry = {"name": "eagle3", "kind": "eagle3", "checkpoint": "x"}
    config = ClusterConfig.model_validate({"drafters": [entry]})
    total = sum(
        p.num_cpus
        for p in (
            config.verifier.placement,
            config.http.placement,
            config.drafters[0].placement,
        )
    )
    assert total <= 2.0


@pytest.mark.parametrize("text", ["", "[]", "a: [", "- a", "{}{}"])
def test_files_that_hold_no_mapping_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_config(path)
    assert main(["validate", str(path)]) == 1


def test_validate_names_every_fault_of_every_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "verifier: {target: /nowhere, placement: {accelerator_type: H100_80G}}\n"
        "drafters: [{name: e, kind: eagle3, checkpoint: /nowhere}]\n"
    )
    good = tmp_path / "good.yaml"
    good.write_text("http: {port: 8001}\n")
    serve = tmp_path / "serve.yaml"
    serve.write_text(
        "applications:\n- name: a\n  import_path: cluster.fleet.app:build_app\n"
        "  args: {http: {port: 0}}\n"
    )
    assert main(["validate", str(good)]) == 0
    assert main(["validate", str(bad), str(good), str(serve)]) == 1
    faults = capsys.readouterr().err
    for key in ("verifier.target", "H100_80G", "drafters.0.checkpoint", "args.http.port"):
        assert key in faults


@pytest.mark.parametrize(
    ("target", "model_type", "words"),
    [
        ("jamba", "jamba", "model_type 'jamba' is not among the families that are served"),
        ("absent.gguf", None, "verifier.target: no such file"),
        ("absent", None, "verifier.target: absent holds no config.json"),
    ],
)
def test_a_target_that_cannot_be_served_is_named_before_anything_starts(
    target: str, model_type: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / target
    if model_type is not None:
        path.mkdir()
        (path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    (fault,) = disk_faults(parse_config({"verifier": {"target": str(path)}}))
    assert words in fault


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words, status in ((["--help"], 0), (["nope"], 2), (["bench"], 2)):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == status
    assert "serve" in capsys.readouterr().out
