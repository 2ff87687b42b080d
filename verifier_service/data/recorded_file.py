"""One recorded text as a safetensors file: its tokens, and its rows layer by layer.

    tokens      int32 [N]       prompt, answer, and what the target would have said next
    layer.<n>   [end - 1, H]    aux states after decoder layer n (65535: after the last norm)

A layer is a tensor of its own, so that any head's rows can be put together from one file. Written
in one rename. Knows no target. Invariant: a file that is there is whole; one that is not whole was
damaged by others and is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protos.errors import ConfigError, OutriderError
from protos.features import FINAL_LAYER, FeatureRows
from protos.params import SamplingParams
from protos.recorded import RecordedText
from verifier_service.model.target import ROW_DTYPES

FORMAT: Final = "outrider-recorded-text 1"
_TOKENS: Final = "tokens"
_NUMBERS: Final = ("prompt_len", "end", "max_len", "seed")


@dataclass(frozen=True, slots=True)
class TextFacts:
    """All of a text but its rows. Lengths as in `RecordedText`."""

    tokens: tuple[int, ...]
    prompt_len: int
    end: int
    max_len: int
    seed: int


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows read when they are asked for: hundreds of texts are held without theirs."""

    path: Path

    def __call__(self, aux_layers: Sequence[int]) -> FeatureRows:
        """See `RawRows`. Raises ConfigError."""
        try:
            with safe_open(self.path, framework="pt") as file:
                held = set(file.keys())
                absent = [name for layer in aux_layers if (name := _name(layer)) not in held]
                if absent or not aux_layers:
                    raise ConfigError(
                        f"{self.path.name} holds no rows of {', '.join(absent) or 'no layer'}"
                    )
                parts = [file.get_tensor(_name(layer)) for layer in aux_layers]
        except (OSError, SafetensorError) as error:
            raise _damaged(self.path) from error
        rows_NA = torch.cat(parts, dim=-1)
        data = rows_NA.contiguous().view(torch.uint8).numpy().tobytes()
        return FeatureRows(0, len(rows_NA), rows_NA.shape[1], ROW_DTYPES[rows_NA.dtype], data)


def write_text(path: Path, facts: TextFacts, layers: Mapping[int, Tensor]) -> None:
    """Write a text, beside the layers that its file holds already. layers: [end - 1, H] each."""
    tensors = {_name(layer): rows.contiguous() for layer, rows in layers.items()}
    if path.is_file():
        with safe_open(path, framework="pt") as file:
            held = set(file.keys()) - tensors.keys() - {_TOKENS}
            tensors |= {name: file.get_tensor(name) for name in held}
    tensors[_TOKENS] = torch.tensor(facts.tokens, dtype=torch.int32)
    numbers = {name: str(getattr(facts, name)) for name in _NUMBERS}
    scratch = path.with_name(path.name + ".tmp")
    save_file(tensors, scratch, {"format": FORMAT, **numbers})
    scratch.replace(path)


def read_text(path: Path) -> tuple[TextFacts, frozenset[int]]:
    """A text and the layers its file holds. Raises ConfigError for a damaged or foreign file."""
    try:
        with safe_open(path, framework="pt") as file:
            said: dict[str, str] = file.metadata() or {}
            if said.get("format") != FORMAT:
                raise ConfigError(f"{path.name} is no recorded text of this version: delete it")
            numbers = {name: int(said[name]) for name in _NUMBERS}
            tokens: list[int] = file.get_tensor(_TOKENS).tolist()
            names = [name for name in file.keys() if name != _TOKENS]  # noqa: SIM118
            facts = TextFacts(tuple(tokens), **numbers)
            _check(facts, {name: file.get_slice(name) for name in names})
            layers = frozenset(int(name.partition(".")[2]) for name in names)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _damaged(path) from error
    return facts, layers


def recorded_text(
    path: Path, facts: TextFacts, params: SamplingParams, target_digest: str
) -> RecordedText:
    """The value that drafters are replayed against; its rows stay in the file."""
    return RecordedText(
        tokens=facts.tokens,
        prompt_len=facts.prompt_len,
        end=facts.end,
        max_len=facts.max_len,
        params=params,
        rows=FileRows(path),
        target_digest=target_digest,
    )


def _check(facts: TextFacts, rows: Mapping[str, Any]) -> None:
    """Raise ValueError unless lengths fit each other. rows: safetensors' slices."""
    if not 0 < facts.prompt_len < facts.end <= min(len(facts.tokens), facts.max_len):
        raise ValueError("lengths do not fit")
    if any(part.get_shape()[0] != facts.end - 1 for part in rows.values()):
        raise ValueError("rows are missing")


def _name(layer: int) -> str:
    if not 0 <= layer <= FINAL_LAYER:
        raise ConfigError(f"aux layers lie between 0 and {FINAL_LAYER}, not {layer}")
    return f"layer.{layer}"


def _damaged(path: Path) -> OutriderError:
    return ConfigError(
        f"the recorded text {path.name} cannot be read: it was cut short or changed; delete it and "
        "it is made again"
    )
