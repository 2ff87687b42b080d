"""Paged tree attention by torch's FlexAttention: the backend for GPUs.

One fused kernel reads keys where they lie in the pool, block by block, and asks a rule which of
them a row sees (flex_layout.py). Soft-cap is a score rule; sinks are what the log of the softmax's
denominator allows to add afterwards. Knows no model. Not invariant: the kernel's reduction depends
on the blocks that a span happens to own, so `invariant: false` is reported with it.

Shapes: as in flex_layout.py; A query heads, H key-value heads, D head_dim, S slots.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch._dynamo import config as dynamo_config
from torch.fx.experimental import _config as fx_config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from verifier_service.model.flex_layout import BLOCK, NEVER, FlexGroup
from verifier_service.model.heads import AttentionShape, Scoring
from verifier_service.model.kv import Pool
from verifier_service.model.layout import StepLayout
from verifier_service.model.step_attention import PlainAttention, PoolAttention

Flex: TypeAlias = Callable[..., torch.Tensor | tuple[torch.Tensor, object]]
"""flex_attention, compiled or not."""
_PROGRAMS: Final = 64
"""Programs that sizes of 1, static sizes and forms of scoring may need, with room."""
_Rule: TypeAlias = Callable[..., torch.Tensor]


def compiled_flex() -> Flex:
    """FlexAttention as one kernel, for any size of a step. Compiles on its first calls.

    Changes how torch compiles in this process, where nothing else is compiled.
    """
    # Numbers of spans, rows and blocks that happen to be equal are not one and the same size: torch
    # would write a program for every such coincidence, and give up compiling after a few.
    fx_config.use_duck_shape = False
    dynamo_config.recompile_limit = _PROGRAMS
    flex: Flex = torch.compile(flex_attention, dynamic=True)
    return flex


class FlexBackend:
    """FlexAttention as a backend."""

    name = "flex"
    rules = None

    def __init__(self, flex: Flex) -> None:
        self._flex = flex

    def over(self, pool: Pool) -> PoolAttention:
        """Backend.over."""
        return PlainAttention(
            lambda layout, shape: FlexStepAttention(layout, shape, pool, self._flex)
        )


class FlexStepAttention:
    """StepAttention by FlexAttention."""

    def __init__(self, layout: StepLayout, shape: AttentionShape, pool: Pool, flex: Flex) -> None:
        self._parts = [
            _FlexGroupAttention(group, shape, pool, flex) for group in layout.flex_groups
        ]
        self._queries = self._out = torch.empty(0)

    def bind(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """StepAttention.bind."""
        self._queries, self._out = queries, out

    def attend(self, layer: int, scoring: Scoring) -> None:
        """StepAttention.attend."""
        for part in self._parts:
            part.attend(layer, scoring, self._queries, self._out)


class _FlexGroupAttention:
    """One group of spans, for all layers of one shape."""

    def __init__(self, group: FlexGroup, shape: AttentionShape, pool: Pool, flex: Flex) -> None:
        self._group = group
        self._pool = pool
        self._flex = flex
        self._split = (group.num_spans, group.num_rows, shape.num_heads, shape.head_dim)
        # What each span sees in each slot, [N, S]; spans may share slots.
        self._enter = self._by_slot(group.key_enter, NEVER)
        self._leave = self._by_slot(group.key_leave, 0)
        # Kernels want room for every block of the pool; it is never sent over.
        num_blocks = -(-pool.num_slots // BLOCK)
        self._blocks = group.blocks.new_zeros(*group.blocks.shape[:-1], num_blocks)
        self._blocks[..., : group.blocks.shape[-1]] = group.blocks[..., :num_blocks]
        self._masks: dict[int | None, BlockMask] = {}
        self._caps: dict[float, _Rule] = {}

    def attend(
        self, layer: int, scoring: Scoring, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Fill this group's rows of `out`."""
        group = self._group
        keys, values = self._pool.layers[layer][:, None].unbind(0)
        asked = queries.index_select(0, group.rows).view(self._split).transpose(1, 2)
        found = self._flex(
            asked,
            keys,
            values,
            score_mod=self._cap_rule(scoring.softcap),
            block_mask=self._mask(scoring.window),
            scale=1.0,
            enable_gqa=True,
            return_aux=None if scoring.sinks is None else AuxRequest(lse=True),
        )
        mixed = _with_sinks(found, scoring.sinks)
        flat = mixed.transpose(1, 2).reshape(-1, *self._split[2:])
        out.index_copy_(0, group.targets, flat.index_select(0, group.entries))

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            group = self._group
            self._masks[window] = BlockMask.from_kv_blocks(
                group.num_blocks,
                self._blocks,
                BLOCK_SIZE=BLOCK,
                mask_mod=self._rule(window),
                seq_lengths=(group.num_rows, self._pool.num_slots),
                compute_q_blocks=False,
            )
        return self._masks[window]

    def _by_slot(self, values: torch.Tensor, other: int) -> torch.Tensor:
        """Values of all keys [P] by span and slot, int32 [N, S]; `other` in slots of others."""
        group = self._group
        table = values.new_full((group.num_spans, self._pool.num_slots), other)
        return table.index_put_((group.owners, group.slots), values)

    def _rule(self, window: int | None) -> _Rule:
        """Whether row `q` of span `b` sees slot `kv`."""
        group, key_enter, key_leave = self._group, self._enter, self._leave
        enter = group.enter

        def sees(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            row = enter[b, q]
            return (key_enter[b, kv] <= row) & (row < key_leave[b, kv])

        if window is None:
            return sees
        key_positions, positions = self._by_slot(group.key_positions, 0), group.positions
        # A tensor: a number would be a program of its own for every window.
        reach = positions.new_full((), window)

        def sees_near(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            is_near = key_positions[b, kv] > positions[b, q] - reach
            return sees(b, h, q, kv) & is_near

        return sees_near

    def _cap_rule(self, softcap: float | None) -> _Rule | None:
        if softcap is None:
            return None
        if softcap not in self._caps:
            # A tensor: inductor has no symbol for a number that is no integer.
            cap = torch.full((), softcap, device=self._enter.device)

            def capped(
                score: torch.Tensor,
                b: torch.Tensor,
                h: torch.Tensor,
                q: torch.Tensor,
                kv: torch.Tensor,
            ) -> torch.Tensor:
                return cap * torch.tanh(score / cap)

            self._caps[softcap] = capped
        return self._caps[softcap]


def _with_sinks(
    found: torch.Tensor | tuple[torch.Tensor, object], sinks: torch.Tensor | None
) -> torch.Tensor:
    """[N, A, n, D]; a sink takes exp(sink) / (exp(lse) + exp(sink)) of the weight away."""
    if isinstance(found, torch.Tensor):
        return found
    mixed, aux = found
    lse = getattr(aux, "lse", None)
    assert sinks is not None
    assert isinstance(lse, torch.Tensor), "asked for with return_aux"
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return mixed * share[..., None].to(mixed.dtype)
