"""One pool for everybody, read by slices: the tokens of chapter 1, wherever K and V lie."""

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import run_to_end, text_of, tokens_of

from minivllm.attention import dense
from minivllm.attention.batch import slots_of
from minivllm.attention.kv_pool import KVPool
from minivllm.llm import LLM
from minivllm.memory.kv_size import kv_bytes, kv_shape
from minivllm.sampling_params import SamplingParams
from minivllm.stages import KVOptions


def pooled(model, tokenizer, kv, **options):
    """An LLM on a pool full of NaN: what is read without having been written shows at once."""
    llm = LLM(model, tokenizer, kv=kv, **options)
    llm.engine.runner.pool.keys.fill_(torch.nan)
    llm.engine.runner.pool.values.fill_(torch.nan)
    return llm


def test_regions_that_move_under_preemption(tiny, solo_run):
    """The case must really occur: moves and preemptions in one run."""
    llm = pooled(*tiny, KVOptions("growing", kv_slots=64, max_model_len=40, grow_by=4))
    moves, preempted = [], []
    llm.engine.on_step = lambda step: (moves.extend(step.copies), preempted.extend(step.preempted))
    prompts = [[i, i + 1, i + 2] * 3 for i in range(6)]
    params = SamplingParams(max_tokens=24)
    completions = llm.generate(prompts, params, progress=False)
    assert len(moves) > 1
    assert len(preempted) > 3
    assert [c.token_ids for c in completions] == [solo_run(p, params)[0] for p in prompts]


def test_logits_equal_those_of_the_model_itself(tiny):
    """Prefill in pieces, then decode, beside a stranger: logits, not only tokens."""
    model, tokenizer = tiny
    llm = pooled(model, tokenizer, KVOptions("growing", 64), max_tokens_per_step=7)
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
    llm = LLM(*tiny, kv=KVOptions("reserved", 96, 32))
    shape = kv_shape(tiny[0].config)
    assert llm.engine.runner.kv_bytes() == kv_bytes(shape, 96, 4)


def test_the_model_is_what_it_was_after_a_step(tiny):
    model, tokenizer = tiny
    before = model.config._attn_implementation
    ids = torch.arange(9)[None]
    expected = model(ids).logits
    LLM(model, tokenizer, kv=KVOptions("reserved", 64, 32)).generate(
        "hello", progress=False, params=SamplingParams(max_tokens=3)
    )
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids).logits, expected)


def tiny_model(name, **options):
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, hidden_size=48,
        intermediate_size=56, head_dim=8, vocab_size=257, max_position_embeddings=256,
        initializer_range=0.3, eos_token_id=256, pad_token_id=None, bos_token_id=None, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kv_cache", ["reserved", "growing"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("Qwen3", {}), ("Mistral", {"sliding_window": 5}), ("Mistral", {"sliding_window": None})],
)
def test_other_architectures_and_a_sliding_window(tiny, kv_cache, name, options):
    model, tokenizer = tiny_model(name, **options), tiny[1]
    prompts = [[1, 2, 3], list(range(20)), [7] * 9]
    params = SamplingParams(max_tokens=8)
    expected = LLM(model, tokenizer).generate(prompts, params, progress=False)
    llm = pooled(model, tokenizer, KVOptions(kv_cache, 128, 40), max_tokens_per_step=6)
    assert llm.generate(prompts, params, progress=False) == expected


def test_capped_logits_and_windows_that_alternate(tiny):
    model, tokenizer = tiny_model("Gemma2", sliding_window=5), tiny[1]
    prompts, params = [[1, 2, 3], list(range(20))], SamplingParams(max_tokens=8)
    expected = LLM(model, tokenizer).generate(prompts, params, progress=False)
    llm = pooled(model, tokenizer, KVOptions("growing", 128, 40), max_tokens_per_step=6)
    assert llm.generate(prompts, params, progress=False) == expected


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        (KVOptions("paged?"), "kv_cache is 'paged\\?'"),
        (KVOptions("reserved", 0), "has 0 slots"),
        (KVOptions("reserved", 50, 100), "max_model_len is 100 and the KV pool has 50 slots"),
        (KVOptions("reserved", 50, 1), "max_model_len is 1"),
        (KVOptions("growing", 9000, 5000), "max_model_len is 5000, and the model handles 2048"),
        (KVOptions("growing", 64, 32, grow_by=0), "grow_by is 0"),
    ],
)
def test_bad_options_are_refused(tiny, kv, words):
    with pytest.raises(ValueError, match=words):
        LLM(*tiny, kv=kv)


