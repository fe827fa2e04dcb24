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

from minivllm.attention.batch import Batch
from minivllm.attention.dense import attend, attend_one_sequence
from minivllm.attention.hf import KVAccess, attention_through_pool
from minivllm.compare import Job
from minivllm.fast_layers import Layers
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


class ContiguousKV:
    """K and V of equally long sequences, [num_layers, S, max_len, num_kv_heads, head_dim]: written
    and read by slices, so that nothing is looked up."""

    def __init__(self, config, num_seqs: int, max_len: int) -> None:
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        shape = (config.num_hidden_layers, num_seqs, max_len, config.num_key_value_heads, head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.rows, self.start, self.stop = slice(0), 0, 0

    def select(self, rows: slice, start: int, stop: int) -> None:
        """The step computes tokens start to stop - 1 of the sequences in `rows`."""
        self.rows, self.start, self.stop = rows, start, stop

    def write(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        for kept, new in ((self.keys, key), (self.values, value)):
            place = kept[layer, self.rows, self.start : self.stop]
            place.copy_(new.view(place.shape))

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer, self.rows, : self.stop], self.values[layer, self.rows, : self.stop]


def read_contiguous(query, keys, values, batch, *, scaling, sliding_window=None, softcap=None):
    num_seqs = len(keys)
    if len(query) > num_seqs:
        pairs = zip(query.unflatten(0, (num_seqs, -1)), keys, values, strict=True)
        return torch.cat([attend_one_sequence(q, k, v, scaling=scaling) for q, k, v in pairs])
    grouped = query.unflatten(1, (keys.shape[2], -1))
    found = attend(grouped, keys.transpose(1, 2), values.transpose(1, 2), None, scaling=scaling)
    return found.flatten(1, 2)


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


def bare_model(model: PreTrainedModel, layers: Layers) -> System:
    """The same packed passes over contiguous K and V, with no engine around: equal lengths only."""
    none = torch.empty(0)
    batch = Batch(none, none, none, [], [], [], 1, none)  # its readers look at nothing in it

    @torch.inference_mode()
    def run(jobs: SequenceOf[Job]) -> Run:
        prompts = torch.tensor([job.prompt_token_ids for job in jobs])
        num_seqs, prompt_len = prompts.shape
        kv = ContiguousKV(model.config, num_seqs, prompt_len + jobs[0].max_tokens)

        def forward(ids: Tensor, rows: slice, start: int) -> Tensor:
            count, new = ids.shape
            kv.select(rows, start, start + new)
            with attention_through_pool(model), layers():
                logits = model(
                    input_ids=ids.reshape(1, -1),
                    position_ids=torch.arange(start, start + new).repeat(count)[None],
                    use_cache=False,
                    logits_to_keep=torch.arange(new - 1, count * new, new),
                    kv_access=KVAccess(kv, batch, read_contiguous),
                ).logits[0]
            return logits.argmax(-1)

        tokens, counts = [], []
        start_time = time.perf_counter()
        firsts = []
        at_once = max(1, BUDGET // prompt_len)
        for first in range(0, num_seqs, at_once):
            rows = slice(first, min(first + at_once, num_seqs))
            firsts.append(forward(prompts[rows], rows, 0))
            known = rows.stop
            counts.append((time.perf_counter() - start_time, known, known))
        tokens.append(torch.cat(firsts))
        for step in range(jobs[0].max_tokens - 1):
            tokens.append(forward(tokens[-1][:, None], slice(0, num_seqs), prompt_len + step))
            known = num_seqs * len(tokens)
            counts.append((time.perf_counter() - start_time, known, num_seqs))
        return Run(counts, torch.stack(tokens, 1).tolist())

    return run


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
