"""Sampler: from logits to the next token of each sequence."""

import torch
from torch import Tensor

from minivllm.sequence import Sequence

# Dividing by less than this overflows to a one-hot distribution anyway (vLLM uses the same limit).
GREEDY_BELOW = 1e-5


def keep_top_k(sorted_logits: Tensor, top_k: Tensor) -> Tensor:
    """Keeps the top_k largest logits of each row and sets the others to -inf.

    sorted_logits: [num_rows, vocab_size], each row from largest to smallest.
    top_k: [num_rows], whole numbers of any dtype; 0 and what exceeds vocab_size keep the whole row.
    """
    vocab_size = sorted_logits.shape[-1]
    ranks = torch.arange(vocab_size, device=sorted_logits.device)
    limit = torch.where(top_k == 0, vocab_size, top_k)
    return sorted_logits.masked_fill(ranks >= limit[:, None], -torch.inf)


def keep_top_p(sorted_logits: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the smallest set of largest logits whose probability reaches top_p.

    sorted_logits: [num_rows, vocab_size], each row from largest to smallest; -inf allowed.
    top_p: [num_rows], in (0, 1]; 1 keeps the whole row. The largest logit always stays.
    """
    probs = sorted_logits.softmax(dim=-1)
    probs_before = probs.cumsum(dim=-1) - probs
    outside = (probs_before >= top_p[:, None]) & (top_p < 1)[:, None]  # 1 is exact, sums are not
    return sorted_logits.masked_fill(outside, -torch.inf)


def draw(sorted_logits: Tensor, uniform: Tensor) -> Tensor:
    """Draws one rank per row, [num_rows], by inverse CDF from uniform numbers in [0, 1)."""
    probs = sorted_logits.softmax(dim=-1)
    cdf = probs.cumsum(dim=-1)
    ranks = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
    # uniform * cdf[-1] can round up to cdf[-1] itself, which lies beyond the last token kept.
    return torch.minimum(ranks, (probs > 0).sum(dim=-1, keepdim=True) - 1).squeeze(-1)


class Sampler:
    """Chooses tokens for a whole batch; each row by its own sequence's params and rng."""

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """One token id per sequence.

        logits: [num_seqs, vocab_size], rows in the order of sequences; any float dtype; -inf
            marks a token that must not be drawn.
        """
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        rows = [i for i, seq in enumerate(sequences) if seq.params.temperature >= GREEDY_BELOW]
        if rows:
            for row, token in zip(
                rows, self._sample_random(logits[rows], [sequences[i] for i in rows]), strict=True
            ):
                tokens[row] = token
        return tokens

    def _sample_random(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        params = [seq.params for seq in sequences]

        def column(values: list) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=logits.device)

        # float64: a top_p of 1e-50 or a temperature of 1e300 is legal and would be 0 or inf.
        scaled = logits.double() / column([p.temperature for p in params])[:, None]
        sorted_logits, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
        kept = keep_top_k(sorted_logits, column([p.top_k for p in params]))
        kept = keep_top_p(kept, column([p.top_p for p in params]))
        ranks = draw(kept, column([seq.rng.random() for seq in sequences]))
        return token_ids.gather(-1, ranks[:, None]).squeeze(-1).tolist()
