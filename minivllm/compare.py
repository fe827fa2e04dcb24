"""compare: the same requests through every stage, with one KV budget for all."""

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minivllm.errors import RequestError
from minivllm.llm import LLM
from minivllm.memory.usage import Shares
from minivllm.sampler import Sampler
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import ScheduledStep, Scheduler
from minivllm.sequence import Sequence
from minivllm.simulation.replay import shares_now
from minivllm.simulation.workloads import load
from minivllm.stages import KVOptions

# A difference where the two likeliest tokens are this close is a tie, decided by rounding: the
# noise between one packed pass and a pass for each sequence is about 1e-4 in float32.
TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Stage:
    """where: in which memory K and V live; how: what attention reads them with."""

    kv_cache: str
    where: str
    how: str


STAGES = {
    "past_key_values": Stage("past_key_values", "objects", "model"),
    "reserve-max": Stage("reserved", "regions", "slice"),
    "grow": Stage("growing", "regions", "slice"),
    "paged-gather": Stage("paged", "blocks", "gather"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A request of the comparison: generates exactly max_tokens tokens."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(slots=True)
class StageResult:
    """What one stage did with all jobs.

    tokens_equal: requests with the tokens of the first stage that ran; ties: those whose first
    difference is a tie. share: percent of the KV pool by name, on average over the steps in which
    somebody waited; token_share: the first of them; None where there is no pool.
    decode_tokens_per_s: over the steps in which nobody prefilled and somebody waited, so that
    memory was the limit (over all without prefill, in a stage where nobody ever waited);
    total_tokens_per_s: generated tokens over the whole time. seconds, running: after each step.
    """

    name: str
    requests: int
    tokens_equal: int = 0
    ties: int = 0
    peak_running: int = 0
    preemptions: int = 0
    token_share: float | None = None
    share: dict[str, float] | None = None
    decode_tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)


def make_jobs(
    token_ids: list[int], count: int, max_model_len: int, shrink: int, seed: int
) -> list[Job]:
    """count requests with ShareGPT-like lengths divided by shrink, cut to max_model_len tokens.

    token_ids: of the text, of which each prompt is a piece, repeated as often as needed.
    """
    if shrink < 1:
        raise RequestError(f"shrink is {shrink}: it must be 1 or more")
    lengths = [
        (max(1, request.prompt_len // shrink), max(1, request.output_len // shrink))
        for request in load("sharegpt", count, max_model_len=2048, seed=seed)
    ]
    jobs = []
    for number, (prompt_len, output_len) in enumerate(lengths):
        prompt_len = min(prompt_len, max_model_len - 1)
        start = 7 * number % len(token_ids)
        tokens = token_ids[start:] + token_ids * (prompt_len // len(token_ids) + 1)
        jobs.append(Job(tokens[:prompt_len], min(output_len, max_model_len - prompt_len)))
    return jobs


class MarginSampler(Sampler):
    """Greedy, and remembers by how much each token won over the second likeliest."""

    def __init__(self) -> None:
        super().__init__()
        self.margins: dict[str, list[float]] = {}

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        best = logits.float().topk(2).values
        for seq, margin in zip(sequences, (best[:, 0] - best[:, 1]).tolist(), strict=True):
            self.margins.setdefault(seq.request_id, []).append(margin)
        return super().sample(logits, sequences)


@dataclass(slots=True)
class Meter:
    """What happens in each step, noted by the engine before finished requests are freed."""

    scheduler: Scheduler
    peak: int = 0
    preemptions: int = 0
    decode_only: bool = False
    waiting: bool = False
    waited: int = 0
    sums: list[int] = field(default_factory=lambda: [0] * 6)
    all_sums: list[int] = field(default_factory=lambda: [0] * 6)

    def note(self, step: ScheduledStep) -> None:
        scheduler = self.scheduler
        self.peak = max(self.peak, len(step.sequences))
        self.preemptions += len(step.preempted)
        self.decode_only = all(
            seq.num_scheduled == 1 and seq.generated_token_ids for seq in step.sequences
        )
        found = list(shares_now(scheduler))
        self.all_sums = [a + b for a, b in zip(self.all_sums, found, strict=True)]
        self.waiting = bool(scheduler.waiting)
        if self.waiting:
            self.waited += 1
            self.sums = [a + b for a, b in zip(self.sums, found, strict=True)]

    def percent(self) -> dict[str, float]:
        """The mean over the steps in which somebody waited; over all, when nobody ever did."""
        sums = self.sums if self.waited else self.all_sums
        names = [share.name for share in fields(Shares)]
        return {n: 100 * s / max(sum(sums), 1) for n, s in zip(names, sums, strict=True)}


def run_stage(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    jobs: SequenceOf[Job],
    kv: KVOptions,
    progress: Callable[[int, int], None] = lambda tokens, ended: None,
) -> tuple[StageResult, list[list[int]], list[list[float]]]:
    """All jobs at once through one stage: (what was measured, tokens by job, their margins).

    progress: told after each step how many more tokens came and how many more requests ended.
    """
    llm = LLM(model, tokenizer, kv=kv)
    engine, scheduler = llm.engine, llm.engine.scheduler
    # The first passes of a process, and of a pool, are slower: not what is compared here.
    llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=3, ignore_eos=True), progress=False)
    sampler = engine.sampler = MarginSampler()
    meter = Meter(scheduler)
    engine.on_step = meter.note
    ids = [
        engine.add_request(
            job.prompt_token_ids, SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
        )
        for job in jobs
    ]
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    result = StageResult(name, len(jobs))
    decode = {True: [0, 0.0], False: [0, 0.0]}  # somebody waited -> tokens, seconds
    before = start = time.perf_counter()
    while engine.has_unfinished:
        increments = engine.step()
        now = time.perf_counter()
        if meter.decode_only:
            decode[meter.waiting][0] += len(increments)
            decode[meter.waiting][1] += now - before
        before = now
        ended = 0
        for increment in increments:
            tokens[increment.request_id].append(increment.token_id)
            ended += increment.stop_reason is not None
        result.seconds.append(now - start)
        result.running.append(len(scheduler.running) + ended)
        progress(len(increments), ended)
    result.peak_running, result.preemptions = meter.peak, meter.preemptions
    if kv.kv_cache != "past_key_values":
        result.share = meter.percent()
        result.token_share = result.share["token"]
    decode_tokens, decode_seconds = decode[bool(decode[True][0])]
    result.decode_tokens_per_s = decode_tokens / decode_seconds if decode_seconds else 0.0
    result.total_tokens_per_s = sum(map(len, tokens.values())) / result.seconds[-1]
    return result, list(tokens.values()), [sampler.margins[request_id] for request_id in ids]


def count_equal(
    result: StageResult,
    tokens: list[list[int]],
    expected: list[list[int]],
    margins: list[list[float]],
) -> None:
    """Sets tokens_equal and ties of a result; margins: those of the expected tokens."""
    for ours, theirs, margin in zip(tokens, expected, margins, strict=True):
        different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if not different:
            result.tokens_equal += 1
        elif margin[different[0]] < TIE:
            result.ties += 1
