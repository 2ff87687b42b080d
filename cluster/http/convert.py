"""Checked requests become `protos` values: sampling, speculation, ids within the vocabulary.

Pure. Knows no tokenizer and no verifier; their facts come as arguments.
"""

from collections.abc import Mapping
from dataclasses import replace

from cluster.http.limits import Limits
from cluster.http.openai import ChatRequest, CompletionRequest, SpeculationRequest
from cluster.http.structured import grammar_of
from protos.errors import InvalidRequest
from protos.exchange import STATIC_PLAN, Plan, PlanKind
from protos.generation import Speculation, SpeculationMode
from protos.options import LogitOptions
from protos.params import Acceptance, SamplingParams


def check_choices(num_choices: int, num_prompts: int, limits: Limits) -> None:
    """Raise InvalidRequest naming `n` where a call asks for too many answers."""
    if num_choices * num_prompts > limits.max_choices:
        raise InvalidRequest(
            f"n times the number of prompts must be at most {limits.max_choices}, "
            f"not {num_choices * num_prompts}",
            "n",
        )


def check_ids(ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest naming the first id outside [0, vocab_size)."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}: token id {str(token_id)[:24]} is outside the vocabulary of {vocab_size}",
                param,
            )


def speculation_shape(asked: SpeculationRequest | None) -> Plan | None:
    """The plan an override asks for, None when it leaves the shape open.

    Raises: InvalidRequest where the fields contradict each other.
    """
    if asked is None:
        return None
    shaped = [asked.width, asked.depth, asked.nodes]
    if asked.shape is not None:
        if asked.width is not None or asked.block is not None:
            raise InvalidRequest("speculation: shape excludes width and block", "speculation")
        whole = STATIC_PLAN
        depth, nodes = asked.depth or whole.depth, asked.nodes or whole.nodes
        return _named(asked, replace(whole, depth=depth, nodes=nodes))
    if asked.block is not None:
        if any(value is not None for value in (asked.width, asked.depth)):
            raise InvalidRequest("speculation: block excludes width and depth", "speculation")
        return _named(asked, Plan(PlanKind.BLOCK, asked.block, 1, asked.nodes or 0))
    if all(value is None for value in shaped):
        return None
    width = asked.width or 1
    if width == 1 and asked.nodes is None:
        return _named(asked, Plan(PlanKind.CHAIN, asked.depth or 4))
    depth = asked.depth or 4
    return _named(asked, Plan(PlanKind.TREE, depth, width, asked.nodes or width * depth))


def _named(asked: SpeculationRequest, plan: Plan) -> Plan:
    if asked.mode in ("auto", "off"):
        raise InvalidRequest(
            f"speculation: a shape needs a drafter's name as mode, not {asked.mode!r}",
            "speculation",
        )
    return plan


def speculation_of(asked: SpeculationRequest | None, drafters: tuple[str, ...]) -> Speculation:
    """The override as a value; `mode` may join several drafters with a plus sign.

    Raises: InvalidRequest naming a drafter that is not served.
    """
    plan = speculation_shape(asked)
    if asked is None or asked.mode == "auto":
        return Speculation()
    if asked.mode == "off":
        return Speculation(SpeculationMode.OFF)
    names = tuple(dict.fromkeys(asked.mode.split("+")))
    for name in names:
        if name not in drafters:
            known = ", ".join(("auto", "off", *drafters))
            raise InvalidRequest(
                f"speculation.mode: no drafter {name[:64]!r}; served: {known}", "speculation"
            )
    return Speculation(SpeculationMode.FIXED, names, plan)


def check_acceptance(
    acceptance: str | None, speculation: Speculation, drafters_with_q: tuple[str, ...]
) -> None:
    """Raise InvalidRequest where rejection is asked and nobody could draft for it."""
    if acceptance != Acceptance.REJECTION:
        return
    if not drafters_with_q:
        raise InvalidRequest(
            "acceptance: rejection needs a drafter that gives q, and none is served", "acceptance"
        )
    without = [name for name in speculation.drafters if name not in drafters_with_q]
    if without:
        raise InvalidRequest(
            f"acceptance: rejection needs a drafter that gives q "
            f"({', '.join(drafters_with_q)}), not {without[0][:64]!r}",
            "acceptance",
        )
    plan = speculation.plan
    if plan is not None and (plan.kind is PlanKind.TREE or plan.nodes):
        raise InvalidRequest("acceptance: rejection drafts chains, not trees", "acceptance")


def options_of(
    request: CompletionRequest | ChatRequest, defaults: Mapping[str, float], vocab_size: int
) -> LogitOptions:
    """Logit options: the request's; of generation_config the repetition penalty counts.

    Raises: InvalidRequest naming the field that is out of range, or holds an unknown id.
    """
    biases = [(_token_id(name), bias) for name, bias in (request.logit_bias or {}).items()]
    allowed = tuple(request.allowed_token_ids or ())
    check_ids(tuple(token for token, _ in biases), vocab_size, "logit_bias")
    check_ids(allowed, vocab_size, "allowed_token_ids")
    repetition = request.repetition_penalty
    if repetition is None:
        repetition = defaults.get("repetition_penalty", 1.0)
    return LogitOptions(
        allowed_token_ids=allowed,
        min_tokens=request.min_tokens or 0,
        logit_bias=tuple(biases),
        repetition_penalty=repetition,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        grammar=grammar_of(request.response_format, request.structured_outputs),
    )


def check_min_tokens(options: LogitOptions, params: SamplingParams) -> None:
    """Raise InvalidRequest where fewer tokens may come than must."""
    if options.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens must be at most the {params.max_tokens} tokens that may come, "
            f"not {options.min_tokens}",
            "min_tokens",
        )


def _token_id(name: str) -> int:
    """A key of logit_bias: JSON knows no other keys than strings."""
    if not (name.isascii() and name.removeprefix("-").isdigit() and len(name) <= 10):
        raise InvalidRequest("logit_bias: keys must be token ids", "logit_bias")
    return int(name)


def sampling_of(
    request: CompletionRequest | ChatRequest,
    defaults: Mapping[str, float],
    *,
    room: int,
    default_max_tokens: int,
    seed: int,
) -> SamplingParams:
    """Sampling values: the request's, else the model's generation_config, else OpenAI's.

    room: positions left after the prompt, a cap on the output. seed: used when none was asked.
    Raises: InvalidRequest naming the field that is out of range.
    """

    def pick(name: str, openai_default: float) -> float:
        asked = getattr(request, name)
        return float(asked if asked is not None else defaults.get(name, openai_default))

    asked_max = request.asked_max_tokens
    top_k = request.top_k if request.top_k is not None else int(defaults.get("top_k", 0))
    max_tokens = default_max_tokens if asked_max is None else asked_max
    return SamplingParams(
        temperature=pick("temperature", 1.0),
        top_p=pick("top_p", 1.0),
        top_k=0 if top_k == -1 else top_k,
        min_p=pick("min_p", 0.0),
        seed=request.seed if request.seed is not None else seed,
        max_tokens=max_tokens if max_tokens < 1 else min(max_tokens, max(room, 1)),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        acceptance=Acceptance(request.acceptance or Acceptance.EXACT),
    )
