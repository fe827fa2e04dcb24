# Exercise 1.3: the heartbeat (Engine.step).
# Test with: python -m pytest tests/ch01_past_key_values --impl work

"""Engine: add_request, step, abort. Everything happens in step()."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

from minivllm.errors import RequestError
from minivllm.runners.runner import Runner
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import ScheduledStep, Scheduler
from minivllm.sequence import Sequence, StopReason

if TYPE_CHECKING:
    from minivllm.detokenizer import Detokenizer
    from minivllm.sampler import Sampler


@dataclass(slots=True)
class Increment:
    """What one step added to one request: the unit that a service layer would send.

    text can be empty (an unfinished character, a possible stop string) and can hold more than
    this token. stop_reason is set on the request's last increment and None before.
    """

    request_id: str
    token_id: int
    text: str
    stop_reason: StopReason | None


class Engine:
    """Turns queued requests into tokens, one step for all of them at a time.

    Not for several threads at once, and not to be called from its own on_step.

    runner, scheduler, sampler: how a step is computed, planned and turned into tokens.
    make_detokenizer: called with a request's stop strings; None gives increments without text.
    eos_token_ids: tokens that end an answer.
    max_model_len: most tokens (prompt + max_tokens) that the model can handle; None: no limit.
    vocab_size: token ids must be below it; None: not checked.
    on_step: called after the forward pass and before finished requests free their memory, so
        that what it measures includes them.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        sampler: Sampler,
        *,
        make_detokenizer: Callable[[tuple[str, ...]], Detokenizer] | None = None,
        eos_token_ids: Iterable[int] = (),
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        on_step: Callable[[ScheduledStep], None] | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.sampler = sampler
        self.make_detokenizer = make_detokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.on_step = on_step
        self._live: dict[str, Sequence] = {}
        self._detokenizers: dict[str, Detokenizer] = {}
        self._num_added = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        request_id: str | None = None,
    ) -> str:
        """Queues a request for the next step and returns its id.

        Raises RequestError, with nothing queued, when the request cannot be served.
        """
        if request_id is None:
            request_id = self._next_request_id()
        elif request_id in self._live:
            raise RequestError(f"request id {request_id!r} is in use: wait for its end or abort it")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r}: it must be a SamplingParams")
        seq = Sequence(request_id, self._checked_prompt(prompt_token_ids), params)
        self._check_length(seq)
        detokenizer = None if self.make_detokenizer is None else self.make_detokenizer(params.stop)
        self.scheduler.add(seq)
        self._live[request_id] = seq
        if detokenizer is not None:
            self._detokenizers[request_id] = detokenizer
        return request_id

    def step(self) -> list[Increment]:
        """Computes the scheduled tokens of everybody; one increment per sampled token.

        Returns an empty list when nothing runs or only parts of prompts were computed.
        """
        raise NotImplementedError("exercise 1.3: Engine.step")

    def abort(self, request_id: str) -> None:
        """Ends a live request at once and frees its memory; it sends no further increment."""
        if request_id not in self._live:
            raise RequestError(f"no live request has the id {request_id!r}: it ended or never was")
        self._finish(self._live[request_id], StopReason.ABORTED)

    def _compute(self, step: ScheduledStep, sampled: list[Sequence]) -> list[int]:
        try:
            logits = self.runner.run(step)
            tokens = self.sampler.sample(logits, sampled)
            if self.on_step is not None:
                self.on_step(step)
            return tokens
        except BaseException:
            # Out of memory, or an interrupt from the keyboard: nobody knows how much of the
            # step was stored, so its sequences start over from their tokens.
            for seq in reversed(step.sequences):
                self.scheduler.preempt(seq)
                self.runner.release(seq)
            raise

    def _append(self, seq: Sequence, token_id: int) -> Increment:
        seq.generated_token_ids.append(token_id)
        stop_reason = None
        if token_id in self.eos_token_ids and not seq.params.ignore_eos:
            stop_reason = StopReason.EOS
        elif len(seq.generated_token_ids) == seq.params.max_tokens:
            stop_reason = StopReason.MAX_TOKENS
        text = ""
        if detokenizer := self._detokenizers.get(seq.request_id):
            text = detokenizer.add(token_id)
            if stop_reason is not None:
                text += detokenizer.flush()
            if detokenizer.stopped:
                stop_reason = StopReason.STOP_STRING
        if stop_reason is not None:
            self._finish(seq, stop_reason)
        return Increment(seq.request_id, token_id, text, stop_reason)

    def _finish(self, seq: Sequence, stop_reason: StopReason) -> None:
        seq.stop_reason = stop_reason
        self.scheduler.remove(seq)
        self.runner.release(seq)
        del self._live[seq.request_id]
        self._detokenizers.pop(seq.request_id, None)

    def _next_request_id(self) -> str:
        while True:
            self._num_added += 1
            if str(self._num_added) not in self._live:
                return str(self._num_added)

    def _checked_prompt(self, prompt_token_ids: Iterable[int]) -> list[int]:
        try:
            token_ids = list(map(index, prompt_token_ids))
        except TypeError as error:
            raise RequestError(f"a prompt must be a list of token ids: {error}") from None
        if not token_ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        for token_id in (min(token_ids), max(token_ids)):
            if token_id < 0 or (self.vocab_size is not None and token_id >= self.vocab_size):
                raise RequestError(
                    f"token id {token_id} is not in the vocabulary: "
                    f"ids go from 0 to {(self.vocab_size or 0) - 1}"
                )
        return token_ids

    def _check_length(self, seq: Sequence) -> None:
        num_tokens = len(seq.prompt_token_ids) + seq.params.max_tokens
        if self.max_model_len is not None and num_tokens > self.max_model_len:
            raise RequestError(
                f"prompt {len(seq.prompt_token_ids)} + max_tokens {seq.params.max_tokens} = "
                f"{num_tokens} tokens, and the model handles {self.max_model_len}: "
                f"shorten the prompt or lower max_tokens"
            )
