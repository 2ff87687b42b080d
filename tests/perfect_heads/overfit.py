"""Overfits one small head of each EAGLE kind on a tiny target's own greedy texts, for good.

`python -m tests.perfect_heads.overfit` writes the folders beside this file (about a minute on one
core). Tests run them: a head that knows the texts by heart must be accepted whole, so that all
that happens inside an accepted run happens. Nothing here is random but for fixed seeds.

A row t of step j pairs what the head fed back j times from feature t with token t + 1 + j, at
position t + j. It sees step-0 rows up to t and its own later rows: the draft from every prefix at
once, as serving will compute it.

Shapes: T rows of a text, A raw feature width, C hidden size, Q query heads, K key-value heads,
D head_dim.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from drafter_service.checkpoint.writer import write_eagle3
from drafter_service.eagle.config import EagleConfig
from drafter_service.eagle.head import EagleHead
from drafter_service.eagle3.config import Eagle3Config, LayerFacts, Rope
from drafter_service.eagle3.head import Eagle3Head
from protos.digest import directory_digest
from tests.tiny import tiny_llama_dir

HERE = Path(__file__).resolve().parent
NUM_STEPS = 6
"""Drafts are learnt up to this depth."""
NUM_OUTPUT = 60
PROMPTS = tuple(tuple(3 + (17 * n + 5 * j + j * j) % 250 for j in range(12)) for n in range(3))
AUX_LAYERS = (0, 1)
HIDDEN, VOCAB, DRAFT_VOCAB = 64, 384, 160
LAYER = LayerFacts(HIDDEN, 4, 2, 16, 96, 1e-5)


def target_dir(path: Path) -> Path:
    """The target that the heads know."""
    return tiny_llama_dir(path, seed=3, vocab=VOCAB, hidden=HIDDEN, layers=3)


def greedy_texts(directory: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Per prompt: ids [T + 1], aux states [T, A] and final states [T, C]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    texts: list[Tensor] = []
    aux: list[Tensor] = []
    final: list[Tensor] = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            for _ in range(NUM_OUTPUT + NUM_STEPS):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
            states = model(ids, output_hidden_states=True).hidden_states
            texts.append(ids[0])
            aux.append(torch.cat([states[layer + 1][0] for layer in AUX_LAYERS], dim=-1))
            final.append(states[-1][0])
    return texts, aux, final


class Unroll:
    """Attention of all steps of one text. `attend` is given to the head, step by step."""

    def __init__(self, num_layers: int) -> None:
        self._steps: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def attend(self, layer: int, q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, Q * D]: causal over step 0, and each row's own rows of later steps."""
        share = q_TQD.shape[1] // k_TKD.shape[1]
        steps = self._steps[layer]
        steps.append((k_TKD.repeat_interleave(share, 1), v_TKD.repeat_interleave(share, 1)))
        scale = q_TQD.shape[-1] ** -0.5
        first_k, first_v = steps[0]
        rows = torch.arange(len(q_TQD))
        scores = torch.einsum("tqd,sqd->tqs", q_TQD, first_k) * scale
        scores = scores.masked_fill((rows[None] > rows[:, None])[:, None], float("-inf"))
        own = [(q_TQD * k).sum(-1, keepdim=True) * scale for k, _ in steps[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        mixed = torch.einsum("tqs,sqd->tqd", weights[..., : len(rows)], first_v)
        for number, (_, v) in enumerate(steps[1:]):
            mixed = mixed + weights[..., len(rows) + number, None] * v
        return mixed.flatten(1)


def step_logits(head: nn.Module, ids: Tensor, features: Tensor) -> list[Tensor]:
    """Logits [T, W] of every step of one text."""
    num_rows = len(ids) - 1 - NUM_STEPS
    mask = getattr(head.config, "mask_token_id", None)
    unroll = Unroll(head.config.num_layers)
    g = head.fuse(features[:num_rows])
    found = []
    for step in range(NUM_STEPS):
        tokens = ids[1 + step : 1 + step + num_rows]
        if step and mask is not None:
            tokens, g = torch.full_like(tokens, mask), head.masked().expand(num_rows, -1)
        y = head.step(tokens, g, torch.arange(num_rows) + step, unroll.attend)
        found.append(head.logits(y))
        g = head.feedback(y)
    return found


def targets(head: nn.Module, ids: Tensor, step: int) -> Tensor:
    """Draft ids [T] that step `step` must predict."""
    num_rows = len(ids) - 1 - NUM_STEPS
    index = torch.full((VOCAB,), -1)
    index[head.target_ids] = torch.arange(len(head.target_ids))
    return index[ids[2 + step : 2 + step + num_rows]]


def overfit(head: nn.Module, texts: list[Tensor], features: list[Tensor]) -> int:
    """Train until the weights, rounded to bf16, predict everything; returns the updates made."""
    learnt = [
        p for name, p in head.named_parameters() if name.split(".")[0] not in FROZEN[type(head)]
    ]
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    for parameter in learnt:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(learnt, lr=4e-3, weight_decay=0.0)
    for update in range(1, 3001):
        for group in optimiser.param_groups:
            group["lr"] = 4e-3 * min(1.0, update / 50) * 0.5 ** (update / 600)
        loss = torch.zeros(())
        for ids, rows in zip(texts, features, strict=True):
            for step, logits in enumerate(step_logits(head, ids, rows)):
                loss = loss + functional.cross_entropy(logits, targets(head, ids, step))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        optimiser.step()
        if update % 25 == 0 and loss.item() < 0.3:
            with torch.no_grad():
                for parameter in learnt:
                    parameter.copy_(parameter.to(torch.bfloat16))
                if margin(head, texts, features) > 1.0:
                    return update
    raise RuntimeError(f"{type(head).__name__} did not learn its texts: loss {loss.item():.3f}")


@torch.no_grad()
def margin(head: nn.Module, texts: list[Tensor], features: list[Tensor]) -> float:
    """By how much the right logit leads at worst; negative when one prediction is wrong."""
    least = float("inf")
    for ids, rows in zip(texts, features, strict=True):
        for step, logits in enumerate(step_logits(head, ids, rows)):
            right = targets(head, ids, step)[:, None]
            others = logits.scatter(1, right, float("-inf")).amax(1)
            least = min(least, float((logits.gather(1, right)[:, 0] - others).min()))
    return least


FROZEN = {Eagle3Head: {"embed_tokens"}, EagleHead: {"embed_tokens", "lm_head"}}


def eagle3_head(embedding: Tensor, texts: list[Tensor], mask: int | None) -> Eagle3Head:
    torch.manual_seed(1)
    config = Eagle3Config(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        aux_layers=AUX_LAYERS,
        num_heads=LAYER.num_heads,
        num_kv_heads=LAYER.num_kv_heads,
        head_dim=LAYER.head_dim,
        intermediate_size=LAYER.intermediate_size,
        rope=Rope(10000.0),
        norm_eps=LAYER.norm_eps,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        fc_norm=True,
        norm_feedback=mask is None,
        mask_token_id=mask,
    )
    said = torch.cat(texts).unique()
    others = torch.tensor([i for i in range(VOCAB) if i not in set(said.tolist())])
    kept = torch.cat([said, others])[:DRAFT_VOCAB].sort().values
    assert len(said) <= DRAFT_VOCAB, len(said)
    head = Eagle3Head(config, kept)
    head.embed_tokens.weight.data = embedding.clone()
    return head


def eagle_head(embedding: Tensor, lm_head: Tensor) -> EagleHead:
    torch.manual_seed(2)
    head = EagleHead(EagleConfig(LAYER, Rope(10000.0), VOCAB))
    head.embed_tokens.weight.data = embedding.clone()
    head.lm_head.weight.data = lm_head.clone()
    return head


def write_eagle(directory: Path, head: EagleHead) -> None:
    """In the original project's layout."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, parameter in head.named_parameters():
        if name.split(".")[0] in FROZEN[EagleHead]:
            continue
        inner = name.removeprefix("layer.")
        if "_proj" in inner:
            inner = f"{'self_attn' if inner[0] in 'qkvo' else 'mlp'}.{inner}"
        public = name if name.startswith("fc.") else f"layers.0.{inner}"
        tensors[public] = parameter.detach().to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": LAYER.head_dim,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": LAYER.intermediate_size,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": LAYER.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": LAYER.num_kv_heads,
        "rms_norm_eps": LAYER.norm_eps,
        "vocab_size": VOCAB,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = target_dir(Path(folder) / "target")
        texts, aux, final = greedy_texts(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        embedding = model.get_input_embeddings().weight.detach()
        lm_head = model.get_output_embeddings().weight.detach()
        digest = directory_digest(directory)
    for name, mask in (("eagle3", None), ("peagle", 1)):
        head = eagle3_head(embedding, texts, mask)
        overfit(head, texts, aux)
        write_eagle3(HERE / name, head, "tests.tiny", torch.bfloat16)
    head = eagle_head(embedding, lm_head)
    overfit(head, texts, final)
    write_eagle(HERE / "eagle", head)
    (HERE / "target_digest.txt").write_text(digest + "\n")


if __name__ == "__main__":
    main()
