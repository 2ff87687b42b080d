"""Running a decoder over one laid-out step: the port, and transformers' own modules behind it.

`ModulesDecoder` runs any family whose attention goes through transformers' AttentionInterface:
step metadata travels as a forward keyword, no cache object exists, positions are explicit and the
batch dimension is 1. What a family asks of attention is honoured or refused by name.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from protos.errors import CheckpointError
from protos.features import FINAL_LAYER
from verifier_service.model.experts import router_matrices, take_experts
from verifier_service.model.heads import AttentionShape, Scoring
from verifier_service.model.invariance import Matrix
from verifier_service.model.kv import Pool
from verifier_service.model.layout import StepLayout
from verifier_service.model.step_attention import PoolAttention, StepAttention

Output = torch.Tensor | tuple[torch.Tensor, ...]
"""What a decoder layer returns: the residual stream [1, R, H], alone or first."""
Hook = Callable[[torch.nn.Module, object, Output], None]

ATTENTION_NAME = "outrider_tiles"
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
)
"""Keywords that some families hand down to attention and that change nothing here."""


class StepContext:
    """What a decoder needs of one step beside its rows."""

    def __init__(
        self,
        layout: StepLayout,
        pool: Pool,
        multiple: int,
        over_pool: PoolAttention,
    ) -> None:
        """over_pool: of `pool` and the backend that `layout` is for."""
        self.layout = layout
        self.pool = pool
        self.multiple = multiple
        self._over_pool = over_pool
        self.num_calls = 0
        self._attentions: dict[AttentionShape, StepAttention] = {}
        first = layout.first_slot
        self._runs = None if first is None else pool.runs(first, layout.num_rows)

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """Put K and V of all rows, [2, H, R, D], into their slots."""
        if self._runs is not None:
            self._runs[layer].copy_(kv[:, :, : self.layout.num_rows])
        else:
            self.pool.write(layer, self.layout.slots, kv)

    def attention(self, num_heads: int) -> StepAttention:
        """This step's attention for layers of `num_heads` query heads."""
        pool = self.pool
        shape = AttentionShape(num_heads, pool.num_heads, pool.head_dim, self.multiple)
        if shape not in self._attentions:
            self._attentions[shape] = self._over_pool.attention(self.layout, shape)
        return self._attentions[shape]


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """logits [N, V] of the asked rows; states: aux states [R, H] by layer, FINAL_LAYER's too."""

    logits: torch.Tensor
    states: dict[int, torch.Tensor]


class Decoder(Protocol):
    """A target's layers. `logit_rows` int64 [N] are flat rows, padding included."""

    def run(
        self, context: StepContext, logit_rows: torch.Tensor, aux_layers: frozenset[int]
    ) -> DecoderOutput:
        """Run all layers over a step; writes K and V, returns logits and aux states."""

    def matrices(self) -> list[Matrix]:
        """All matrices, for the invariance check (repetitions allowed)."""


class ModulesDecoder:
    """transformers' own modules, unchanged but for experts (experts.py)."""

    def __init__(self, model: PreTrainedModel) -> None:
        """The text part of `model`, where it has others beside it; computes where it lies."""
        _require_served(model)
        self._model = model
        self._text = model.get_decoder()
        self._layers = _decoder_layers(model, self._text)
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._experts = take_experts(self._text) if on_cpu else []

    def run(
        self, context: StepContext, logit_rows: torch.Tensor, aux_layers: frozenset[int]
    ) -> DecoderOutput:
        states: dict[int, torch.Tensor] = {}
        hooks = [
            self._layers[layer].register_forward_hook(_keep(states, layer))
            for layer in aux_layers - {FINAL_LAYER}
        ]
        if FINAL_LAYER in aux_layers:
            hooks.append(self._text.register_forward_hook(_keep_final(states)))
        for experts in self._experts:
            experts.multiple, experts.num_rows = context.multiple, context.layout.num_rows
        try:
            output = self._model(
                input_ids=context.layout.ids[None],
                position_ids=context.layout.positions[None],
                use_cache=False,
                logits_to_keep=logit_rows,
                outrider_step=context,
            )
        finally:
            for hook in hooks:
                hook.remove()
        if context.num_calls != len(self._layers):
            raise CheckpointError(
                f"{context.num_calls} of {len(self._layers)} layers of "
                f"{type(self._model).__name__} attend through AttentionInterface"
            )
        return DecoderOutput(output.logits[0], states)

    def matrices(self) -> list[Matrix]:
        """Decoder.matrices."""
        linears = [*self._text.modules(), self._model.get_output_embeddings()]
        return [
            *(_matrix(module) for module in linears if isinstance(module, torch.nn.Linear)),
            *(_conv_matrix(module) for module in linears if isinstance(module, Conv1D)),
            *(matrix for experts in self._experts for matrix in experts.matrices),
            *router_matrices(self._text),
        ]


