"""The checks for a machine with a GPU work: they run here on the CPU, and can fail."""

import importlib.util
import json
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_llama_dir


@pytest.fixture(scope="module")
def check_ids(root):
    path = root / "tests" / "device" / "check_ids.py"
    spec = importlib.util.spec_from_file_location("check_ids", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("target"))


def test_ids_on_the_cpu_pass_their_own_check(check_ids, target_dir, tmp_path, capsys):
    file = tmp_path / "ids.json"
    options = ("--device=cpu", "--tokens=8", "--questions=2", f"--json={file}")
    assert check_ids.main([*options, f"--target={target_dir}"]) == 0
    report = json.loads(file.read_text())
    assert report["drafted_vs_plain"] == {"equal": 2, "texts": 2, "wide": []}
    assert report["sampled_equal"] == 2
    assert "faults: none" in capsys.readouterr().out


def test_an_id_that_no_tie_explains_is_a_fault(check_ids, target_dir):
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16).eval()
    prompt = list(range(60, 90))
    right = check_ids.eager_ids(model, prompt, 4)
    assert len(set(right)) > 1
    assert check_ids.first_difference(model, prompt, right, right) is None
    with torch.inference_mode():
        worst = int(model(torch.tensor([[*prompt, right[0]]])).logits[0, -1].argmin())
    wrong = [right[0], worst, *right[2:]]
    at, steps = check_ids.first_difference(model, prompt, wrong, right)
    assert at == 1
    assert steps > 2.0
    found = check_ids.compare("wrong", model, [prompt], [wrong], [right])
    assert check_ids.faults_of({"ours": found, "sampled_equal": 1, "texts": 1}) == ["ours"]
    assert check_ids.faults_of({"sampled_equal": 0, "texts": 2}) == ["sampled"]


def test_without_a_gpu_nothing_is_run_and_the_status_says_so(root):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: `tests/device/run` is for it")
    script = root / "tests" / "device" / "run"
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "nothing was run" in done.stdout
