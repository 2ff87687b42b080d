"""Generation and DescribeTarget: values <-> protobuf, checked like the draft contract (law 5).

Pure functions. A request is refused with InvalidRequest naming the field, because its author is a
user; a verifier's answer that breaks the contract is a ProtocolError.
"""

from collections.abc import Sequence
from typing import Final

from protos import generation_pb2 as pb
from protos.errors import InvalidRequest, ProtocolError
from protos.exchange import PROTOCOL_VERSION
from protos.generation import (
    FinishReason,
    GenerationRequest,
    RunCounts,
    Speculation,
    SpeculationMode,
    TargetDescription,
    TokenRun,
)
from protos.limits import MAX_LAYERS, MAX_TEXT, Limits, check_count, check_ids, check_text
from protos.logprobs_codec import decode_logprobs, encode_logprobs
from protos.options_codec import decode_options, encode_options
from protos.params import SamplingParams
from protos.parts_codec import (
    check_version,
    decode_plan,
    decode_sampling,
    encode_plan,
    encode_sampling,
    known,
)

MAX_SOURCES: Final = 64
"""Drafters that one request may name, and sources that one account may list."""

_MODES: Final = {
    SpeculationMode.AUTO: pb.SPECULATION_MODE_AUTO,
    SpeculationMode.OFF: pb.SPECULATION_MODE_OFF,
    SpeculationMode.FIXED: pb.SPECULATION_MODE_FIXED,
}
_REASONS: Final = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
}
_MODE_OF: Final[dict[int, SpeculationMode]] = {wire: mode for mode, wire in _MODES.items()}
_REASON_OF: Final[dict[int, FinishReason]] = {wire: reason for reason, wire in _REASONS.items()}


def encode_generation_request(request: GenerationRequest) -> pb.GenerateRequest:
    """A request as sent to a verifier."""
    speculation = request.speculation
    return pb.GenerateRequest(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        sampling=encode_sampling(request.params),
        output_ids=request.output_ids,
        speculation=pb.Speculation(
            mode=_MODES[speculation.mode],
            drafters=speculation.drafters,
            plan=None if speculation.plan is None else encode_plan(speculation.plan),
        ),
        options=encode_options(request.options),
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        timeout_s=request.timeout_s,
    )


def decode_generation_request(message: pb.GenerateRequest, limits: Limits) -> GenerationRequest:
    """Raises InvalidRequest naming the field. An absent `speculation` means auto."""
    if not message.prompt_ids:
        raise InvalidRequest("prompt_ids must not be empty", "prompt_ids")
    length = len(message.prompt_ids) + len(message.output_ids)
    if length > limits.max_context:
        raise InvalidRequest(
            f"prompt and output must fit {limits.max_context} tokens, not {length}", "prompt_ids"
        )
    return GenerationRequest(
        request_id=_named("request_id", message.request_id),
        prompt_ids=_ids("prompt_ids", message.prompt_ids, limits),
        params=_decode_params(message, limits),
        output_ids=_ids("output_ids", message.output_ids, limits),
        speculation=_decode_speculation(message, limits),
        options=decode_options(message, limits),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs
        if message.HasField("num_prompt_logprobs")
        else None,
        timeout_s=message.timeout_s if message.HasField("timeout_s") else None,
    )


def encode_token_run(run: TokenRun) -> pb.GenerateResponse:
    """One step's tokens of one request; the request is named by the call itself."""
    return pb.GenerateResponse(
        ids=run.ids,
        num_accepted=run.num_accepted,
        finish_reason=pb.FINISH_REASON_UNSPECIFIED
        if run.finish_reason is None
        else _REASONS[run.finish_reason],
        stop_token_id=run.stop_token_id,
        counts=None if run.counts is None else _encode_counts(run.counts),
        error=run.error[:MAX_TEXT],
        logprobs=encode_logprobs(run.logprobs),
        prompt_logprobs=encode_logprobs(run.prompt_logprobs),
        is_request_fault=run.is_request_fault,
    )


def decode_token_run(message: pb.GenerateResponse, request_id: str, limits: Limits) -> TokenRun:
    """Raises ProtocolError."""
    check_count("ids of one step", len(message.ids), limits.max_tokens_per_work)
    if message.num_accepted > len(message.ids):
        raise ProtocolError(f"{message.num_accepted} accepted of {len(message.ids)} ids")
    if len(message.logprobs) not in (0, len(message.ids)):
        raise ProtocolError(f"{len(message.logprobs)} log probabilities for {len(message.ids)} ids")
    check_count("prompt log probabilities", len(message.prompt_logprobs), limits.max_context)
    reason = None
    if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
        reason = known(_REASON_OF, "finish reason", message.finish_reason)
    return TokenRun(
        request_id=request_id,
        ids=check_ids("ids", message.ids, limits),
        num_accepted=message.num_accepted,
        finish_reason=reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        counts=_decode_counts(message.counts, limits) if message.HasField("counts") else None,
        error=check_text("error", message.error),
        logprobs=decode_logprobs(message.logprobs, limits),
        prompt_logprobs=decode_logprobs(message.prompt_logprobs, limits),
        is_request_fault=message.is_request_fault,
    )


