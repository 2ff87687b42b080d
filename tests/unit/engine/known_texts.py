"""Drafters that know what requests will say, for tests whose texts are known without any."""

from collections.abc import Iterable, Mapping

from protos.generation import GenerationRequest
from tests.fakes import FakeDrafting, future_source, random_source

Texts = Mapping[str, tuple[int, ...]]


def wholes(requests: Iterable[GenerationRequest], texts: Texts) -> dict[str, tuple[int, ...]]:
    """Prompt and text of each request, by its id: what `future_source` drafts from."""
    return {asked.request_id: (*asked.prompt_ids, *texts[asked.request_id]) for asked in requests}


def good_and_liar(
    requests: Iterable[GenerationRequest], texts: Texts, vocab_size: int, error_rate: float
) -> FakeDrafting:
    """`good` drafts these texts, wrong at each depth with probability error_rate; `liar` lies."""
    good = future_source(wholes(requests, texts), vocab_size, error_rate)
    return FakeDrafting({"good": good, "liar": random_source(vocab_size)})
