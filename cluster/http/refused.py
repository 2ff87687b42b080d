"""Fields that others serve and this server does not, and when they are let pass.

Pure. Invariant: a value that would change the answer is refused by name; one that changes nothing
passes, so that clients which send every default are served.
"""

from collections.abc import Mapping
from typing import Final

from protos.errors import InvalidRequest

REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (),
    "prompt_logprobs": (0,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "priority": (0,),
    # vLLM's and SGLang's own.
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "guided_whitespace_pattern": (),
    "guided_decoding_backend": (),
    "structural_tag": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "verbosity": ("medium",),
}
"""Known fields that are not supported, with the values beside null that change nothing."""


def refuse_unsupported(extras: Mapping[str, object], prefix: str = "") -> None:
    """Raise InvalidRequest naming the first field that asks for what is not done here."""
    for name, value in extras.items():
        neutral = REFUSED.get(name)
        if neutral is not None and not _is_neutral(value, neutral):
            raise InvalidRequest(f"{prefix}{name} is not supported by this server", prefix + name)


def refuse_message_extras(extras: Mapping[str, object], prefix: str) -> None:
    """The same for the fields of one message; `prefix` says which."""
    for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if extras.get(name):
            raise InvalidRequest(f"{prefix}{name} is not supported by this server", prefix + name)


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    if value is None:
        return True
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
