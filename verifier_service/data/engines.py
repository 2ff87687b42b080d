"""The engine that data is made with, and what of a target is known without loading it.

Answering runs without drafters: full batches leave the target nothing to gain from them.
Invariant: the longest context does not depend on the batch, so no batch skips other prompts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import AutoConfig

from protos.digest import directory_digest
from protos.errors import CheckpointError, ConfigError
from verifier_service.device import resolve_device
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange
from verifier_service.engine.loop import Engine
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.embedded import ensure_target
from verifier_service.model.load import eos_token_ids, load_target

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
USUAL_CONTEXT: Final = 8192
"""Tokens of a prompt and its answer, where the target holds as many and nothing else is asked."""
_SLOTS_PER_REQUEST: Final = 2048


@dataclass(frozen=True, slots=True)
class TargetSummary:
    """What a checkpoint says of itself without its weights being loaded."""

    name: str
    digest: str
    vocab_size: int
    max_context: int
    ends: frozenset[int]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """How an engine is built, wherever.

    target: a directory, a GGUF file, or `embedded`. max_context: tokens of prompt and answer; None:
    the usual.
    """

    target: str
    batch: int
    threads: int | None
    dtype: str
    device: str = "auto"
    max_context: int | None = None

    def directory(self) -> Path:
        """The target's directory here; out of a GGUF file it is written when it is missing."""
        return ensure_target(self.target)

    def build(self) -> Engine:
        """Load the target. Raises CheckpointError or ConfigError."""
        return build_engine(
            self.directory(), self.batch, self.threads, self.dtype, self.device, self.max_context
        )

    def summarise(self) -> TargetSummary:
        """What its engines will say of the target, without loading it."""
        return summarise(self.directory(), self.max_context)


def summarise(directory: Path, max_context: int | None = None) -> TargetSummary:
    """Facts of the target in `directory`, as its loaded form would give them.

    Raises CheckpointError when there is no readable config.json, ConfigError for a context that
    the target does not hold.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory.name} holds no readable config.json") from error
    return TargetSummary(
        name=directory.name,
        digest=directory_digest(directory),
        vocab_size=int(config.vocab_size),
        max_context=_context(int(config.max_position_embeddings), max_context),
        ends=frozenset(eos_token_ids(directory, config)),
    )


def build_engine(
    directory: Path,
    batch: int,
    threads: int | None,
    dtype: str,
    device: str = "cpu",
    max_context: int | None = None,
) -> Engine:
    """An engine without drafters that runs `batch` requests at once."""
    target = load_target(
        directory, DTYPES[dtype], num_threads=threads, device=resolve_device(device)
    )
    facts = target.facts
    context = _context(facts.max_context, max_context)
    settings = EngineSettings(
        num_slots=_num_slots(batch, context),
        max_running=batch,
        max_tokens_per_step=max(512, batch),
        max_queued=4 * batch,
        max_context=context,
    )
    rows = PagedRows(target)
    end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, {})
    return Engine(target, DraftExchange(end, rows), StaticPlanner(()), settings, rows)


def _context(own: int, asked: int | None) -> int:
    if asked is None:
        return min(own, USUAL_CONTEXT)
    if not 2 <= asked <= own:
        raise ConfigError(f"the context must be between 2 and the target's {own}, not {asked}")
    return asked


def _num_slots(batch: int, context: int) -> int:
    """Room for `batch` usual requests, and for one of any length, in whole pages."""
    page_size = EngineSettings().page_size
    longest = -(-context // page_size) * page_size
    return max(batch * min(context, _SLOTS_PER_REQUEST), longest)
