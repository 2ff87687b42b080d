"""Load-time fusion of Llama-shaped decoders: the layers as one tight loop over packed matrices.

Takes the modules' weights (one qkv matrix, one gate-up matrix per layer) and leaves nothing of
the modules' own forward: rotary tables are looked up once a step, norms take few calls, residuals
are added by the matrix product. Greedy ids equal the unfused path in float32; in bf16 fewer
roundings happen, so logits differ in their last bits. Families of another shape are not fused.

Shapes: R rows, A query heads, H key-value heads, D head_dim, I intermediate_size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from protos.features import FINAL_LAYER
from verifier_service.model.decoder import DecoderOutput, StepContext
from verifier_service.model.heads import Scoring
from verifier_service.model.invariance import Matrix
from verifier_service.model.linear import Linear
from verifier_service.model.mlp import GatedMlp
from verifier_service.model.stream import RowStream, Stream, TurnedStream

FUSED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class _NormModule(Protocol):
    weight: torch.Tensor
    variance_epsilon: float


class _AttentionModule(Protocol):
    """q_norm and k_norm only in some families."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: _NormModule
    k_norm: _NormModule


class _MlpModule(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


class _LayerModule(Protocol):
    """A decoder layer of the Llama shape."""

    self_attn: _AttentionModule
    mlp: _MlpModule
    input_layernorm: _NormModule
    post_attention_layernorm: _NormModule


class _Norm:
    """RMSNorm over the last dimension, in float32, rounded once."""

    def __init__(
        self, device: torch.device, *modules: _NormModule, repeats: tuple[int, ...] = (1,)
    ) -> None:
        """Several modules: each for `repeats` rows of the last dimension but one."""
        weights = [
            module.weight.detach().float().expand(count, -1)
            for module, count in zip(modules, repeats, strict=True)
        ]
        self._weight = torch.cat(weights).to(device, copy=True)
        self._share = 1.0 / self._weight.shape[-1]
        self._eps = torch.tensor(modules[0].variance_epsilon, device=device)

    def __call__(
        self, x: torch.Tensor, wide: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """wide (float32) and out: buffers of x's shape, made when not given."""
        wide = x.to(torch.float32, copy=True) if wide is None else wide.copy_(x)
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        # 1 / sqrt(mean of squares + eps)
        shrink = torch.addcmul(self._eps, size, size, value=self._share).rsqrt_()
        out = torch.empty_like(x) if out is None else out
        return out.copy_(wide.mul_(shrink).mul_(self._weight))


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: _Norm
    qkv: Linear
    qk_norm: _Norm | None
    output: Linear
    before_mlp: _Norm
    mlp: GatedMlp
    scoring: Scoring


def can_fuse(model: PreTrainedModel) -> bool:
    """True when every layer has the Llama shape and the family is one that was compared."""
    config = model.config
    return (
        config.model_type in FUSED_FAMILIES
        and config.hidden_act == "silu"
        and all(_has_llama_shape(layer) for layer in model.base_model.layers)
    )


def _has_llama_shape(layer: nn.Module) -> bool:
    parts = dict(layer.named_children())
    if set(parts) != _LAYER_PARTS:
        return False
    matrices = [*parts["self_attn"].named_children(), *parts["mlp"].named_children()]
    return {name for name, _ in parts["self_attn"].named_children()} <= _ATTENTION_PARTS and all(
        type(module) is nn.Linear for name, module in matrices if name.endswith("_proj")
    )


class FusedDecoder:
    """A Llama-shaped decoder. Keeps its own packed weights; the model may be dropped after."""

    def __init__(self, model: PreTrainedModel, max_context: int, device: torch.device) -> None:
        """Packs the weights of a model on the CPU and puts them on `device`."""
        config, base = model.config, model.base_model
        attention = base.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        # Copies: a view would keep the whole checkpoint mapped in memory.
        embedding = base.embed_tokens.weight.detach()
        self._embedding = embedding.to(device, copy=True)
        # Made on the CPU for every device: the same bits everywhere.
        tables = _rotary_tables(base.rotary_emb, max_context, embedding)
        self._cos, self._sin = (table.to(device) for table in tables)
        self._scale: float = attention.scaling
        self._layers = [_fuse_layer(layer, config, device) for layer in base.layers]
        self._norm = _Norm(device, base.norm)
        self._head = Linear(model.get_output_embeddings().weight.detach().to(device))

    def run(
        self, context: StepContext, logit_rows: torch.Tensor, aux_layers: frozenset[int]
    ) -> DecoderOutput:
        """Decoder.run."""
        layout = context.layout
        x = functional.embedding(layout.ids, self._embedding)
        num_rows, heads, kv_heads = len(x), self._num_heads, self._num_kv_heads
        cos, sin = self._tables(layout.positions)
        # Everything that is viewed or written per layer is made here, once: [R, A + 2H, D].
        shape = (num_rows, heads + 2 * kv_heads, self._head_dim)
        turned = x.new_empty(shape)
        low, high = _halves(turned)
        kv = turned[:, heads:].view(num_rows, 2, kv_heads, -1).permute(1, 2, 0, 3)
        mixed = x.new_zeros(num_rows, heads, self._head_dim)
        flat = mixed.view(num_rows, -1)
        attention = context.attention(heads)
        attention.bind(turned[:, :heads], mixed)
        wide, normed = torch.empty_like(x, dtype=torch.float32), torch.empty_like(x)
        states: dict[int, torch.Tensor] = {}
        is_turned = all(
            one.turns(num_rows) for layer in self._layers for one in (layer.output, layer.mlp)
        )
        stream: Stream = TurnedStream(x) if is_turned else RowStream(x)
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.before_attention(stream.rows(), wide, normed)).view(shape)
            if layer.qk_norm is not None:
                qk = qkv[:, : heads + kv_heads]
                layer.qk_norm(qk, out=qk)
            qkv_low, qkv_high = _halves(qkv)
            torch.mul(qkv, cos, out=turned)
            low.addcmul_(qkv_high, sin, value=-1)
            high.addcmul_(qkv_low, sin)
            context.write(number, kv)
            attention.attend(number, layer.scoring)
            stream.add(layer.output, flat)
            stream.add(layer.mlp, layer.before_mlp(stream.rows(), wide, normed))
            if number in aux_layers:
                states[number] = stream.keep()
        x = stream.keep()
        if FINAL_LAYER in aux_layers:
            states[FINAL_LAYER] = self._norm(x)
        return DecoderOutput(self._head(self._norm(x.index_select(0, logit_rows))), states)

    def matrices(self) -> list[Matrix]:
        """Decoder.matrices."""
        found = [self._head.matrices[0]]
        for layer in self._layers:
            found += [layer.qkv.matrices[0], layer.output.matrices[1], layer.mlp.matrix]
        return found

    def _tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos [R, A + 2H, D] and sin [R, A + 2H, D / 2] of every head.

        The queries' share carries the scale; the values' is 1 and 0, so that one pass turns
        queries and keys and copies values.
        """
        heads, keys = self._num_heads, self._num_heads + self._num_kv_heads
        shape = (len(positions), keys + self._num_kv_heads)
        cos = self._cos.new_ones(*shape, self._head_dim)
        sin = self._sin.new_zeros(*shape, self._head_dim // 2)
        for table, full in ((self._cos, cos), (self._sin, sin)):
            own = table.index_select(0, positions)[:, None]
            full[:, :heads] = own * self._scale
            full[:, heads:keys] = own
        return cos, sin


def _halves(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, n, D] -> views of the first and the second half of D."""
    low, high = heads.view(*heads.shape[:2], 2, -1).unbind(2)
    return low, high


def _fuse_layer(layer: _LayerModule, config: PreTrainedConfig, device: torch.device) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention, "sliding_window", None)
    if config.model_type == "mistral":
        window = config.sliding_window
    qk_norm = None
    if hasattr(attention, "q_norm") and hasattr(attention, "k_norm"):
        heads = (config.num_attention_heads, config.num_key_value_heads)
        qk_norm = _Norm(device, attention.q_norm, attention.k_norm, repeats=heads)
    return _Layer(
        before_attention=_Norm(device, layer.input_layernorm),
        qkv=_join(device, attention.q_proj, attention.k_proj, attention.v_proj),
        qk_norm=qk_norm,
        output=_join(device, attention.o_proj),
        before_mlp=_Norm(device, layer.post_attention_layernorm),
        mlp=GatedMlp(_join(device, mlp.gate_proj, mlp.up_proj), _join(device, mlp.down_proj)),
        scoring=Scoring(window=window),
    )


def _join(device: torch.device, *linears: nn.Linear) -> Linear:
    """Several matrices that read the same rows, as one."""
    weight = torch.cat([linear.weight.detach() for linear in linears]).to(device)
    if all(linear.bias is None for linear in linears):
        return Linear(weight)
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return Linear(weight, torch.cat([bias.detach() for bias in biases]).to(device))


def _rotary_tables(
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]], max_context: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos [max_context, D] and sin [max_context, D / 2] as the model's own module makes them."""
    cos, sin = rotary(like, torch.arange(max_context)[None])
    half = cos.shape[-1] // 2
    return cos[0], sin[0, :, :half].contiguous()
