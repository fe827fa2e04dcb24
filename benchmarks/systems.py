"""What benchmarks/engine.py compares: each system takes the same jobs and says when tokens came."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cases import BUDGET, MAX_MODEL_LEN, OURS, make_llm
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from minivllm.compare import Job
from minivllm.sampling_params import SamplingParams


@dataclass(slots=True)
class Run:
    """counts: (seconds, tokens so far, requests that have any) after each step; tokens: by job."""

    counts: list[tuple[float, int, int]]
    tokens: list[list[int]]

    def rates(self, jobs: SequenceOf[Job]) -> dict[str, float]:
        """prefill: prompt tokens/s until every request has its first token; decode: tokens/s from
        there to the last; total: generated tokens/s."""
        started = next(i for i, count in enumerate(self.counts) if count[2] == len(jobs))
        first, known, _ = self.counts[started]
        end, total, _ = self.counts[-1]
        return {
            "prefill": sum(len(job.prompt_token_ids) for job in jobs) / first,
            "decode": (total - known) / (end - first),
            "total": total / end,
        }


System = Callable[[SequenceOf[Job]], Run]


def stage(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> System:
    """This engine, with one way of keeping and reading K and V."""
    engine = make_llm(model, tokenizer, name).engine

    def run(jobs: SequenceOf[Job]) -> Run:
        tokens: dict[str, list[int]] = {}
        for job in jobs:
            params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
            tokens[engine.add_request(job.prompt_token_ids, params)] = []
        counts, total = [], 0
        start = time.perf_counter()
        while engine.has_unfinished:
            increments = engine.step()
            total += len(increments)
            for increment in increments:
                tokens[increment.request_id].append(increment.token_id)
            counts.append((time.perf_counter() - start, total, sum(map(bool, tokens.values()))))
        return Run(counts, list(tokens.values()))

    return run


class TimedModel:
    """A model, and the seconds spent in its passes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.seconds = 0.0

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def __call__(self, **inputs):
        start = time.perf_counter()
        output = self._model(**inputs)
        self.seconds += time.perf_counter() - start
        return output


def own_share(model, tokenizer, jobs: SequenceOf[Job]) -> float:
    """Part of a decode step that is not the model's pass: schedule, batch, sample, detokenize."""
    engine = make_llm(model, tokenizer, OURS).engine
    for job in jobs:
        engine.add_request(job.prompt_token_ids, SamplingParams(max_tokens=64, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.runner.model = timed = TimedModel(model)
    start = time.perf_counter()
    for _ in range(40):
        engine.step()
    return 1 - timed.seconds / (time.perf_counter() - start)


class Clock(LogitsProcessor):
    """Called once for each step of generate: notes the time, and by how much each token won."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.margins: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(time.perf_counter())
        best = scores.topk(2).values
        self.margins.append(best[:, 0] - best[:, 1])
        return scores


def generate(model: PreTrainedModel, margins: list | None = None) -> System:
    """transformers' generate on a batch padded on the left. margins: gets those of each job."""

    @torch.inference_mode()
    def run(jobs: SequenceOf[Job]) -> Run:
        longest = max(len(job.prompt_token_ids) for job in jobs)
        ids = torch.zeros((len(jobs), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, longest - len(job.prompt_token_ids) :] = torch.tensor(job.prompt_token_ids)
            mask[row, longest - len(job.prompt_token_ids) :] = 1
        count = max(job.max_tokens for job in jobs)
        clock = Clock()
        start = time.perf_counter()
        output = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False,
            eos_token_id=None, pad_token_id=0, logits_processor=LogitsProcessorList([clock]),
        )  # fmt: skip
        end = time.perf_counter()
        tokens = [
            row[: job.max_tokens]
            for row, job in zip(output[:, longest:].tolist(), jobs, strict=True)
        ]
        # The processor of a step runs when its logits are there.
        counts = []
        for step, moment in enumerate([*clock.times[:-1], end]):
            known = sum(min(step + 1, job.max_tokens) for job in jobs)
            counts.append((moment - start, known, len(jobs)))
        if margins is not None:
            margins[:] = torch.stack(clock.margins, 1).tolist()
        return Run(counts, tokens)

    return run


def generate_batch(model: PreTrainedModel) -> System:
    """transformers' continuous batching."""
    config = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=BUDGET)

    def run(jobs: SequenceOf[Job]) -> Run:
        count = max(job.max_tokens for job in jobs)
        if min(job.max_tokens for job in jobs) != count:
            raise ValueError("generate_batch takes one max_new_tokens for all")
        start = time.perf_counter()
        outputs = model.generate_batch(
            [job.prompt_token_ids for job in jobs],
            generation_config=GenerationConfig(
                max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=config,
            record_timestamps=True,
        )
        found = sorted(outputs.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
        results = [output for _, output in found]
        moments = sorted(moment for output in results for moment in output.timestamps)
        firsts = sorted(output.timestamps[0] for output in results)
        counts = [
            (moment - start, i + 1, sum(first <= moment for first in firsts))
            for i, moment in enumerate(moments)
        ]
        return Run(counts, [output.generated_tokens for output in results])

    return run


class Worker:
    """A process that answers a line of jobs with a line of results."""

    def __init__(self, command: SequenceOf[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=os.environ | environment,
        )  # fmt: skip
        self._errors: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self.ready = self._answer()

    def _listen(self) -> None:
        for line in self._process.stderr:
            self._errors.append(line)

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended: " + "".join(self._errors[-20:]))
        return json.loads(line)

    def ask(self, jobs: SequenceOf[Job]) -> dict:
        self._process.stdin.write(json.dumps([asdict(job) for job in jobs]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def __call__(self, jobs: SequenceOf[Job]) -> Run:
        answer = self.ask(jobs)
        return Run([tuple(count) for count in answer["counts"]], answer["tokens"])

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


HERE = Path(__file__).parent


def our_worker(what: str) -> Worker:
    """what: engine, bare or own_share, see engine_worker.py."""
    return Worker([sys.executable, str(HERE / "engine_worker.py"), what], {})


def vllm_worker(python: Path, folder: str, mode: str) -> Worker:
    """mode: eager, or default (compiled)."""
    given = [folder, mode, str(BUDGET), str(MAX_MODEL_LEN)]
    return Worker([str(python), str(HERE / "vllm_worker.py"), *given], {"PYTHONPATH": ""})
