"""Small heads behind a block's hidden states: serial (Markov), path selector, confidence.

Knows no session and no tree: values in, values out. Equations: `reference/dflash.md` 4.1, 4.2.

Shapes: F rows (one per path), C hidden size, V vocabulary, W draft vocabulary, R rank,
M candidates.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafter_service.dflash.config import ConfidenceInput, Markov, MarkovKind, Selector


class MarkovHead(nn.Module):
    """DSpark's serial head: a bias over the draft vocabulary from the token before (target id)."""

    def __init__(
        self, shape: Markov, vocab_size: int, draft_vocab_size: int, hidden_size: int
    ) -> None:
        super().__init__()
        self.kind = shape.kind
        rank = shape.rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.gate_proj: nn.Linear | None = None
        self.joint_proj: nn.Linear | None = None
        if shape.kind is MarkovKind.GATED:
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if shape.kind is MarkovKind.RNN:
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, num_paths: int) -> Tensor:
        """State [F, R] at a block's first slot; only the rnn form changes it."""
        return self.markov_w2.weight.new_zeros(num_paths, self.markov_w2.in_features)

    def token_rows(self, token_ids_F: Tensor) -> Tensor:
        """W1 of tokens [F, R]."""
        rows_FR: Tensor = self.markov_w1(token_ids_F)
        return rows_FR

    def step(
        self, token_ids_F: Tensor, hidden_FC: Tensor, state_FR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(bias [F, W] float32, next state [F, R]) for a slot behind `token_ids_F`."""
        token_FR = self.token_rows(token_ids_F)
        factor_FR = token_FR
        if self.gate_proj is not None:
            gate_FR = torch.sigmoid(self.gate_proj(torch.cat([hidden_FC, token_FR], dim=-1)))
            factor_FR = gate_FR * token_FR
        if self.joint_proj is not None:
            joint = self.joint_proj(torch.cat([state_FR, token_FR, hidden_FC], dim=-1))
            gate_FR, candidate_FR, output_FR = joint.chunk(3, dim=-1)
            gate_FR = torch.sigmoid(gate_FR)
            state_FR = gate_FR * state_FR + (1.0 - gate_FR) * torch.tanh(candidate_FR)
            factor_FR = torch.tanh(output_FR)
        bias_FW: Tensor = self.markov_w2(factor_FR).to(torch.float32)
        return bias_FW, state_FR


class ConfidenceHead(nn.Module):
    """DSpark's estimate that a slot's draft is accepted, before the sigmoid."""

    def __init__(self, sees: ConfidenceInput, hidden_size: int, markov: Markov | None) -> None:
        super().__init__()
        self.sees = sees
        rank = markov.rank if markov and sees is ConfidenceInput.HIDDEN_AND_TOKEN else 0
        self.proj = nn.Linear(hidden_size + rank, 1)

    def logits(self, hidden_FC: Tensor, token_rows_FR: Tensor | None) -> Tensor:
        """[F] float32. token_rows_FR: the serial head's rows of the tokens before."""
        given = hidden_FC
        if self.sees is ConfidenceInput.HIDDEN_AND_TOKEN:
            assert token_rows_FR is not None  # BlockConfig has checked that there is a serial head
            given = torch.cat([hidden_FC, token_rows_FR], dim=-1)
        scores_F1: Tensor = self.proj(given)
        return scores_F1[:, 0].to(torch.float32)


class PathSelector(nn.Module):
    """DFlash 2's score of following token a by token b: unary(b) + <A[a] * P h, S[b]>."""

    def __init__(self, shape: Selector, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.num_candidates = min(shape.num_candidates, vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, shape.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, shape.rank))
        self.hidden_projection = nn.Linear(hidden_size, shape.rank, bias=False)

    def scores(
        self, unary_M: Tensor, candidates_M: Tensor, token_ids_F: Tensor, hidden_C: Tensor
    ) -> Tensor:
        """[F, M] float32 of one slot's candidates behind each of `token_ids_F`."""
        before_FR = functional.embedding(token_ids_F, self.predecessor_codebook)
        after_MR = functional.embedding(candidates_M, self.successor_codebook)
        mixed_FR = before_FR * self.hidden_projection(hidden_C)
        pair_FM: Tensor = (mixed_FR @ after_MR.T).to(torch.float32)
        return unary_M + pair_FM
