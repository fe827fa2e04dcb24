"""The bare model of benchmarks/engine.py: our passes over contiguous K and V, no engine around."""

import time
from collections.abc import Sequence as SequenceOf

import torch
from cases import BUDGET
from systems import Run, System
from torch import Tensor
from transformers import PreTrainedModel

from minivllm.attention.batch import Batch
from minivllm.attention.dense import attend, attend_one_sequence
from minivllm.attention.hf import KVAccess, attention_through_pool
from minivllm.compare import Job
from minivllm.fast_layers import Layers


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
