"""What several tests need: references, and a KV cache manager with a hard limit."""

import itertools
import random

import torch

from minivllm.attention.batch import Batch, slots_of
from minivllm.attention.kv_pool import KVPool
from minivllm.detokenizer import Detokenizer
from minivllm.engine import Engine
from minivllm.llm import LLM
from minivllm.memory.kv_cache_manager import OutOfSlots, UnboundedCache
from minivllm.memory.usage import MemoryUsage
from minivllm.models import eos_token_ids, max_model_len, vocab_size
from minivllm.runners.past_key_values import PastKeyValuesRunner
from minivllm.sampler import Sampler
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.sequence import Sequence
from minivllm.stages import KVOptions


class LimitedCache:
    """A KV cache manager with num_slots slots of one token each, for tests of the scheduler.

    It hands out numbers and looks at nothing else, so that a test can say how much memory there
    is without knowing anything about regions or blocks.
    """

    def __init__(self, num_slots):
        self.num_slots = num_slots
        self.held = {}

    @property
    def num_free(self):
        return self.num_slots - sum(self.held.values())

    def can_ever_allocate(self, seq, num_tokens):
        return num_tokens <= self.num_slots

    def slots_needed(self, seq, num_tokens):
        return num_tokens

    def can_allocate(self, seq, num_tokens):
        return num_tokens - self.held.get(seq.request_id, 0) <= self.num_free

    def allocate(self, seq, num_tokens):
        if not self.can_allocate(seq, num_tokens):
            raise OutOfSlots(f"{num_tokens} slots for {seq.request_id}, {self.num_free} free")
        self.held[seq.request_id] = max(num_tokens, self.held.get(seq.request_id, 0))
        return []

    def free(self, seq):
        del self.held[seq.request_id]

    def usage(self):
        return MemoryUsage(
            total=self.num_slots,
            allocated=self.num_slots - self.num_free,
            rounding=0,
            free=self.num_free,
            largest_hole=self.num_free,
        )

    def check_invariants(self):
        assert 0 <= self.num_free <= self.num_slots
        assert all(count > 0 for count in self.held.values())


def sequence(name, prompt_len, max_tokens=100):
    return Sequence(name, list(range(prompt_len)), SamplingParams(max_tokens=max_tokens))


def scheduler_with(*sequences, kv_cache=None, **budgets):
    scheduler = Scheduler(kv_cache or UnboundedCache(), **budgets)
    for seq in sequences:
        scheduler.add(seq)
    return scheduler


def run_step(scheduler):
    """Schedules and pretends to compute: {name: tokens} in the order of the batch, preempted."""
    step = scheduler.schedule()
    scheduled = {seq.request_id: seq.num_scheduled for seq in step.sequences}
    for seq in step.sequences:
        if seq.is_sampled:
            seq.generated_token_ids.append(0)
        seq.num_computed, seq.num_scheduled = seq.context_len, 0
    scheduler.kv_cache.check_invariants()
    return scheduled, [seq.request_id for seq in step.preempted]


def make_engine(model, tokenizer, *, kv_cache=None, budget=2048, max_running=256, **options):
    """An engine of the past_key_values stage; options override the engine's own arguments."""
    arguments = {
        "make_detokenizer": lambda stop: Detokenizer(tokenizer, stop),
        "eos_token_ids": eos_token_ids(model, tokenizer),
        "max_model_len": max_model_len(model),
        "vocab_size": vocab_size(model),
    } | options
    return Engine(
        PastKeyValuesRunner(model),
        Scheduler(kv_cache or UnboundedCache(), budget, max_running),
        Sampler(),
        **arguments,
    )


def run_to_end(engine, max_steps=10_000):
    """Steps until nothing is left: {request_id: [increments]}; fails when it does not end."""
    increments = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return increments
        for increment in engine.step():
            increments.setdefault(increment.request_id, []).append(increment)
        check_books(engine)
    raise AssertionError(f"still running after {max_steps} steps")


def check_books(engine):
    """What must hold between any two steps."""
    scheduler = engine.scheduler
    scheduler.kv_cache.check_invariants()
    ids = [seq.request_id for seq in [*scheduler.waiting, *scheduler.running]]
    assert len(ids) == len(set(ids)), "a request is queued twice"
    assert all(engine.is_live(request_id) for request_id in ids)
    assert len(scheduler.running) <= scheduler.max_running
    assert all(seq.num_computed == 0 for seq in scheduler.waiting)
    assert all(seq.num_scheduled == 0 for seq in [*scheduler.waiting, *scheduler.running])
    if isinstance(engine.runner, PastKeyValuesRunner):
        extra = set(engine.runner.caches) - {seq.request_id for seq in scheduler.running}
        assert not extra, f"caches of {extra} are still held: was runner.release called for them?"
        for seq in scheduler.running:
            assert engine.runner.caches[seq.request_id].get_seq_length() == seq.num_computed


