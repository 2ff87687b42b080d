"""A tiny random EAGLE-3 drafter, and the plain way to draft with one: everything recomputed."""

import torch

from drafter_service.eagle.config import EagleConfig
from drafter_service.eagle.drafter import Eagle
from drafter_service.eagle.head import EagleHead
from drafter_service.eagle3.config import Eagle3Config, LayerFacts, Rope
from drafter_service.eagle3.drafter import Eagle3
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.ranking import NodeRows, rank_children
from drafter_service.service import SessionDrafter
from protos.exchange import Capabilities, PlanKind
from protos.features import FINAL_LAYER

VOCAB = 96
DRAFT_VOCAB = 48
HIDDEN = 32
AUX = (0, 1, 2)
RAW_WIDTH = HIDDEN * len(AUX)
LIMITS = {
    "max_context": 4096,
    "max_sessions": 32,
    "max_depth": 16,
    "max_width": 10,
    "max_nodes": 64,
}


def tiny_head(seed=0, dtype=torch.float32, **facts):
    config = Eagle3Config(
        **{
            "hidden_size": HIDDEN,
            "target_hidden_size": HIDDEN,
            "aux_layers": AUX,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "rope": Rope(theta=10000.0),
            "norm_eps": 1e-5,
            "vocab_size": VOCAB,
            "draft_vocab_size": DRAFT_VOCAB,
            **facts,
        }
    )
    step = config.vocab_size // config.draft_vocab_size
    head = Eagle3Head(config, torch.arange(0, VOCAB, step)[: config.draft_vocab_size])
    return fill(head, seed).to(dtype)


def tiny_eagle_head(seed=0, dtype=torch.float32, **facts):
    layer = LayerFacts(HIDDEN, 4, 2, 8, 64, 1e-5)
    config = EagleConfig(**{"layer": layer, "rope": Rope(10000.0), "vocab_size": VOCAB} | facts)
    return fill(EagleHead(config), seed).to(dtype)


def fill(head, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.2
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    return head


def eagle3_capabilities(head, incarnation=7, **limits):
    config = head.config
    return Capabilities(
        kind="eagle3",
        name="eagle3",
        incarnation=incarnation,
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE, PlanKind.STATIC),
        aux_layers=config.aux_layers,
        raw_width=config.feature_size,
        fused_width=config.hidden_size,
        vocab_size=config.vocab_size,
        **LIMITS | limits,
    )


def eagle_drafter(head, cache_bytes=1 << 20, **limits):
    config = head.config
    capabilities = Capabilities(
        kind="eagle",
        name="eagle",
        incarnation=7,
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE, PlanKind.STATIC),
        aux_layers=(FINAL_LAYER,),
        raw_width=config.hidden_size,
        vocab_size=config.vocab_size,
        **LIMITS | limits,
    )
    return SessionDrafter(capabilities, Eagle(head, cache_bytes, 4200), idle_s=60)


def eagle3_drafter(head, cache_bytes=1 << 20, **limits):
    return SessionDrafter(
        eagle3_capabilities(head, **limits), Eagle3(head, cache_bytes, 4200), idle_s=60
    )


def features_of(num_rows, seed=0, width=RAW_WIDTH, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(num_rows, width, generator=generator).to(dtype)


def tokens_of(count, seed=0, vocab=VOCAB):
    generator = torch.Generator().manual_seed(2000 + seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


class PlainDraft:
    """Drafts by running the whole path of every node through the head again, without a cache."""

    def __init__(self, head, tokens, features, params):
        self.head = head
        self.tokens = tokens
        self.params = params
        self.g = head.fuse(features)
        self.windows = getattr(head.config, "windows", (None,) * head.config.num_layers)

    def children(self, path, count):
        """Ranked (target id, log-score) of what may follow `path`, a list of drafted tokens."""
        ids = [*self.tokens[1:], *path]
        g = list(self.g)
        y = None
        while True:
            y = self._forward(ids[: len(g)], torch.stack(g))
            if len(g) == len(ids):
                break
            g.append(self.head.feedback(y[-1:])[0])
        position = len(self.tokens) + len(path)
        group = NodeRows(1, self.params, position)
        ranked = rank_children(self.head.logits(y[-1:]), [group], self.head.target_ids, count)
        return list(zip(ranked.ids[0].tolist(), ranked.scores[0].tolist(), strict=True))

    def _forward(self, ids, g):
        def attend(layer, q, k, v):
            heads = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(heads, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            rows = torch.arange(len(q))
            hidden = rows[:, None] < rows
            if self.windows[layer]:
                hidden |= (
                    rows.clamp_max(len(self.tokens) - 2)[:, None] - rows >= self.windows[layer]
                )
            mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            return torch.einsum("hqk,khd->qhd", mixed, v).flatten(1)

        return self.head.step(torch.tensor(ids), g, torch.arange(len(ids)), attend)

    def tree(self, depth, width, num_nodes):
        """[(token, parent, score)] of EAGLE-2's dynamic tree, in pool order."""
        pool = []
        frontier = [(-1, [], 0.0)]
        for _ in range(depth):
            level = []
            for parent, path, base in frontier:
                for token, score in self.children(path, width):
                    level.append((len(pool), parent, [*path, token], base + score))
                    pool.append((token, parent, base + score))
            best = sorted(level, key=lambda entry: (-entry[3], entry[0]))[:width]
            frontier = [(index, path, score) for index, _, path, score in best]
        kept = sorted(range(len(pool)), key=lambda index: (-pool[index][2], index))[:num_nodes]
        number = {-1: 0} | {index: place for place, index in enumerate(sorted(kept), 1)}
        return [(pool[index][0], number[pool[index][1]], pool[index][2]) for index in sorted(kept)]
