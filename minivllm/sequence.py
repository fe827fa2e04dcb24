"""Sequence: one request on its way through the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.sampling_params import SamplingParams


class SequenceStatus(StrEnum):
    WAITING = "waiting"  # holds no cache: new, or preempted
    RUNNING = "running"  # holds cache for num_computed tokens
    FINISHED = "finished"  # gave everything back


class StopReason(StrEnum):
    EOS = "eos"  # the model ended its answer
    STOP_STRING = "stop_string"  # the text reached one of params.stop
    MAX_TOKENS = "max_tokens"  # params.max_tokens were generated
    ABORTED = "aborted"  # the caller took the request back


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one request and where its K and V live: references, never tensors.

    block_table: where the tokens' K and V are kept; written by the KV cache manager alone.
    num_computed: tokens whose K and V were in the cache before this step.
    num_scheduled: tokens that this step computes; 0 between steps.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    generated_token_ids: list[int] = field(default_factory=list)
    block_table: SequenceOf[int] = field(default_factory=list)
    num_computed: int = 0
    num_scheduled: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    stop_reason: StopReason | None = None
    # Each request draws from its own stream of random numbers, so that its tokens do not
    # depend on who else is in the batch.
    rng: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.params.seed)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and what was generated."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    @property
    def num_remaining(self) -> int:
        """Known tokens whose K and V are not in the cache yet."""
        return self.num_tokens - self.num_computed

    @property
    def context_len(self) -> int:
        """Tokens that attention sees at the end of this step."""
        return self.num_computed + self.num_scheduled

    @property
    def is_sampled(self) -> bool:
        """Whether this step computes the last known token, so that a next one can be drawn."""
        return self.num_scheduled > 0 and self.context_len == self.num_tokens

    def scheduled_token_ids(self) -> list[int]:
        """The tokens that this step computes, [num_scheduled]: prompt, generated, or both.

        A sequence that comes back after a preemption computes its generated tokens again, so
        the border between prompt and output means nothing here.
        """
        start, stop, prompt_len = self.num_computed, self.context_len, len(self.prompt_token_ids)
        return (
            self.prompt_token_ids[start:stop]
            + self.generated_token_ids[max(0, start - prompt_len) : max(0, stop - prompt_len)]
        )
