"""The engine on blocks: chapter 1's tokens, whatever the block size, the order and the pool."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import check_books, run_to_end, text_of, tokens_of

from minivllm.attention.gather import GatherAttention
from minivllm.llm import LLM
from minivllm.memory.kv_size import kv_bytes, kv_shape
from minivllm.sampling_params import SamplingParams
from minivllm.stages import KVOptions


def paged(model, tokenizer, kv_slots, block_size=4, max_model_len=60, shuffle=0, **options):
    """An LLM on a pool full of NaN whose free blocks are in a random order."""
    kv = KVOptions("paged", kv_slots, max_model_len, block_size=block_size, attention="gather")
    llm = LLM(model, tokenizer, kv=kv, **options)
    assert isinstance(llm.engine.runner.attend, GatherAttention)
    llm.engine.runner.pool.keys.fill_(torch.nan)
    llm.engine.runner.pool.values.fill_(torch.nan)
    shuffle_free_blocks(llm, shuffle)
    llm.preempted = []
    llm.engine.on_step = lambda step: llm.preempted.extend(step.preempted)
    return llm


def shuffle_free_blocks(llm, seed):
    """By taking every block, one a request, and giving them back in another order."""
    manager = llm.engine.scheduler.kv_cache
    holders = []
    for number in range(manager.num_blocks):
        holder = type("Holder", (), {"request_id": f"h{number}", "block_table": []})()
        manager.allocate(holder, manager.block_size)
        holders.append(holder)
    random.Random(seed).shuffle(holders)
    for holder in holders:
        manager.free(holder)


@pytest.mark.parametrize("block_size", [1, 3, 16, 60])
@pytest.mark.parametrize("max_tokens_per_step", [2048, 5])
def test_any_block_size_short_of_memory_or_not(tiny, solo_run, block_size, max_tokens_per_step):
    prompts = [list(range(i, i + 1 + 7 * i % 30)) for i in range(1, 10)]
    params = [SamplingParams(max_tokens=3 + 5 * i % 12) for i in range(9)]
    expected = [solo_run(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]
    for kv_slots in (64, 1000):
        llm = paged(
            *tiny, max(kv_slots, block_size), block_size, max_tokens_per_step=max_tokens_per_step
        )
        answers = llm.generate(prompts, params, progress=False)
        assert [a.token_ids for a in answers] == expected
        if kv_slots == 1000:
            assert not llm.preempted
    assert llm.engine.scheduler.kv_cache.usage().free // block_size == 1000 // block_size


def test_a_small_pool_preempts_and_changes_nothing(tiny, solo_run):
    llm = paged(*tiny, 64)
    prompts = [[i, i + 1, i + 2] * 3 for i in range(6)]
    params = SamplingParams(max_tokens=24)
    completions = llm.generate(prompts, params, progress=False)
    assert len(llm.preempted) > 3
    assert [c.token_ids for c in completions] == [solo_run(p, params)[0] for p in prompts]


def test_the_whole_context_in_one_block(tiny, solo_run):
    llm = paged(*tiny, kv_slots=200, block_size=100, max_model_len=100)
    prompts = [list(range(50)), [3, 1, 4], list(range(70))]
    params = SamplingParams(max_tokens=12)
    completions = llm.generate(prompts, params, progress=False)
    assert [c.token_ids for c in completions] == [solo_run(p, params)[0] for p in prompts]


def test_lengths_around_a_block_in_any_order(tiny, solo_run):
    """1, B, B + 1, 3B + 2 in all orders equal each alone."""
    import itertools

    params = SamplingParams(max_tokens=6)
    for order in itertools.permutations([1, 4, 5, 14]):
        llm = paged(*tiny, 200, shuffle=order[0])
        prompts = [list(range(length, 2 * length)) for length in order]
        answers = llm.generate(prompts, params, progress=False)
        assert [a.token_ids for a in answers] == [solo_run(p, params)[0] for p in prompts]


def test_logits_of_every_step_equal_the_model_s(tiny):
    """Prefill in pieces of 7 and 9, then decode, beside a stranger: logits, not only tokens."""
    model, tokenizer = tiny
    llm = paged(model, tokenizer, 64, max_tokens_per_step=9)
    seen, run = [], llm.engine.runner.run
    llm.engine.runner.run = lambda step: seen.append((step.sequences, run(step))) or seen[-1][1]
    prompt = list(range(30, 46))
    request_id = llm.engine.add_request(prompt, SamplingParams(max_tokens=6))
    llm.engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    tokens = prompt + tokens_of(run_to_end(llm.engine)[request_id])
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0]
    rows = [logits[0] for seqs, logits in seen if seqs[0].request_id == request_id and len(logits)]
    torch.testing.assert_close(
        torch.stack(rows[:6]), reference[len(prompt) - 1 : -1], atol=1e-4, rtol=1e-4
    )


def test_the_pool_has_the_bytes_of_the_formula(tiny):
    llm = paged(*tiny, kv_slots=99, block_size=4)
    assert llm.engine.runner.kv_bytes() == kv_bytes(kv_shape(tiny[0].config), 96, 4)


def test_without_a_maximum_given_requests_may_use_the_whole_pool(tiny, solo_run):
    llm = LLM(*tiny, kv=KVOptions("paged", 64, block_size=4))
    params = SamplingParams(max_tokens=15)
    prompt = list(range(49))
    assert (
        llm.generate([prompt], params, progress=False)[0].token_ids == solo_run(prompt, params)[0]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 65}, "block_size is 65.* 64 slots"),
        ({"kv_slots": 0}, "at most the pool's 0 slots"),
        ({"watermark": 1.5}, "watermark is 1.5"),
        ({"attention": "magic"}, "attention is 'magic': use one of auto, gather"),
    ],
)
def test_bad_options_are_refused(tiny, options, words):
    with pytest.raises(ValueError, match=words):
        LLM(*tiny, kv=KVOptions(**{"kv_cache": "paged", "kv_slots": 64} | options))


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 255), min_size=1, max_size=25), st.integers(1, 12)),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("examples", [25, pytest.param(300, marks=pytest.mark.full)])
def test_at_random(tiny, solo_run, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        requests=REQUESTS,
        block_size=st.sampled_from([1, 2, 3, 4, 7, 16]),
        kv_slots=st.integers(40, 120),
        budget=st.integers(1, 60),
        seed=st.integers(0, 9),
        abort_at=st.integers(0, 8),
    )
    def run(requests, block_size, kv_slots, budget, seed, abort_at):
        llm = paged(*tiny, kv_slots, block_size, 38, shuffle=seed, max_tokens_per_step=budget)
        engine, increments = llm.engine, {}
        ids = []
        for prompt, max_tokens in requests:
            params = SamplingParams(max_tokens=max_tokens)
            ids.append((engine.add_request(prompt, params), prompt, params))
        victim = ids[seed % len(ids)][0]
        for step in range(2000):
            if not engine.has_unfinished:
                break
            if step == abort_at and engine.is_live(victim):
                engine.abort(victim)
                increments.pop(victim, None)
                ids = [entry for entry in ids if entry[0] != victim]
            for increment in engine.step():
                increments.setdefault(increment.request_id, []).append(increment)
            check_books(engine)
        assert not engine.has_unfinished
        for request_id, prompt, params in ids:
            tokens, text, _ = solo_run(prompt, params)
            assert (tokens_of(increments[request_id]), text_of(increments[request_id])) == (
                tokens,
                text,
            )

    run()


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("block_size", "order"),
    [
        (16, "as they are"),
        pytest.param(1, "reversed", marks=pytest.mark.full),
        pytest.param(3, "shuffled", marks=pytest.mark.full),
        pytest.param(128, "as they are", marks=pytest.mark.full),
    ],
)
def test_the_real_model_on_24_requests(real, real_requests, block_size, order):
    """Once with memory for all, once so short of it that requests are preempted."""
    requests = list(zip(*real_requests, strict=True))
    if order == "reversed":
        requests.reverse()
    elif order == "shuffled":
        random.Random(0).shuffle(requests)
    prompts, params, expected = map(list, zip(*requests, strict=True))
    for kv_slots in (24 * 128, max(160, 3 * block_size)):
        llm = paged(*real, kv_slots, block_size, 128, shuffle=block_size)
        answers = llm.generate(prompts, params, progress=False)
        assert [a.token_ids for a in answers] == expected
    assert llm.preempted or block_size == 128
