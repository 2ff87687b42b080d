"""Tiny random block drafters, and the plain way to draft with one: everything recomputed."""

import torch
from drafter_cases import opening, rows_of, work

from drafter_service.dflash.config import (
    BlockConfig,
    ConfidenceInput,
    Convolution,
    LayerMask,
    Layout,
    Markov,
    MarkovKind,
    Selector,
)
from drafter_service.dflash.drafter import BlockDrafter
from drafter_service.dflash.net import BlockNet
from drafter_service.dflash.reference import greedy_chain, run_block
from drafter_service.eagle3.config import Rope
from drafter_service.service import SessionDrafter
from protos.exchange import Capabilities, DraftStatus, Plan, PlanKind
from protos.features import DType, FeatureForm

VOCAB = 96
HIDDEN = 32
AUX = (0, 1, 2)
RAW_WIDTH = HIDDEN * len(AUX)
BLOCK = 6
DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16}
CHAIN = Plan(PlanKind.CHAIN, depth=5)
WINDOW = 7

SWITCHES = {
    "in place": {},
    "anchor first": {"layout": Layout.ANCHOR_FIRST},
    "causal": {"masks": (LayerMask(True), LayerMask(True))},
    "window": {"masks": (LayerMask(True, WINDOW), LayerMask())},
    "window to both sides": {"masks": (LayerMask(False, 3), LayerMask(False, WINDOW))},
    "window from the anchor": {"masks": (LayerMask(True, WINDOW, True), LayerMask())},
    "reduced vocabulary": {"draft_vocab_size": 48},
    "biases": {"attention_bias": True},
    "scaled": {"embedding_scale": 0.5, "output_multiplier": 1.7, "softcap": 3.0},
    "dflash2": {
        "convolution": Convolution(2, 8),
        "selector": Selector(8, 16),
        "masks": (LayerMask(False, WINDOW), LayerMask(False, WINDOW)),
    },
    "vanilla": {"layout": Layout.ANCHOR_FIRST, "markov": Markov(MarkovKind.VANILLA, 8)},
    "gated": {
        "layout": Layout.ANCHOR_FIRST,
        "markov": Markov(MarkovKind.GATED, 8),
        "confidence": ConfidenceInput.HIDDEN_AND_TOKEN,
    },
    "rnn": {
        "layout": Layout.ANCHOR_FIRST,
        "markov": Markov(MarkovKind.RNN, 8),
        "confidence": ConfidenceInput.HIDDEN,
    },
    "serial over a reduced vocabulary": {
        "layout": Layout.ANCHOR_FIRST,
        "markov": Markov(MarkovKind.VANILLA, 8),
        "draft_vocab_size": 48,
    },
}


def tiny_config(**facts) -> BlockConfig:
    return BlockConfig(
        **{
            "layout": Layout.IN_PLACE,
            "block_size": BLOCK,
            "mask_id": VOCAB - 1,
            "hidden_size": HIDDEN,
            "target_hidden_size": HIDDEN,
            "aux_layers": AUX,
            "masks": (LayerMask(), LayerMask()),
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "rope": Rope(theta=10000.0),
            "norm_eps": 1e-5,
            "vocab_size": VOCAB,
            "draft_vocab_size": VOCAB,
            **facts,
        }
    )


def tiny_net(seed=0, dtype=torch.float32, **facts) -> BlockNet:
    config = tiny_config(**facts)
    net = BlockNet(
        config, torch.arange(0, VOCAB, 2)[:48] if facts.get("draft_vocab_size") else None
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.2
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    return net.to(dtype)


def block_capabilities(net, incarnation=7, **limits) -> Capabilities:
    config = net.config
    return Capabilities(
        kind="dflash",
        name="dflash",
        incarnation=incarnation,
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE, PlanKind.BLOCK),
        aux_layers=config.aux_layers,
        raw_width=config.feature_size,
        fused_width=config.hidden_size,
        vocab_size=config.vocab_size,
        gives_q=True,
        **{
            "max_context": 4096,
            "max_sessions": 32,
            "max_depth": config.num_drafts,
            "max_width": 10,
            "max_nodes": 64,
            **limits,
        },
    )


def block_drafter(net, cache_bytes=1 << 20, **limits) -> SessionDrafter:
    return SessionDrafter(
        block_capabilities(net, **limits), BlockDrafter(net, cache_bytes, 4200), idle_s=60
    )


class Run:
    """One session fed with a text and its features, round by round."""

    def __init__(
        self, net, drafter, tokens, features, session_id=1, form=FeatureForm.RAW, **params
    ):
        self.net = net
        self.drafter = drafter
        self.tokens = tokens
        self.features = features
        self.session_id = session_id
        self.form = form
        self.params = params
        self.dtype = DTYPES[features.dtype]
        self.base_len = 0
        self.num_rows = 0

    def work(self, base_len, plan=CHAIN, num_rows=None):
        """A work up to `base_len` with rows up to `num_rows` (all there are by default)."""
        end = base_len - 1 if num_rows is None else num_rows
        rows = self.features[self.num_rows : end]
        if self.form is FeatureForm.FUSED and len(rows):
            rows = self.net.fuse(rows)
        config = self.net.config
        fused = self.form is FeatureForm.FUSED
        width = config.hidden_size if fused else config.feature_size
        made = work(
            self.drafter.capabilities.incarnation,
            self.tokens[self.base_len : base_len],
            session_id=self.session_id,
            token_start=self.base_len,
            plan=plan,
            open=None if self.base_len else opening(self.form, width, self.dtype, **self.params),
            rows=rows_of(rows, self.num_rows) if len(rows) else None,
        )
        self.base_len, self.num_rows = base_len, max(end, self.num_rows)
        return made

    def draft(self, base_len, plan=CHAIN, num_rows=None):
        result = self.drafter.handle([self.work(base_len, plan, num_rows)])[0]
        assert result.status is DraftStatus.OK, result.detail
        return result

    def plain(self, base_len, num_rows=None):
        """Greedy drafts by the plain definition."""
        rows = base_len - 1 if num_rows is None else num_rows
        anchor = self.tokens[base_len - 1]
        block = run_block(self.net, self.net.fuse(self.features[:rows]), anchor, base_len - 1)
        return greedy_chain(self.net, block, anchor)


def make_run(net, drafter=None, length=40, seed=0, dtype=torch.float32, **kwargs) -> Run:
    generator = torch.Generator().manual_seed(500 + seed)
    tokens = torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()
    features = torch.randn(length, RAW_WIDTH, generator=generator).to(dtype)
    return Run(net, drafter or block_drafter(net), tokens, features, **kwargs)
