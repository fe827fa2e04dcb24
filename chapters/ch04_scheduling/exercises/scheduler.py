# Exercise 4.1: what can never fit (Scheduler.add).
# Exercise 4.2: make room (Scheduler._make_room, Scheduler.preempt).
# Exercise 4.3: admission under three budgets (Scheduler._admit).
# Test with: python -m pytest tests/ch04_scheduling --impl work

"""Scheduler: which sequences run in the next step, under three budgets."""

from collections import deque
from dataclasses import dataclass, field

from minivllm.errors import RequestError
from minivllm.memory.kv_cache_manager import KVCacheManager, OutOfSlots, SlotCopy
from minivllm.sampling_params import is_int
from minivllm.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class ScheduledStep:
    """What one step does.

    sequences: those that run, each with its num_scheduled set, in the order of the batch.
    copies: K and V to move before the forward pass, in order.
    preempted: those that lost their cache in this step.
    """

    sequences: list[Sequence] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching: requests join and leave between any two steps.

    Three budgets bound a step:

    max_tokens_per_step: token budget, the tokens that one forward pass may compute.
    max_running: sequence budget, the sequences that may hold cache at once.
    kv_cache: cache budget, asked before anything is promised.

    One rule covers prefill, decode, a prompt in several chunks and the recomputation after a
    preemption: a step computes min(what is left of the sequence, what is left of the token
    budget) tokens, and a token is sampled only when the last known one is in.
    """

    def __init__(
        self, kv_cache: KVCacheManager, max_tokens_per_step: int = 2048, max_running: int = 256
    ) -> None:
        for name, value in (
            ("max_tokens_per_step", max_tokens_per_step),
            ("max_running", max_running),
        ):
            if not is_int(value) or value < 1:
                raise RequestError(f"{name} is {value!r}: it must be 1 or more, a whole number")
        self.kv_cache = kv_cache
        self.max_tokens_per_step = max_tokens_per_step
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first

    def add(self, seq: Sequence) -> None:
        """Queues seq. Raises RequestError when even an empty pool could not hold it to its end."""
        # The last token is never read by a forward pass, so its K and V are never stored.
        raise NotImplementedError("exercise 4.1: Scheduler.add")

    def schedule(self) -> ScheduledStep:
        """Chooses what runs next; sets num_scheduled and takes the cache for it.

        Raises OutOfSlots when the head of the queue cannot be admitted though nobody else holds
        memory: a fault of the KV cache manager, since add() was told that it fits.
        """
        step = ScheduledStep()
        tokens_left = self._continue_running(step, self.max_tokens_per_step)
        # Whoever was preempted waits at the front of the queue. Admitting in the same step would
        # take the memory that was just made free, and the next step would preempt again.
        if not step.preempted:
            self._admit(step, tokens_left)
            if self.waiting and not self.running:
                raise OutOfSlots(f"nobody runs and {self.waiting[0].request_id} finds no room")
        return step

    def _continue_running(self, step: ScheduledStep, tokens_left: int) -> int:
        """Gives every running sequence its next tokens, oldest first."""
        for seq in self.running:  # making room takes the last ones away, never an earlier one
            if tokens_left == 0:
                break
            num_tokens = min(seq.num_remaining, tokens_left)
            if not self._make_room(step, seq, seq.num_computed + num_tokens):
                break
            self._run(step, seq, num_tokens)
            tokens_left -= num_tokens
        return tokens_left

    def _make_room(self, step: ScheduledStep, seq: Sequence, num_tokens: int) -> bool:
        """Preempts the newest sequences until num_tokens of seq fit; False if seq itself went.

        The newest has the least to lose, and the oldest always gets on, so each request ends.
        """
        raise NotImplementedError("exercise 4.2: Scheduler._make_room")

    def _admit(self, step: ScheduledStep, tokens_left: int) -> None:
        """Starts waiting sequences, first come first served, each with room for all its tokens."""
        raise NotImplementedError("exercise 4.3: Scheduler._admit")

    def _run(self, step: ScheduledStep, seq: Sequence, num_tokens: int) -> None:
        seq.num_scheduled = num_tokens
        step.sequences.append(seq)

    def preempt(self, seq: Sequence) -> None:
        """Takes back all cache of a running sequence and puts it first in the queue.

        Its tokens stay: when it is admitted again, they are computed again.
        """
        raise NotImplementedError("exercise 4.2: Scheduler.preempt")

    def remove(self, seq: Sequence) -> None:
        """Takes a waiting or running sequence out for good and frees what it holds."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.kv_cache.free(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
