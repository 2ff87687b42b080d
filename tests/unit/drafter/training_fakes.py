"""A tiny head and tiny batches for the training tests."""

import numpy as np
import torch
from torch import Tensor

from drafter_service.eagle3.config import Eagle3Config, Rope
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.batches import Batch, RecordRows, load_batch
from drafter_service.training.features import Recorded
from drafter_service.training.records import Record

HIDDEN, VOCAB, DRAFT = 16, 40, 24
LAYERS = (1, 2)
NUM_TOP = 6


def tiny_config(**changes) -> Eagle3Config:
    facts = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "aux_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "rope": Rope(theta=10000.0),
        "norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_feedback": True,
    }
    return Eagle3Config(**{**facts, **changes})


def tiny_head(seed: int = 0, **changes) -> Eagle3Head:
    torch.manual_seed(seed)
    head = Eagle3Head(tiny_config(**changes), torch.arange(DRAFT) + 3)
    head.embed_tokens.weight.requires_grad_(False)
    return head


def draft_index_of(target_ids: Tensor, vocab: int) -> Tensor:
    """[vocab] draft id of every target id, -1 where there is none."""
    index = torch.full((vocab,), -1)
    index[target_ids] = torch.arange(len(target_ids))
    return index


class TinyStore:
    """Stands in for FeatureStore: the same random rows for a record every time."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def read(self, record_index: int, layers=None) -> Recorded:
        generator = torch.Generator().manual_seed(record_index)
        record = self._records[record_index]
        num = len(record.ids)
        aux = torch.randn(num, len(LAYERS) * HIDDEN, generator=generator)
        final = torch.randn(num, HIDDEN, generator=generator)
        # The target's best id is the next one of the record, so every answer is a greedy one.
        best = torch.from_numpy(np.roll(record.ids, -1))[record.prompt_len - 1 :, None]
        top_ids = ((best + torch.arange(NUM_TOP)) % VOCAB).to(torch.int32)
        logps = torch.linspace(0.0, -3.0, NUM_TOP).log_softmax(0).to(torch.float16)
        return Recorded(aux, final, top_ids, logps.expand(len(best), NUM_TOP))


def tiny_records(num_records: int) -> list[Record]:
    rng = np.random.default_rng(5)
    return [
        Record(index=i, ids=rng.integers(3, VOCAB, i % 7 + 12), prompt_len=i % 4 + 1)
        for i in range(num_records)
    ]


def tiny_batch(
    records: list[Record], indices: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Batch:
    return load_batch(records, indices, TinyStore(records), LAYERS, eos_id=2, dtype=dtype)


def one_record_batch(features: Tensor, ids: Tensor, final: Tensor, choices: Tensor) -> Batch:
    """A single record without prompt rows, row t = (features t, ids t)."""
    num, width = features.shape
    return Batch(
        records=(RecordRows(prompt=slice(0, 0), answer=slice(0, num)),),
        prompt_features=torch.zeros(0, width),
        prompt_ids=torch.zeros(0, dtype=torch.long),
        prompt_positions=torch.zeros(0, dtype=torch.long),
        features=features,
        ids=ids,
        positions=torch.arange(num),
        final=final,
        top_ids=choices[:, None],
        top_logps=torch.zeros(num, 1),
        choices=choices,
        last_row=torch.full((num,), num - 1),
        keys=torch.arange(num),
    )
