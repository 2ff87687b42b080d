"""Whether a draft model speaks the target's vocabulary, and how much of its own it may draft.

Ids are compared by their tokens, read from both directories' tokenizer.json. Padding of either
embedding is no difference: ids past the tokenizer are never drafted. Where a tokenizer is not
there, sizes must do, and the log says so. Knows no weights.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.errors import CheckpointError, IncompatiblePair

logger = logging.getLogger(__name__)

MAX_PADDING = 1024
"""Without tokenizers, embeddings that differ by more belong to different vocabularies."""


@dataclass(frozen=True, slots=True)
class VocabularySizes:
    """Rows of both embeddings, padding included."""

    draft: int
    target: int


def num_draftable(draft_dir: Path, target_dir: Path, sizes: VocabularySizes) -> int:
    """Ids [0, n) that mean the same to both and are no padding.

    Raises IncompatiblePair, naming both sizes and the first difference.
    """
    ours, theirs = tokens_of(draft_dir), tokens_of(target_dir)
    if ours is None or theirs is None:
        return _by_size(ours or theirs, sizes)
    if ours != theirs:
        raise IncompatiblePair(_difference(ours, theirs))
    count = max(ours.values()) + 1
    if count > sizes.draft:
        raise IncompatiblePair(
            f"the tokenizer has {count} ids, the draft model's embedding {sizes.draft}"
        )
    _warn_of_ends(draft_dir, target_dir)
    return min(count, sizes.target)


def tokens_of(directory: Path) -> dict[str, int] | None:
    """Every token's id, added ones included; None where there is no tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        vocab: Any = document["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: pairs of token and score, in order of id
            vocab = {entry[0]: number for number, entry in enumerate(vocab)}
        tokens = {str(token): int(number) for token, number in vocab.items()}
        for added in document.get("added_tokens") or ():
            tokens[str(added["content"])] = int(added["id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
    if not tokens:
        raise CheckpointError("tokenizer.json holds no tokens")
    return tokens


def _by_size(known: dict[str, int] | None, sizes: VocabularySizes) -> int:
    least = min(sizes.draft, sizes.target)
    count = least if known is None else max(known.values()) + 1
    if count > least or abs(sizes.draft - sizes.target) >= MAX_PADDING:
        raise IncompatiblePair(
            f"the draft model has {sizes.draft} ids, the target {sizes.target} "
            f"({count} in use): not one vocabulary"
        )
    logger.warning(
        "draft model and target cannot be compared token by token (no tokenizer.json beside one "
        "of them); ids are taken to mean the same: %d and %d",
        sizes.draft,
        sizes.target,
    )
    return count


def _difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    differing = [token for token in {**theirs, **ours} if ours.get(token) != theirs.get(token)]
    first = min(differing, key=lambda token: ours.get(token, theirs.get(token, 0)))
    return (
        f"the draft model's tokenizer has {len(ours)} tokens, the target's {len(theirs)}; "
        f"{len(differing)} differ, such as {first!r}: id {ours.get(first)} there, "
        f"{theirs.get(first)} in the target"
    )


def _warn_of_ends(draft_dir: Path, target_dir: Path) -> None:
    """Other begin and end ids change how a draft model was trained, not what ids mean."""
    for name in ("bos_token_id", "eos_token_id"):
        found = [_config_value(directory, name) for directory in (draft_dir, target_dir)]
        if found[0] != found[1]:
            logger.warning("%s: %s for the draft model, %s for the target", name, *found)


def _config_value(directory: Path, name: str) -> object:
    path = directory / "config.json"
    if not path.is_file():
        return None
    value: object = json.loads(path.read_text(encoding="utf-8")).get(name)
    return value
