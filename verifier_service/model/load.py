"""Loading a target: a Hugging Face directory in, a TransformersTarget with its facts out.

Reads safetensors only, runs no code from the directory and reaches no hub. What cannot be served
exactly is refused here, by name, not at the first request.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from protos.digest import directory_digest
from protos.errors import CheckpointError, ConfigError
from verifier_service.device import describe_device
from verifier_service.model.backend import Attention, with_backend
from verifier_service.model.decoder import (
    ATTENTION_NAME,
    Decoder,
    ModulesDecoder,
    register_attention,
)
from verifier_service.model.families import check_family
from verifier_service.model.fuse import FusedDecoder, can_fuse
from verifier_service.model.heads import AttentionShape
from verifier_service.model.invariance import (
    CHECK_SLOTS,
    check_steps,
    device_note,
    find_multiple,
)
from verifier_service.model.numerics import fingerprint
from verifier_service.model.quiet import no_progress_bars
from verifier_service.model.sdpa_trial import fault_of_kernel
from verifier_service.model.step_attention import Backend
from verifier_service.model.taps import Taps
from verifier_service.model.target import ROW_DTYPES, TransformersTarget
from verifier_service.model.weights import check_all_used, check_weight_files
from verifier_service.step import TapSpec, TargetFacts

logger = logging.getLogger(__name__)


def load_target(
    path: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    taps: Sequence[TapSpec] = (),
    num_threads: int | None = None,
    fuse: bool = True,
    max_context: int | None = None,
    device: torch.device | None = None,
    attention: Attention = Attention.AUTO,
) -> TransformersTarget:
    """Load the target in directory `path`.

    dtype: float32, bfloat16 or float16. num_threads: set for this process when given. fuse: use the
    fused loop where the family allows. max_context: tokens per request, at most the model's own.
    device: where weights and KV live and everything is computed; None: the CPU. attention: by
    what backend.
    Raises CheckpointError or ConfigError, naming what is wrong.
    """
    directory = Path(path)
    if dtype not in ROW_DTYPES:
        raise ConfigError(f"a target runs in float32, bfloat16 or float16, not {dtype}")
    check_family(directory, ROW_DTYPES[dtype])
    check_weight_files(directory)
    device = device if device is not None else torch.device("cpu")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    model = _read_model(directory, dtype)
    config = model.config.get_text_config()
    context = _max_context(config, max_context)
    _check_rope(config, context)
    fused = fuse and can_fuse(model)
    decoder: Decoder = (
        FusedDecoder(model, context, device) if fused else ModulesDecoder(_moved(model, device))
    )
    own_taps = Taps(taps, config.num_hidden_layers, config.hidden_size, dtype, device)
    kv_heads = _kv_heads(config)
    matrices = [*decoder.matrices(), *(linear.matrices[0] for linear in own_taps.linears)]
    multiple, note = find_multiple(matrices, dtype, device)
    note = note or device_note(device)
    digest = directory_digest(directory)
    facts = TargetFacts(
        name=directory.name,
        digest=digest,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_context=context,
        eos_token_ids=eos_token_ids(directory, config),
        dtype=ROW_DTYPES[dtype],
        bytes_per_slot=_bytes_per_slot(config, kv_heads, own_taps, dtype),
        fingerprint=fingerprint(
            digest, dtype, "fused" if fused else "modules", describe_device(device)
        ),
        invariant=not note,
        invariance_note=note,
    )

    def make(backend: Backend) -> TransformersTarget:
        return TransformersTarget(
            _with_backend(facts, backend.name),
            decoder,
            own_taps,
            kv_heads,
            dtype,
            multiple,
            device,
            backend,
        )

    def sdpa_fault() -> str:
        if not fused or device.type != "cpu":
            return "torch's fused kernel is for Llama-shaped targets on a CPU"
        shape = AttentionShape(config.num_attention_heads, *kv_heads, multiple)
        return fault_of_kernel(shape, dtype)

    return _checked(with_backend(attention, device, dtype, make, sdpa_fault))


def _with_backend(facts: TargetFacts, name: str) -> TargetFacts:
    """What a fused kernel changes: other bits, and with FlexAttention no invariance either."""
    if name == Attention.TILES:
        return facts
    own = replace(facts, fingerprint=f"{facts.fingerprint}-{name}")
    if name != Attention.FLEX:
        return own
    note = facts.invariance_note or "FlexAttention's sums depend on where a span's pages lie"
    return replace(own, invariant=False, invariance_note=note)


def _checked(target: TransformersTarget) -> TransformersTarget:
    """The target with its facts completed by small steps through all of it."""
    target.allocate(CHECK_SLOTS)
    note = check_steps(target)
    target.free()
    if note and target.facts.invariant:
        target.facts = replace(target.facts, invariant=False, invariance_note=note)
    if not target.facts.invariant:
        logger.warning("target %s: %s", target.facts.name, target.facts.invariance_note)
    return target


def eos_token_ids(directory: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Every id that ends a text: config's, generation_config's and the tokenizer's, ascending."""
    found: set[int] = set()
    declared = [config.eos_token_id]
    if (directory / "generation_config.json").is_file():
        declared.append(GenerationConfig.from_pretrained(directory).eos_token_id)
    if any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        declared.append(tokenizer.eos_token_id)
    for ids in declared:
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def _read_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    register_attention()
    with no_progress_bars():
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except (OSError, ValueError, RuntimeError, StrictDataclassError) as error:
            # What transformers has found wrong with the directory, in its own words.
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{directory.name} cannot be loaded: {reason}") from error
    check_all_used(
        directory.name,
        found["missing_keys"],
        found["unexpected_keys"],
        [str(fault[0]) for fault in found["mismatched_keys"]],
    )
    own: PreTrainedModel = model
    return own.eval()


def _moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    # nn.Module.to, which the stub of PreTrainedModel hides.
    return torch.nn.Module.to(model, device)


def _max_context(config: PreTrainedConfig, asked: int | None) -> int:
    own = getattr(config, "max_position_embeddings", None)
    if not own:
        raise CheckpointError(f"{config.model_type} states no max_position_embeddings")
    if asked is None:
        return int(own)
    if not 1 <= asked <= own:
        raise ConfigError(f"max_context must be between 1 and the model's {own}, not {asked}")
    return asked


def _check_rope(config: PreTrainedConfig, max_context: int) -> None:
    """Refuse rotary scalings that look at more than a token's own position."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type", "default")
        if kind == "dynamic":
            raise CheckpointError(
                "rope_type 'dynamic' changes a token's rotation with its neighbours' length"
            )
        if kind == "longrope":
            short = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            if max_context > short:
                raise CheckpointError(
                    f"rope_type 'longrope' is served with its short factors only: set "
                    f"max_context to {short} or less (now {max_context})"
                )


def _kv_heads(config: PreTrainedConfig) -> tuple[int, int]:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    return int(heads), int(head_dim or config.hidden_size // config.num_attention_heads)


def _bytes_per_slot(
    config: PreTrainedConfig, kv_heads: tuple[int, int], taps: Taps, dtype: torch.dtype
) -> int:
    elements = 2 * config.num_hidden_layers * kv_heads[0] * kv_heads[1] + sum(taps.widths.values())
    return int(elements * dtype.itemsize)
