"""`outrider serve`: Ray on this machine, the application on it, until Ctrl-C.

Sets what Ray reads at import before it is imported, prepares the embedded target in a process of
its own (so that this one never holds a model) and prints the URL when the first answer can come.
"""

import importlib.resources
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Final

from cluster.config import ClusterConfig, read_config
from cluster.tools.validate import disk_faults
from protos.errors import ConfigError
from verifier_service.config import EMBEDDED
from verifier_service.model.gguf import is_gguf

_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # One line per request: nothing worth holding back, and a crash must not lose the last lines.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    # One way in, the proxy: no further ports, and no minimum of 30 s to stop an ingress.
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Keep CUDA_VISIBLE_DEVICES as it is for replicas that reserve no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    # Replicas are the work itself, not background jobs: Ray would run them at niceness 15.
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_MAKE_TARGET: Final = (
    "import sys; from verifier_service.model.embedded import ensure_target;"
    "print(ensure_target(sys.argv[1]))"
)


def default_config() -> Path:
    """configs/local.yaml, as installed."""
    return Path(str(importlib.resources.files("configs").joinpath("local.yaml")))


def prepare_environment() -> None:
    """What Ray and its workers read at import; values that are set already stay."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def prepare_target(config: ClusterConfig) -> None:
    """Write a target that comes as GGUF, once, in another process. Raises: ConfigError."""
    target = config.verifier.target
    if target != EMBEDDED and not is_gguf(target):
        return
    done = subprocess.run(
        [sys.executable, "-c", _MAKE_TARGET, target], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["unknown error"])[-1]
        raise ConfigError(f"the target {Path(target).name} cannot be made: {reason}")


def start_ray(config: ClusterConfig, *, dashboard: bool, address: str | None) -> None:
    """Ray and Serve's HTTP proxy, local unless an address is given."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if address is not None:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    else:
        ray.init(
            num_cpus=max(os.cpu_count() or 1, 2),
            include_dashboard=dashboard,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=100 * 2**20,
        )
    options = HTTPOptions(host=config.http.host, port=config.http.port)
    serve.start(http_options=options)


def run_app(config: ClusterConfig) -> None:
    """Build and deploy; returns when the application is ready. Raises: ConfigError."""
    from ray import serve

    from cluster.fleet.app import APP_NAME, build_app

    try:
        serve.run(build_app(config), name=APP_NAME, logging_config={"enable_access_log": False})
    except RuntimeError as error:
        raise ConfigError(f"the application did not start: {_reason(error)}") from error


def _reason(error: RuntimeError) -> str:
    """Why a deployment failed: the last line that its replica said, else Serve's own."""
    from ray import serve

    from cluster.fleet.app import APP_NAME

    messages = [str(error)]
    application = serve.status().applications.get(APP_NAME)
    for name, deployment in (application.deployments if application else {}).items():
        if deployment.status not in ("HEALTHY", "UPDATING"):
            messages.insert(0, f"{name}: {_last_line(deployment.message)}")
    return _last_line(messages[0])


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "see Ray's logs"


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when something listens there already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"http.port: cannot listen on {host}:{port}") from error


def serve_forever(
    path: Path | None,
    *,
    host: str | None = None,
    port: int | None = None,
    dashboard: bool = False,
    address: str | None = None,
) -> int:
    """Serve until Ctrl-C; 0 after a clean stop."""
    prepare_environment()
    config = read_config(path or default_config())
    given = {"host": host, "port": port}
    changes = {name: value for name, value in given.items() if value is not None}
    http = config.http.model_copy(update=changes)
    config = config.model_copy(update={"http": http})
    faults = disk_faults(config) if address is None else []
    if faults:
        raise ConfigError("; ".join(faults))
    if address is None:
        check_port(config.http.host, config.http.port)
    began = time.monotonic()
    print(f"outrider: preparing {config.models[0]} ...", flush=True)
    prepare_target(config)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    start_ray(config, dashboard=dashboard, address=address)
    stop = _stop_event()
    try:
        run_app(config)
        url = f"http://{config.http.host}:{config.http.port}"
        print(f"outrider: ready at {url} after {time.monotonic() - began:.0f} s", flush=True)
        print(f'outrider: try  outrider chat --url {url} "Hello"', flush=True)
        stop.wait()
        print("outrider: stopping", flush=True)
    finally:
        _stop(own_ray=address is None)
    return 0


def _stop_event() -> threading.Event:
    """Set at the first SIGINT or SIGTERM, also where a shell started us with SIGINT ignored.

    The second signal ends the process at once.
    """
    event = threading.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        event.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    return event


def _stop(*, own_ray: bool) -> None:
    import ray
    from ray import serve

    from cluster.fleet.app import APP_NAME

    if own_ray:
        serve.shutdown()  # type: ignore[no-untyped-call]  # Ray is not annotated there
        ray.shutdown()
    else:
        serve.delete(APP_NAME)