def _matrix(module: torch.nn.Linear) -> Matrix:
    kind = "product" if module.bias is None else "product with bias"
    return Matrix(module.out_features, module.in_features, module, kind, _limit_of(module))


def _conv_matrix(module: Conv1D) -> Matrix:
    """GPT-2's linear layer, whose weight lies the other way round."""
    return Matrix(module.nf, module.nx, module, "transposed product", _limit_of(module))


def _limit_of(module: torch.nn.Module) -> Callable[[int], None]:
    """Sets how many rows the module multiplies at once, by its own forward in parts."""

    def limit(most_rows: int) -> None:
        whole = type(module).forward

        def in_parts(x: torch.Tensor) -> torch.Tensor:
            parts = x.flatten(0, -2).split(most_rows)  # type: ignore[no-untyped-call]
            return torch.cat([whole(module, p) for p in parts]).view(*x.shape[:-1], -1)

        module.forward = in_parts

    return limit


def register_attention() -> None:
    """Make attention known to transformers under ATTENTION_NAME.

    No mask function is registered under that name, so transformers builds no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    outrider_step: StepContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """AttentionInterface's signature: query [1, A, R, D], key and value [1, H, R, D]."""
    unknown = sorted(
        name
        for name, asked in others.items()
        if name not in _HARMLESS and asked is not None and asked is not False
    )
    if attention_mask is not None:
        unknown.append("attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if unknown:
        raise CheckpointError(f"attention of this family needs {', '.join(unknown)}")
    if key.shape != value.shape:
        raise CheckpointError(
            f"keys {list(key.shape)} and values {list(value.shape)} of different shape "
            f"are not supported"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # attributes of modules are untyped
    pool = outrider_step.pool
    if (key.shape[1], key.shape[3]) != (pool.num_heads, pool.head_dim):
        raise CheckpointError(
            f"layer {layer} has {key.shape[1]} key-value heads of {key.shape[3]}, the "
            f"configuration says {pool.num_heads} of {pool.head_dim}"
        )
    outrider_step.num_calls += 1
    outrider_step.write(layer, torch.cat([key, value]))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    queries = query[0].transpose(0, 1) * scale
    out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    attention = outrider_step.attention(queries.shape[1])
    attention.bind(queries, out)
    attention.attend(layer, Scoring(sliding_window, softcap, s_aux))
    return out[None], None


def _require_served(model: PreTrainedModel) -> None:
    """Refuse, by name, a family that cannot be run over a laid-out step."""
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise CheckpointError(f"{name}'s attention does not go through AttentionInterface")
    accepted = inspect.signature(model.forward).parameters
    for needed in ("position_ids", "logits_to_keep"):
        if needed not in accepted:
            raise CheckpointError(f"{name} takes no {needed}")


def _decoder_layers(model: PreTrainedModel, text: torch.nn.Module) -> torch.nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    for module in text.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise CheckpointError(f"{type(model).__name__} has no list of {count} decoder layers")


def _keep_final(states: dict[int, torch.Tensor]) -> Hook:
    def hook(_module: torch.nn.Module, _inputs: object, output: Output) -> None:
        # The decoder's first output, by position in a tuple and in transformers' own type.
        states[FINAL_LAYER] = output[0][0]

    return hook


def _keep(states: dict[int, torch.Tensor], layer: int) -> Hook:
    def hook(_module: torch.nn.Module, _inputs: object, output: Output) -> None:
        states[layer] = (output[0] if isinstance(output, tuple) else output)[0]

    return hook
