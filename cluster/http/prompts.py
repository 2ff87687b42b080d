"""OpenAI's four forms of a prompt: text, texts, ids, lists of ids.

Pure; knows no vocabulary. Invariant: no prompt that comes out is empty, and no more come out than
the limits let in.
"""

from cluster.http.limits import Limits
from protos.errors import InvalidRequest


def prompts_of(value: object, limits: Limits) -> tuple[str | tuple[int, ...], ...]:
    """OpenAI's four prompt forms: text, texts, ids, lists of ids.

    Raises: InvalidRequest for any other form, an empty prompt, or too many prompts.
    """
    if isinstance(value, str):
        return (_text_prompt(value),)
    if not isinstance(value, list) or not value:
        raise InvalidRequest("prompt must be text, token ids, or a list of either", "prompt")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return (_ids_prompt(value),)
    if len(value) > limits.max_prompts:
        raise InvalidRequest(
            f"prompt holds {len(value)} prompts, at most {limits.max_prompts} are served at once",
            "prompt",
        )
    prompts: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, list) == isinstance(value[0], list):
            prompts.append(_ids_prompt(item) if isinstance(item, list) else _text_prompt(item))
        else:
            raise InvalidRequest("prompt mixes text and token ids", "prompt")
    return tuple(prompts)


def _text_prompt(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest("prompt items must be all texts or all token ids", "prompt")
    if not value:
        raise InvalidRequest("prompt must not be empty", "prompt")
    return value


def _ids_prompt(value: list[object]) -> tuple[int, ...]:
    if not value:
        raise InvalidRequest("prompt must not be empty", "prompt")
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool):
            raise InvalidRequest("prompt token ids must all be integers", "prompt")
    return tuple(value)  # type: ignore[arg-type]  # checked item by item above