def test_a_request_that_can_never_fit_is_refused_and_the_engine_goes_on(tiny, solo_run):
    llm = pooled(*tiny, KVOptions("growing", 32, 100))
    with pytest.raises(ValueError, match=r"39 token slots .* has 32"):
        llm.generate([[1] * 20], SamplingParams(max_tokens=20), progress=False)
    params = SamplingParams(max_tokens=5)
    (completion,) = llm.generate([[1, 2, 3]], params, progress=False)
    assert completion.token_ids == solo_run([1, 2, 3], params)[0]


def test_copies_run_in_order_and_may_reuse_a_place():
    pool = KVPool(2, 12, 1, 1, 1)
    for tensor in (pool.keys, pool.values):
        tensor.copy_(torch.arange(12.0).view(1, 12, 1, 1, 1).expand_as(tensor))
    pool.copy([(0, 8, 4), (4, 0, 2)])
    expected = [4, 5, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    for tensor in (pool.keys, pool.values):
        assert all(tensor[layer].flatten().tolist() == expected for layer in range(2))


def test_the_one_line_of_arithmetic():
    """A region is a block table with blocks of one slot; so is any list of blocks."""
    assert slots_of(range(100, 140), 1, 5, 8).tolist() == [105, 106, 107]
    assert slots_of([7, 2, 15], 16, 14, 19).tolist() == [7 * 16 + 14, 7 * 16 + 15, 32, 33, 34]
    huge = slots_of([40_000], 65_536, 0, 1)
    assert huge.tolist() == [2_621_440_000]


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 255), min_size=1, max_size=20), st.integers(1, 12)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests=REQUESTS,
    kv=st.builds(
        KVOptions,
        kv_cache=st.sampled_from(["reserved", "growing"]),
        kv_slots=st.integers(64, 140),
        max_model_len=st.just(32),
        reserve=st.sampled_from(["max", "pow2", "oracle"]),
        fit=st.sampled_from(["first", "best", "buddy"]),
        grow_by=st.integers(1, 8),
    ),
    budget=st.integers(1, 60),
)
def test_tokens_equal_those_of_chapter_1(tiny, solo_run, requests, kv, budget):
    """Any order, any pool, prompts in pieces, preemptions, moves."""
    llm = pooled(*tiny, kv, max_tokens_per_step=budget)
    ids = []
    for prompt, max_tokens in requests:
        ids.append(llm.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens)))
    increments = run_to_end(llm.engine)
    for request_id, (prompt, max_tokens) in zip(ids, requests, strict=True):
        tokens, text, reason = solo_run(prompt, SamplingParams(max_tokens=max_tokens))
        assert tokens_of(increments[request_id]) == tokens
        assert text_of(increments[request_id]) == text
        assert increments[request_id][-1].stop_reason == reason
    assert llm.engine.scheduler.kv_cache.usage().allocated == 0


@pytest.mark.real_model
@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=pytest.mark.full)])
def test_the_real_model_on_24_requests(real, real_requests, order):
    """Mixed lengths, reserved and growing, with preemptions: the tokens of chapter 1."""
    prompts, params, expected = (given[::order] for given in real_requests)
    for kv, slots in (("reserved", 640), ("growing", 160)):
        llm = pooled(*real, KVOptions(kv, slots, 80, grow_by=4), max_tokens_per_step=64)
        short = []  # moves and preemptions
        llm.engine.on_step = lambda s, seen=short: seen.extend([*s.copies, *s.preempted])
        answers = llm.generate(prompts, params, progress=False)
        assert [a.token_ids for a in answers] == expected, kv
        assert kv == "reserved" or short, "the growing pool was never short"


@pytest.mark.parametrize(("num_new", "context_len"), [(12, 12), (13, 13), (11, 30), (5, 9), (1, 8)])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_prompt_in_pieces_is_the_prompt_token_by_token(
    num_new, context_len, window, softcap, monkeypatch
):
    monkeypatch.setattr(dense, "PIECE", 5)
    query = torch.randn(num_new, 4, 8)
    key, value = torch.randn(2, context_len, 2, 8)
    limits = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
    found = dense.attend_one_sequence(query, key, value, **limits)
    for row in range(num_new):
        seen = context_len - num_new + row + 1
        alone = query[row : row + 1], key[:seen], value[:seen]
        expected = dense.attend_one_sequence(*alone, **limits)
        torch.testing.assert_close(found[row : row + 1], expected, atol=1e-5, rtol=1e-5)
