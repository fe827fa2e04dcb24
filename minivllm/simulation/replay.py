"""Replay: the engine with a scripted runner, and what it did with its memory."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from minivllm.engine import Engine
from minivllm.memory.kv_cache_manager import KVCacheManager
from minivllm.memory.usage import Shares, shares
from minivllm.runners.scripted import ScriptedRunner, ScriptedSampler
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import ScheduledStep, Scheduler
from minivllm.simulation.workloads import Request

SHARE_NAMES = tuple(field.name for field in fields(Shares))
UNLIMITED = 1 << 60


@dataclass(slots=True)
class ReplayResult:
    """What was measured in the window, which leaves out the start and the end of a replay.

    share: percent of the pool, by name, on average over the steps; they sum to 100.
    steps: steps of the window; generated, copied: tokens in it.
    """

    share: dict[str, float]
    mean_running: float
    finished_per_1000_steps: float
    preemptions_per_1000_steps: float
    tokens_copied_per_generated_token: float
    steps: int
    generated_tokens: int


def shares_now(scheduler: Scheduler) -> Shares:
    """The six shares within a step, in slots, for requests that run until their max_tokens."""
    kv_cache, waiting = scheduler.kv_cache, scheduler.waiting
    return shares(
        kv_cache.usage(),
        (
            (
                seq.context_len,
                kv_cache.slots_held(seq),
                len(seq.prompt_token_ids) + seq.params.max_tokens - 1,
            )
            for seq in scheduler.running
        ),
        kv_cache.slots_needed(waiting[0], waiting[0].num_tokens) if waiting else None,
    )


class Replay:
    """Runs requests through the real scheduler and engine, with nothing computed.

    kv_cache: the memory under test. on_step: called in each step with the scheduler, the step and
    its shares in slots, before finished requests free their memory; for charts.

    The window: from the step in which 5 % of the requests have been admitted until nobody waits
    and nobody is to come.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        kv_cache: KVCacheManager,
        *,
        max_running: int | None = None,
        max_tokens_per_step: int | None = None,
        on_step: Callable[[Scheduler, ScheduledStep, Shares], None] | None = None,
    ) -> None:
        self.requests = deque(requests)
        self.kv_cache = kv_cache
        self.scheduler = Scheduler(
            kv_cache, max_tokens_per_step or UNLIMITED, max_running or UNLIMITED
        )
        self.engine = Engine(
            ScriptedRunner(),
            self.scheduler,
            ScriptedSampler(),  # type: ignore[arg-type]
            on_step=self._measure,
        )
        self._on_step = on_step
        self._num_requests = len(self.requests)
        self._admitted: set[str] = set()
        self._sums = [0] * len(SHARE_NAMES)
        self._steps = self._running = self._finished = self._preempted = 0
        self._copied = self._generated = 0

    def run(self, progress: Callable[[int], None] | None = None) -> ReplayResult:
        """Replays everything; progress is told how many more requests ended."""
        step = 0
        while self.requests or self.engine.has_unfinished:
            while self.requests and self.requests[0].arrival <= step:
                request = self.requests.popleft()
                params = SamplingParams(max_tokens=request.output_len)
                self.engine.add_request(range(request.prompt_len), params)
            if not self.engine.has_unfinished:
                step = self._idle_until(step, self.requests[0].arrival)
                continue
            in_window = self._in_window
            increments = self.engine.step()
            ended = sum(increment.stop_reason is not None for increment in increments)
            if in_window:
                self._generated += len(increments)
                self._finished += ended
            if progress is not None and ended:
                progress(ended)
            step += 1
        return self._result()

    @property
    def _in_window(self) -> bool:
        started = len(self._admitted) >= self._num_requests * 0.05
        return started and bool(self.scheduler.waiting or self.requests)

    def _idle_until(self, step: int, arrival: int) -> int:
        """Nothing runs until the next request comes: an empty pool counts, too."""
        if self._in_window:
            self._steps += arrival - step
            self._sums[-1] += (arrival - step) * self.kv_cache.usage().total
        return arrival

    def _measure(self, step: ScheduledStep) -> None:
        if len(self._admitted) < self._num_requests * 0.05:
            self._admitted.update(seq.request_id for seq in step.sequences)
        if not self._in_window and self._on_step is None:
            return
        found = shares_now(self.scheduler)
        if self._on_step is not None:
            self._on_step(self.scheduler, step, found)
        if not self._in_window:
            return
        for i, slots in enumerate(found):
            self._sums[i] += slots
        self._steps += 1
        self._running += len(self.scheduler.running)
        self._preempted += len(step.preempted)
        self._copied += sum(copy.num_slots for copy in step.copies)

    def _result(self) -> ReplayResult:
        steps, total = max(self._steps, 1), max(sum(self._sums), 1)
        return ReplayResult(
            share={n: 100 * s / total for n, s in zip(SHARE_NAMES, self._sums, strict=True)},
            mean_running=self._running / steps,
            finished_per_1000_steps=1000 * self._finished / steps,
            preemptions_per_1000_steps=1000 * self._preempted / steps,
            tokens_copied_per_generated_token=self._copied / max(self._generated, 1),
            steps=self._steps,
            generated_tokens=self._generated,
        )
