"""The Serve builder: one validated cluster in, one Serve application out.

A pure function of its argument (but for a fresh token, when none is configured): nothing is
loaded, started or looked up, so a head node without a GPU can build it. The import path for Serve
is `cluster.fleet.app:build_app`, with the configuration as `args`.
"""

import os
import secrets
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.config import ClusterConfig, DrafterEntry, Placement, SecuritySection
from cluster.fleet.autoscaling import DrafterPolicy
from cluster.fleet.deployments import DrafterDeployment, IngressDeployment, VerifierDeployment
from cluster.fleet.verifier_router import VerifierRouter
from protos.errors import ConfigError
from verifier_service.config import THREAD_WAITING

APP_NAME = "outrider"
INGRESS = "ingress"
VERIFIER = "verifier"

_SPARE_PLACES = 32
"""Calls beside generations: descriptions, health, metrics, and refusals that carry a reason."""

_MAX_BURST = 4
"""Requests that may stand before the ingress, in multiples of those it serves: they wait only to
be refused in OpenAI's shape. Serve itself refuses what comes beyond."""

_QUIET = {"enable_access_log": False}


def drafter_deployment_name(name: str) -> str:
    """The Serve deployment of a drafter."""
    return f"drafter-{name}"


def build_app(args: ClusterConfig) -> Application:
    """The application: ingress, verifier, one deployment per remote drafter.

    Raises: ConfigError when the configured token is absent.
    """
    token = wire_token(args.security)
    drafters = {
        entry.name: _drafter(args, entry, token) for entry in args.drafters if not entry.colocated
    }
    return _ingress(args, _verifier(args, token, drafters))


def wire_token(security: SecuritySection) -> str:
    """The bearer token between verifier and drafters; empty only when `insecure`.

    Raises: ConfigError.
    """
    if security.insecure:
        return ""
    if security.token_env is None:
        return secrets.token_urlsafe(32)
    token = os.environ.get(security.token_env, "")
    if not token:
        raise ConfigError(f"security.token_env: {security.token_env} is not set")
    return token


def _ingress(config: ClusterConfig, verifier: Application) -> Application:
    http = config.http
    deployment: Any = serve.deployment(
        name=INGRESS,
        num_replicas=http.replicas,
        # The ingress refuses on its own, in OpenAI's shape, before Serve would.
        max_ongoing_requests=http.max_requests + _SPARE_PLACES,
        max_queued_requests=_MAX_BURST * http.max_requests,
        backpressure_config={"retry_after_s": http.retry_after_s},
        graceful_shutdown_timeout_s=http.drain_s,
        ray_actor_options=_actor_options(http.placement, num_threads=1),
        logging_config=_QUIET,
    )(IngressDeployment)
    bound: Application = deployment.bind(config, verifier)
    return bound


def _verifier(config: ClusterConfig, token: str, drafters: dict[str, Application]) -> Application:
    section = config.verifier
    places = section.engine.max_running + section.engine.max_queued
    deployment: Any = serve.deployment(
        name=VERIFIER,
        num_replicas=section.replicas,
        # The engine refuses on its own when its queue is full.
        max_ongoing_requests=places + _SPARE_PLACES,
        max_queued_requests=places,
        backpressure_config={"retry_after_s": config.http.retry_after_s},
        graceful_shutdown_timeout_s=section.drain_s,
        request_router_config={
            "request_router_class": f"{VerifierRouter.__module__}:{VerifierRouter.__name__}"
        },
        health_check_period_s=5,
        health_check_timeout_s=30,
        ray_actor_options=_actor_options(section.placement, section.num_threads),
        logging_config=_QUIET,
    )(VerifierDeployment)
    bound: Application = deployment.bind(config, token, drafters)
    return bound


def _drafter(config: ClusterConfig, entry: DrafterEntry, token: str) -> Application:
    scaling = entry.autoscaling
    size: dict[str, Any] = {"num_replicas": entry.replicas or 1}
    if scaling is not None:
        size = {
            "autoscaling_config": {
                "min_replicas": scaling.min_replicas,
                "max_replicas": scaling.max_replicas,
                "upscale_delay_s": scaling.upscale_delay_s,
                "downscale_delay_s": scaling.downscale_delay_s,
                "look_back_period_s": scaling.look_back_s,
                "policy": {
                    "policy_function": f"{DrafterPolicy.__module__}:{DrafterPolicy.__name__}",
                    "policy_kwargs": {
                        "num_sessions": scaling.target_sessions,
                        "busy_fraction": scaling.target_busy,
                        "num_waiting": scaling.target_waiting,
                    },
                },
            }
        }
    deployment: Any = serve.deployment(
        name=drafter_deployment_name(entry.name),
        # Only descriptions come over handles; drafts go over the replica's own gRPC server.
        max_ongoing_requests=100,
        max_queued_requests=100,
        graceful_shutdown_timeout_s=entry.drain_s + 10,
        health_check_period_s=5,
        health_check_timeout_s=30,
        ray_actor_options=_actor_options(entry.placement, entry.num_threads),
        logging_config=_QUIET,
        **size,
    )(DrafterDeployment)
    bound: Application = deployment.bind(config, entry, token)
    return bound


def _actor_options(placement: Placement, num_threads: int) -> dict[str, object]:
    """Ray's options. Ray would set OMP_NUM_THREADS to the whole CPUs reserved; idle OpenMP
    threads would spin and starve the other service."""
    threads = {"OMP_NUM_THREADS": str(num_threads)} | THREAD_WAITING
    return placement.ray_options() | {"runtime_env": {"env_vars": threads}}