def encode_target(target: TargetDescription) -> pb.DescribeTargetResponse:
    """What is served, with the version spoken here."""
    return pb.DescribeTargetResponse(
        protocol_version=PROTOCOL_VERSION,
        name=target.name,
        target_digest=target.target_digest,
        system_fingerprint=target.system_fingerprint,
        invariant=target.invariant,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
        eos_token_ids=target.eos_token_ids,
        takes_grammar=target.takes_grammar,
    )


def decode_target(message: pb.DescribeTargetResponse) -> TargetDescription:
    """Raises VersionMismatch or ProtocolError."""
    check_version(message.protocol_version)
    if min(message.vocab_size, message.max_context) < 1:
        raise ProtocolError("a target has a vocabulary and a context")
    check_count("end-of-sequence ids", len(message.eos_token_ids), MAX_LAYERS)
    limits = Limits(vocab_size=message.vocab_size)
    return TargetDescription(
        name=check_text("name", message.name),
        target_digest=check_text("target_digest", message.target_digest),
        system_fingerprint=check_text("system_fingerprint", message.system_fingerprint),
        invariant=message.invariant,
        vocab_size=message.vocab_size,
        max_context=message.max_context,
        eos_token_ids=check_ids("eos_token_ids", message.eos_token_ids, limits),
        takes_grammar=message.takes_grammar,
    )


def _named(param: str, text: str) -> str:
    try:
        return check_text(param, text)
    except ProtocolError as error:
        raise InvalidRequest(str(error), param) from error


def _ids(param: str, ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    try:
        return check_ids(param, ids, limits)
    except ProtocolError as error:
        raise InvalidRequest(str(error), param) from error


def _decode_params(message: pb.GenerateRequest, limits: Limits) -> SamplingParams:
    try:
        return decode_sampling(message.sampling, limits)
    except ProtocolError as error:
        raise InvalidRequest(str(error), "sampling") from error


def _decode_speculation(message: pb.GenerateRequest, limits: Limits) -> Speculation:
    if not message.HasField("speculation"):
        return Speculation()
    speculation = message.speculation
    try:
        check_count("drafters", len(speculation.drafters), MAX_SOURCES)
        return Speculation(
            mode=known(_MODE_OF, "speculation mode", speculation.mode),
            drafters=tuple(check_text("drafter", name) for name in speculation.drafters),
            plan=decode_plan(speculation.plan, limits) if speculation.HasField("plan") else None,
        )
    except ProtocolError as error:
        raise InvalidRequest(str(error), "speculation") from error


def _encode_counts(counts: RunCounts) -> pb.RunCounts:
    return pb.RunCounts(
        num_prompt=counts.num_prompt,
        num_output=counts.num_output,
        num_rounds=counts.num_rounds,
        num_draft_rounds=counts.num_draft_rounds,
        num_drafted=counts.num_drafted,
        num_accepted=counts.num_accepted,
        accepted_by_depth=counts.accepted_by_depth,
        accepted_by_source=[
            pb.SourceCount(source=source, count=count)
            for source, count in counts.accepted_by_source
        ],
        draft_wait_s=counts.draft_wait_s,
        verify_s=counts.verify_s,
        queue_s=counts.queue_s,
        prefill_s=counts.prefill_s,
        num_cached=counts.num_cached,
    )


def _decode_counts(message: pb.RunCounts, limits: Limits) -> RunCounts:
    check_count("depths", len(message.accepted_by_depth), limits.max_nodes)
    check_count("sources", len(message.accepted_by_source), MAX_SOURCES)
    return RunCounts(
        num_prompt=message.num_prompt,
        num_output=message.num_output,
        num_rounds=message.num_rounds,
        num_draft_rounds=message.num_draft_rounds,
        num_drafted=message.num_drafted,
        num_accepted=message.num_accepted,
        accepted_by_depth=tuple(message.accepted_by_depth),
        accepted_by_source=tuple(
            (check_text("source", entry.source), entry.count)
            for entry in message.accepted_by_source
        ),
        draft_wait_s=message.draft_wait_s,
        verify_s=message.verify_s,
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        num_cached=message.num_cached,
    )
