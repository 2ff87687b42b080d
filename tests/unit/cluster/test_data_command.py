"""`outrider data --address`: the same words, the same file; what is missing or wrong is said.

The cluster is stood in for by one engine in this process; tests/e2e has a real one.
"""

import json
import sys
from contextlib import contextmanager

import pytest
import torch

from cluster.tools import data_jobs
from cluster.tools.data import main
from protos.errors import ConfigError
from tests.tiny import tiny_llama_dir
from verifier_service.data.worker import Worker

ENGINE = ["--dtype", "fp32", "--threads", "1", "--batch", "2", "--top-k", "0", "--max-new", "8"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def threads_as_before():
    """Engines here set the threads of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def asked(monkeypatch) -> list:
    """What the stand-in cluster was asked for."""
    calls: list = []

    @contextmanager
    def in_process(address, choice, work, replicas):
        calls.append((address, replicas, choice.threads))
        worker = Worker(choice, work)

        def compute(blocks):
            for items in reversed(blocks):
                yield from (part for _, part in worker.compute(items))

        yield compute

    monkeypatch.setattr(data_jobs, "ray_compute", in_process)
    return calls


def test_an_address_takes_a_run_to_the_cluster_and_the_file_is_the_same(
    directory, tmp_path, asked, capsys
):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"q": text}) for text in ("a", "", "b", "c", "a")))
    words = ["regenerate", str(prompts), "--target", str(directory), *ENGINE, "--out"]
    assert main([*words, str(tmp_path / "here")]) == 0
    here = capsys.readouterr().out
    assert asked == []
    there = ["--address", "auto", "--replicas", "3", "--gpus-per-replica", "0.5", "--block", "2"]
    assert main([*words, str(tmp_path / "there"), *there]) == 0
    assert asked == [("auto", data_jobs.Replicas(3, 1.0, 0.5), 1)]
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    # The summary is the same too: records, repeated prompts, what was skipped.
    assert capsys.readouterr().out == here.replace("/here", "/there")


def test_turns_written_there_are_those_written_here(directory, tmp_path, asked, capsys):
    words = ["synthesise", "--target", str(directory), "--count", "1", "--min-words", "1"]
    words += [*ENGINE, "--max-new", "60", "--out"]
    assert main([*words, str(tmp_path / "here")]) == 0
    here = capsys.readouterr().out
    assert main([*words, str(tmp_path / "there"), "--address", "local", "--block", "8"]) == 0
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    assert capsys.readouterr().out == here.replace("/here", "/there")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "at least one replica"),
        (["--gpus-per-replica", "-1"], "no negative"),
        (["--block", "0"], "--block"),
        (["--device", "cuda"], "--gpus-per-replica"),
    ],
)
def test_options_of_the_cluster_are_checked(directory, tmp_path, asked, words, message):
    (tmp_path / "p.jsonl").write_text('{"q": "a"}')
    base = ["regenerate", str(tmp_path / "p.jsonl"), "--target", str(directory)]
    base += ["--out", str(tmp_path / "o"), "--address", "auto"]
    with pytest.raises(ConfigError, match=message):
        main([*base, *words])
    assert asked == []
    assert list(tmp_path.iterdir()) == [tmp_path / "p.jsonl"]


def test_a_replica_has_a_thread_for_every_cpu_it_reserves(directory, tmp_path, asked):
    (tmp_path / "p.jsonl").write_text('{"q": "a"}')
    words = ["regenerate", str(tmp_path / "p.jsonl"), "--target", str(directory), "--max-new", "2"]
    words += ["--out", str(tmp_path / "o"), "--address", "auto", "--dtype", "fp32"]
    main([*words, "--cpus-per-replica", "2"])
    assert asked == [("auto", data_jobs.Replicas(1, 2.0, 0.0), 2)]


def test_without_ray_data_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        pytest.raises(ConfigError, match=r"outrider\[data\]"),
        data_jobs.ray_compute("auto", None, None, data_jobs.Replicas(1, 1, 0)),  # type: ignore[arg-type]
    ):
        pass
