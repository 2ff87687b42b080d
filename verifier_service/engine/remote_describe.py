"""Asks a drafter what it is, once and blocking: for a verifier that starts beside its drafters.

Knows no session. The running exchange describes drafters on its own (remote_link); this is only
for what must be known before the pool exists: which feature rows to keep.
"""

import grpc

from protos import drafting_pb2_grpc as rpc
from protos.channel import Security, call_metadata, make_channel
from protos.channel_errors import error_from_rpc
from protos.describe_codec import decode_description, encode_describe_request
from protos.exchange import Capabilities


def describe_drafter(address: str, security: Security, timeout_s: float) -> Capabilities:
    """Its capability record; waits up to timeout_s for it to come up.

    Raises PeerUnavailable, Unauthenticated, VersionMismatch or ProtocolError.
    """
    with make_channel(address, security) as channel:
        stub = rpc.DrafterStub(channel)  # type: ignore[no-untyped-call]
        try:
            message = stub.Describe(
                encode_describe_request(),
                timeout=timeout_s,
                wait_for_ready=True,
                metadata=call_metadata(security),
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
    return decode_description(message)[0]
