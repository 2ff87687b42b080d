"""Describe: capability record and load of a drafter <-> protobuf.

Pure functions. A record from the network is bounded before anything is built from it; whether
drafter and target belong together is not decided here.
"""

import math

from protos import drafting_pb2 as pb
from protos.errors import ProtocolError
from protos.exchange import PROTOCOL_VERSION, Capabilities, DrafterLoad, Projection
from protos.limits import MAX_LAYERS, NO_BOUND, check_count, check_text
from protos.parts_codec import KIND_OF, KINDS, check_version, known


def encode_describe_request() -> pb.DescribeRequest:
    """Asks what a drafter is, naming the version spoken here."""
    return pb.DescribeRequest(protocol_version=PROTOCOL_VERSION)


def check_describe_request(message: pb.DescribeRequest) -> None:
    """Raises VersionMismatch when the caller speaks another version."""
    check_version(message.protocol_version)


def encode_description(capabilities: Capabilities, load: DrafterLoad) -> pb.DescribeResponse:
    """A drafter's capability record and load."""
    return pb.DescribeResponse(
        protocol_version=capabilities.protocol_version,
        kind=capabilities.kind,
        name=capabilities.name,
        incarnation=capabilities.incarnation,
        plan_kinds=[KINDS[kind] for kind in capabilities.plan_kinds],
        digest=capabilities.digest,
        target_digest=capabilities.target_digest,
        aux_layers=capabilities.aux_layers,
        raw_width=capabilities.raw_width,
        fused_width=capabilities.fused_width,
        projection=_encode_projection(capabilities.projection),
        vocab_size=capabilities.vocab_size,
        max_context=capabilities.max_context,
        max_sessions=capabilities.max_sessions,
        max_depth=capabilities.max_depth,
        max_width=capabilities.max_width,
        max_nodes=capabilities.max_nodes,
        load=pb.Load(
            num_sessions=load.num_sessions,
            num_waiting=load.num_waiting,
            busy_s=load.busy_s,
            up_s=load.up_s,
            num_rounds=load.num_rounds,
        ),
        gives_q=capabilities.gives_q,
    )


def decode_description(message: pb.DescribeResponse) -> tuple[Capabilities, DrafterLoad]:
    """Raises VersionMismatch or ProtocolError."""
    check_version(message.protocol_version)
    _check_sizes(message)
    capabilities = Capabilities(
        kind=check_text("kind", message.kind),
        name=check_text("name", message.name),
        incarnation=message.incarnation,
        plan_kinds=tuple(known(KIND_OF, "plan kind", kind) for kind in message.plan_kinds),
        digest=check_text("digest", message.digest),
        target_digest=check_text("target_digest", message.target_digest),
        aux_layers=tuple(message.aux_layers),
        raw_width=message.raw_width,
        fused_width=message.fused_width,
        projection=_decode_projection(message) if message.HasField("projection") else None,
        vocab_size=message.vocab_size,
        max_context=message.max_context,
        max_sessions=message.max_sessions,
        max_depth=message.max_depth,
        max_width=message.max_width,
        max_nodes=message.max_nodes,
        protocol_version=message.protocol_version,
        gives_q=message.gives_q,
    )
    return capabilities, _decode_load(message.load)


def _check_sizes(message: pb.DescribeResponse) -> None:
    check_count("plan kinds", len(message.plan_kinds), len(KINDS))
    check_count("aux layers", len(message.aux_layers), MAX_LAYERS)
    sizes = (
        *message.aux_layers,
        message.raw_width,
        message.fused_width,
        message.vocab_size,
        message.max_context,
        message.max_sessions,
        message.max_depth,
        message.max_width,
        message.max_nodes,
    )
    check_count("units of any size", max(sizes), NO_BOUND)


def _encode_projection(projection: Projection | None) -> pb.Projection | None:
    if projection is None:
        return None
    return pb.Projection(
        fc=projection.fc,
        norms=projection.norms,
        norm_eps=projection.norm_eps,
        norm_form=projection.norm_form,
        fc_bias=projection.fc_bias,
    )


def _decode_projection(message: pb.DescribeResponse) -> Projection:
    projection = message.projection
    check_count("norms", len(projection.norms), MAX_LAYERS)
    if not (math.isfinite(projection.norm_eps) and projection.norm_eps >= 0):
        raise ProtocolError("norm_eps must be finite and not negative")
    return Projection(
        fc=check_text("fc", projection.fc),
        norms=tuple(check_text("norms", name) for name in projection.norms),
        norm_eps=projection.norm_eps,
        norm_form=check_text("norm_form", projection.norm_form),
        fc_bias=check_text("fc_bias", projection.fc_bias),
    )


def _decode_load(load: pb.Load) -> DrafterLoad:
    if not (math.isfinite(load.busy_s) and math.isfinite(load.up_s)):
        raise ProtocolError("load must be finite seconds")
    return DrafterLoad(
        num_sessions=load.num_sessions,
        num_waiting=load.num_waiting,
        busy_s=load.busy_s,
        up_s=load.up_s,
        num_rounds=load.num_rounds,
    )
