"""The gRPC edge of a verifier on its own: DescribeTarget and Generate.

Decodes, hands over to the engine's service, encodes. Knows no model and no text. A caller that
cancels, or whose connection breaks, cancels its request within a step.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from protos.channel import Security, bind, make_aio_server
from protos.channel_errors import abort
from protos.errors import OutriderError, PeerUnavailable
from protos.generation import TargetDescription
from protos.generation_codec import decode_generation_request, encode_target, encode_token_run
from protos.limits import Limits
from verifier_service.engine.service import EngineService

logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServer:
    """A verifier on a port of this machine, on the event loop that calls `start`."""

    def __init__(
        self,
        service: EngineService,
        security: Security,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """The service must have been started, and outlives the server."""
        self._service = service
        self._security = security
        self._host = host
        self._asked_port = port
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Bind, serve and return the port. Raises ConfigError."""
        server = make_aio_server(self._security)
        servicer = _Servicer(self._service)
        rpc.add_GenerationServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        port = bind(server, self._host, self._asked_port, self._security)
        await server.start()
        self._server = server
        logger.info("verifier listens on port %d", port)
        return port

    async def stop(self) -> None:
        """Take no calls any more; what running ones were already given still goes out.

        To let them finish, drain and stop the service first: while the server listens, its refusals
        tell callers to go elsewhere.
        """
        if self._server is None:
            return
        await self._server.stop(STOP_GRACE_S)
        self._server = None


class _Servicer(rpc.GenerationServicer):
    def __init__(self, service: EngineService) -> None:
        self._service = service
        facts = service.facts
        self._limits = Limits(vocab_size=facts.vocab_size, max_context=service.max_context)
        self._target = TargetDescription(
            name=facts.name,
            target_digest=facts.digest,
            system_fingerprint=facts.fingerprint,
            invariant=facts.invariant,
            vocab_size=facts.vocab_size,
            max_context=service.max_context,
            eos_token_ids=facts.eos_token_ids,
            takes_grammar=service.takes_grammar,
        )

    async def DescribeTarget(  # noqa: N802  # the name in the .proto
        self, request: pb.DescribeTargetRequest, context: _Context
    ) -> pb.DescribeTargetResponse:
        """What is served here; fails when the engine has died or lets nobody in any more."""
        refusal = self._service.refusal
        if refusal is not None:
            await abort(context, PeerUnavailable(refusal))
        return encode_target(self._target)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One message per step that committed tokens."""
        try:
            decoded = decode_generation_request(request, self._limits)
            # Closed on every way out, so that a cancelled call cancels its request at once.
            async with contextlib.aclosing(self._service.generate(decoded)) as runs:
                async for run in runs:
                    yield encode_token_run(run)
        except OutriderError as error:
            await abort(context, error)
        except Exception as error:  # the edge: the log says what, the caller that it was us
            logger.exception("a Generate call failed")
            await abort(context, error)
