"""The house stands: imports, safety, style and top-level entries of every tracked source file.

Each rule is also shown to fail, on a snippet that breaks it and nothing else.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from walls import (
    GENERATED,
    PACKAGES,
    PICKLED_WEIGHTS,
    RULES,
    TOP_LEVEL,
    Source,
    import_faults,
    matches,
    safety_faults,
    style_faults,
)

ROOT = Path(__file__).resolve().parents[3]


def sources(*folders: str) -> list[Source]:
    paths = sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))
    named = [(p.relative_to(ROOT).as_posix(), p) for p in paths]
    return [Source(name, p.read_text()) for name, p in named if not matches(name, GENERATED)]


def tracked_files() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]


def test_no_import_breaks_a_wall():
    faults = [fault for source in sources(*PACKAGES) for fault in import_faults(source)]
    assert faults == []


def test_nothing_runs_what_it_was_sent():
    faults = [fault for source in sources(*PACKAGES) for fault in safety_faults(source)]
    assert faults == []


def test_files_are_short_quiet_and_finished():
    faults = [fault for source in sources(*PACKAGES, "tests") for fault in style_faults(source)]
    assert faults == []


def test_top_level_holds_only_the_agreed_entries():
    entries = {name.split("/", 1)[0] for name in tracked_files()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL


def test_no_tracked_file_is_too_big_to_clone():
    big = [name for name in tracked_files() if (ROOT / name).stat().st_size > 26 * 2**20]
    assert big == []


def test_no_tracked_text_names_a_path_of_one_machine():
    needles = [f"/{home}/".encode() for home in ("work", "root")]
    found = [
        name
        for name in tracked_files()
        if not name.endswith(".safetensors")
        and any(needle in (ROOT / name).read_bytes() for needle in needles)
    ]
    assert found == []


BAD_IMPORTS = {
    "protos imports itself only": ("protos/tree.py", "import verifier_service.step"),
    "nobody reaches up to cluster": ("drafter_service/server.py", "from cluster import config"),
    "siblings never touch: verifier": (
        "verifier_service/bench.py",
        "def f():\n    from drafter_service.ngram import NgramDrafter",
    ),
    "siblings never touch: drafter": ("drafter_service/bench.py", "import verifier_service"),
    "torch in protos is noise only": ("protos/features.py", "import torch"),
    "noise needs torch and nothing else": ("protos/noise.py", "import transformers"),
    "cluster is torch-free": (
        "cluster/tools/bench.py",
        "def f():\n    import torch.nn.functional as F",
    ),
    "one cluster file loads tokenizers": ("cluster/http/openai.py", "import transformers"),
    "the ingress never imports noise": ("cluster/http/limits.py", "from protos import noise"),
    "ray and fastapi stay in cluster": ("verifier_service/server.py", "import ray"),
    "grpc stays in the edge files": ("cluster/fleet/router.py", "from protos import drafting_pb2"),
    "serving never imports training": (
        "cluster/fleet/deployments.py",
        "import importlib\nimportlib.import_module('drafter_service.training.run')",
    ),
    "serving never imports data making or benchmarks": (
        "cluster/fleet/app.py",
        "from verifier_service.bench import main",
    ),
    "one file knows llguidance": ("verifier_service/engine/request.py", "import llguidance"),
    "no pickle": ("protos/codec.py", "import pickle"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_import_rule_can_fail(rule):
    path, text = BAD_IMPORTS[rule.name]
    faults = import_faults(Source(path, text), [rule])
    assert len(faults) >= 1
    assert all(rule.name in fault for fault in faults)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("protos/noise.py", "import torch"),
        ("cluster/http/text.py", "from transformers import AutoTokenizer"),
        ("verifier_service/server.py", "import grpc\nfrom protos import generation_pb2"),
        ("cluster/tools/cli.py", "def f():\n    from drafter_service.training import run"),
        ("verifier_service/engine/loop.py", "import torch\nimport queue\nimport raylib"),
    ],
)
def test_excused_files_pass(path, text):
    assert import_faults(Source(path, text)) == []


def test_relative_imports_are_faults():
    assert import_faults(Source("cluster/config.py", "from . import fleet"))
    assert import_faults(Source("cluster/config.py", "from .fleet import app"))


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')",
        "exec(code)",
        "import torch\ntorch.load('x.bin')",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=allow)",
    ],
)
def test_each_safety_rule_can_fail(text):
    assert len(safety_faults(Source("drafter_service/x.py", text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("drafter_service/x.py", "torch.load(p, weights_only=True)"),
        (PICKLED_WEIGHTS, "torch.load(p)"),
        (PICKLED_WEIGHTS, "torch.load(p, weights_only=False)"),
        (PICKLED_WEIGHTS, "torch.load(p, weights_only=given)"),
    ],
)
def test_pickled_weights_are_read_in_one_place_and_one_way(path, text):
    assert len(safety_faults(Source(path, text))) == 1
    assert safety_faults(Source(PICKLED_WEIGHTS, "torch.load(p, weights_only=True)")) == []


@pytest.mark.parametrize(
    "text", ["model.eval()", "AutoModel.from_pretrained(p, trust_remote_code=False)"]
)
def test_harmless_lookalikes_pass(text):
    assert safety_faults(Source("drafter_service/x.py", text)) == []


@pytest.mark.parametrize(
    ("path", "text", "what"),
    [
        ("protos/a.py", "x = 1\n", "docstring"),
        ("protos/a.py", '"""D."""\nprint(1)\n', "print"),
        ("protos/a.py", '"""D."""\ntry:\n    f()\nexcept Exception:\n    pass\n', "broad"),
        ("protos/a.py", '"""D."""\ntry:\n    f()\nexcept:\n    pass\n', "broad"),
        ("protos/a.py", '"""D."""\ntry:\n    f()\nexcept (A, Exception):\n    pass\n', "broad"),
        ("protos/a.py", '"""D."""\ndef f():\n    raise NotImplementedError\n', "stub"),
        ("protos/a.py", '"""D."""\ndef f():\n    raise NotImplementedError("x")\n', "stub"),
        ("protos/a.py", '"""D."""\n' + "x = 1\n" * 350, "lines"),
        ("tests/unit/a.py", '"""D."""\n' + "x = 1\n" * 500, "lines"),
    ],
)
def test_each_style_rule_can_fail(path, text, what):
    faults = style_faults(Source(path, text))
    assert len(faults) == 1
    assert what in faults[0]


def test_a_handler_that_cleans_up_and_raises_again_passes():
    text = '"""D."""\ntry:\n    f()\nexcept BaseException:\n    g()\n    raise\n'
    assert style_faults(Source("protos/a.py", text)) == []


def test_prints_and_broad_excepts_pass_in_their_one_place():
    loud = '"""D."""\nprint(1)\n'
    broad = '"""D."""\ntry:\n    f()\nexcept Exception:\n    pass\n'
    assert style_faults(Source("cluster/tools/cli.py", loud)) == []
    assert style_faults(Source("verifier_service/bench.py", loud)) == []
    assert style_faults(Source("drafter_service/server.py", broad)) == []


def _import_alone(module: str) -> set[str]:
    """Names of sys.modules after a fresh interpreter imported one module."""
    code = f"import sys, {module}; sys.stdout.write('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


HEAVY = {"torch", "transformers", "ray", "grpc"}
LIGHT = [
    "protos.exchange",
    "protos.generation",
    "protos.features",
    "verifier_service.config",
    "drafter_service.config",
    "cluster.config",
    "cluster.tools.client",
]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_stay_light_transitively(module):
    assert _import_alone(module) & HEAVY == set()


def test_the_light_check_can_fail():
    assert "torch" in _import_alone("protos.noise")