def tokens_of(increments):
    return [increment.token_id for increment in increments]


def text_of(increments):
    return "".join(increment.text for increment in increments)


def solo(model, tokenizer, prompt, params):
    """(tokens, text, stop reason) of one request that runs alone, with no limits."""
    engine = make_engine(model, tokenizer)
    request_id = engine.add_request(prompt, params)
    increments = run_to_end(engine)[request_id]
    return tokens_of(increments), text_of(increments), increments[-1].stop_reason


def transformers_greedy(model, prompt, max_tokens, eos_token_id=None):
    """The reference: transformers' own generate for one prompt; the new tokens only."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            **({} if eos_token_id is None else {"eos_token_id": eos_token_id}),
        )
    return output[0, len(prompt) :].tolist()


def ends(increments):
    return [i.stop_reason for i in increments if i.stop_reason is not None]


class SlotRunner:
    """A runner whose tokens depend on what is stored where: attention in plain Python.

    It writes every computed token into the slot that the block table names, and the next token is
    a number made of all tokens read back through the table, so that a wrong table, a slot given
    twice, or a lost copy changes what is generated. Use it with SlotSampler.
    """

    def __init__(self, block_size):
        self.block_size = block_size
        self.slots = {}

    def slot(self, seq, token):
        block = seq.block_table[token // self.block_size]
        return block * self.block_size + token % self.block_size

    def run(self, step):
        for source, destination, count in step.copies:
            moved = [self.slots.get(source + i) for i in range(count)]
            self.slots.update(enumerate(moved, start=destination))
        for seq in step.sequences:
            for i, token_id in enumerate(seq.scheduled_token_ids()):
                position = seq.num_computed + i
                self.slots[self.slot(seq, position)] = (position, token_id)
        return [
            next_token([self.slots[self.slot(seq, t)] for t in range(seq.context_len)])
            for seq in step.sequences
            if seq.is_sampled
        ]

    def release(self, seq):
        pass

    def kv_bytes(self):
        return 0


class SlotSampler:
    def sample(self, tokens, sequences):
        return tokens


def next_token(known):
    """known: (position, token id) of every token so far."""
    return sum((position + 1) * (token_id + 7) for position, token_id in known) % 251


def generated_alone(prompt, max_tokens):
    """What SlotRunner must generate for a prompt, by the definition."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(list(enumerate(tokens))))
    return tokens[len(prompt) :]


def slot_engine(kv_cache, block_size=1, **budgets):
    """An engine on the given KV cache manager whose tokens are those of SlotRunner."""
    return Engine(SlotRunner(block_size), Scheduler(kv_cache, **budgets), SlotSampler())


def scene(context_lens, new, block_size, *, num_kv_heads=2, group_size=3, head_dim=16, seed=0):
    """(query, pool, batch): shuffled blocks, NaN wherever no token is, block 0 all NaN.

    Every table ends in garbage: a block that is not the sequence's own.
    """
    shuffle, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [-(-n // block_size) for n in context_lens]
    ids = list(range(1, sum(needed) + 4))
    shuffle.shuffle(ids)
    pool = KVPool(1, len(ids) + 1, block_size, num_kv_heads, head_dim)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    tables = [[ids.pop() for _ in range(count)] for count in needed]
    for table, length in zip(tables, context_lens, strict=True):
        slots = torch.from_numpy(slots_of(table, block_size, 0, length))
        shape = (length, num_kv_heads, head_dim)
        key, value = (torch.randn(shape, generator=torch_rng) for _ in "kv")
        pool.write(0, slots, key, value)
        table.append(ids[0])
    loc = [0, *itertools.accumulate(new)]
    query = torch.randn((loc[-1], num_kv_heads * group_size, head_dim), generator=torch_rng)
    none = torch.empty(0)
    batch = Batch(none, none, none, loc, list(context_lens), tables, block_size, none)
    return query, pool, batch


def check_tokens_in_a_small_pool(tiny, solo_run, attention, **budgets):
    """A reader in the engine: the tokens of chapter 1, through preemptions, a pool full of NaN."""
    kv = KVOptions("paged", 40, 30, block_size=4, attention=attention)
    llm = LLM(*tiny, kv=kv, **budgets)
    llm.engine.runner.pool.keys.fill_(torch.nan)
    llm.engine.runner.pool.values.fill_(torch.nan)
    preempted = []
    llm.engine.on_step = lambda step: preempted.extend(step.preempted)
    prompts = [[7], list(range(9)), [3, 1, 4, 1, 5]]
    params = SamplingParams(max_tokens=9)
    answers = llm.generate(prompts * 2, params, progress=False)
    assert [a.token_ids for a in answers] == [solo_run(p, params)[0] for p in prompts] * 2
    assert preempted
    return llm
