"""The engine: what a request returns, when it ends, and what it leaves behind (nothing)."""

import re

import pytest
import torch
from support import (
    LimitedCache,
    check_books,
    ends,
    make_engine,
    run_to_end,
    solo,
    text_of,
    tokens_of,
    transformers_greedy,
)

from minivllm.models import eos_token_ids
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import StopReason

PROMPTS = [[5], [1, 2, 3], list(range(40, 57)), [9] * 8, list(b"hello world"), [250, 3, 99, 7]]
EOS = 256


@pytest.fixture
def engine(tiny):
    return make_engine(*tiny)


def held_nothing(engine):
    check_books(engine)
    assert not engine.has_unfinished
    assert not engine.runner.caches
    assert engine.runner.kv_bytes() == 0
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert engine.scheduler.kv_cache.usage().allocated == 0


def test_a_step_that_samples_returns_one_increment(engine):
    request_id = engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
    (first,) = engine.step()
    assert (first.request_id, first.stop_reason) == (request_id, None)
    (second,) = engine.step()
    assert second.stop_reason == "max_tokens"
    assert engine.step() == []


def test_a_step_that_computes_only_a_part_of_a_prompt_returns_nothing(tiny):
    engine = make_engine(*tiny, budget=2)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=1))
    assert engine.step() == []
    assert len(engine.step()) == 1


@pytest.mark.parametrize("prompt", PROMPTS)
def test_one_request_gives_the_tokens_of_transformers(tiny, prompt):
    expected = transformers_greedy(tiny[0], prompt, 20)
    assert solo(*tiny, prompt, SamplingParams(max_tokens=20))[0] == expected


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 4, 2]])
@pytest.mark.parametrize("budget", [1, 3, 7, 2048])
def test_requests_together_give_the_same_tokens(tiny, order, budget):
    """Also when the token budget is smaller than a prompt."""
    engine = make_engine(*tiny, budget=budget)
    params = SamplingParams(max_tokens=12)
    ids = {i: engine.add_request(PROMPTS[i], params) for i in order}
    increments = run_to_end(engine)
    for i, request_id in ids.items():
        assert tokens_of(increments[request_id]) == transformers_greedy(tiny[0], PROMPTS[i], 12)
        assert ends(increments[request_id]) == [StopReason.MAX_TOKENS]
    held_nothing(engine)


def test_a_request_that_joins_later_changes_nothing(tiny, solo_run):
    engine = make_engine(*tiny)
    params = SamplingParams(max_tokens=10)
    first = engine.add_request(PROMPTS[2], params)
    increments = engine.step() + engine.step() + engine.step()
    second = engine.add_request(PROMPTS[1], params)
    rest = run_to_end(engine)
    assert tokens_of(increments + rest[first]) == solo_run(PROMPTS[2], params)[0]
    assert tokens_of(rest[second]) == solo_run(PROMPTS[1], params)[0]


def test_prefill_creates_the_cache_and_decode_appends(engine):
    request_id = engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=4))
    lengths = []
    for _ in range(4):
        engine.step()
        if engine.is_live(request_id):
            lengths.append(engine.runner.caches[request_id].get_seq_length())
    # The last token's K and V are never computed: 5 + 4 - 1 = 8 would be the next length.
    assert lengths == [5, 6, 7]
    held_nothing(engine)


@pytest.mark.parametrize("slots", [16, 20, 27])
@pytest.mark.parametrize("budget", [4, 2048])
def test_preempted_requests_give_the_same_tokens(tiny, solo_run, slots, budget):
    """A budget of 4 is smaller than a preempted request, which then comes back in chunks."""
    cache = LimitedCache(slots)
    engine = make_engine(*tiny, kv_cache=cache, budget=budget)
    params = SamplingParams(max_tokens=9)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8] * 6, [20, 30]]
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    preempted = []
    engine.runner.release = spy(engine.runner.release, preempted)
    increments = run_to_end(engine)
    assert len(preempted) > len(prompts), "nobody was preempted: the test shows nothing"
    for request_id, prompt in zip(ids, prompts, strict=True):
        # The greedy output is that of a big pool, and max_tokens did not start over.
        assert tokens_of(increments[request_id]) == solo_run(prompt, params)[0]
    held_nothing(engine)


def spy(function, calls):
    def wrapper(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return wrapper


def test_a_preempted_seeded_request_goes_on_with_its_random_numbers(tiny, solo_run):
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    engine = make_engine(*tiny, kv_cache=LimitedCache(16))
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8] * 6]
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    increments = run_to_end(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens_of(increments[request_id]) == solo_run(prompt, params)[0]


def test_a_request_too_big_for_the_pool_is_refused_and_others_finish(tiny):
    engine = make_engine(*tiny, kv_cache=LimitedCache(8))
    with pytest.raises(ValueError, match=r"9 token slots .* has 8"):
        engine.add_request([1] * 9, SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match=r"9 token slots .* has 8"):
        engine.add_request([1] * 4, SamplingParams(max_tokens=6))
    request_id = engine.add_request([1] * 8, SamplingParams(max_tokens=1))
    assert ends(run_to_end(engine)[request_id]) == [StopReason.MAX_TOKENS]
    held_nothing(engine)


def test_an_idle_engine_returns_an_empty_list(engine):
    assert engine.step() == []
    request_id = engine.add_request([1], SamplingParams())
    engine.abort(request_id)
    engine.on_step = lambda step: pytest.fail("on_step is called although nothing is scheduled")
    assert engine.step() == []
    held_nothing(engine)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_frees_at_once(engine, solo_run, steps):
    """While it waits (0 steps), after prefill (1), in decode (3)."""
    params = SamplingParams(max_tokens=8)
    kept = engine.add_request(PROMPTS[1], params)
    gone = engine.add_request(PROMPTS[0], params)
    increments = [increment for _ in range(steps) for increment in engine.step()]
    engine.abort(gone)
    assert gone not in engine.runner.caches
    check_books(engine)
    after = run_to_end(engine)
    assert gone not in after
    tokens = tokens_of([i for i in increments if i.request_id == kept] + after[kept])
    assert tokens == solo_run(PROMPTS[1], params)[0]
    held_nothing(engine)


def test_abort_twice_after_the_end_and_of_an_unknown_id(engine):
    gone = engine.add_request([1, 2], SamplingParams(max_tokens=3))
    engine.abort(gone)
    ended = engine.add_request([1, 2], SamplingParams(max_tokens=1))
    run_to_end(engine)
    for request_id in (gone, ended, "never"):
        with pytest.raises(ValueError, match=f"no live request has the id '{request_id}'"):
            engine.abort(request_id)
    held_nothing(engine)


def test_abort_before_the_last_step(engine):
    request_id = engine.add_request([1, 2], SamplingParams(max_tokens=3))
    engine.step()
    engine.step()
    engine.abort(request_id)
    assert engine.step() == []
    held_nothing(engine)


def test_an_id_can_be_used_again_after_its_end_but_not_before(engine):
    params = SamplingParams(max_tokens=1)
    engine.add_request([1], params, request_id="same")
    with pytest.raises(ValueError, match="request id 'same' is in use"):
        engine.add_request([2], params, request_id="same")
    run_to_end(engine)
    engine.add_request([1], params, request_id="same")
    assert list(run_to_end(engine)) == ["same"]


def test_ids_made_by_the_engine_avoid_those_in_use(engine):
    params = SamplingParams(max_tokens=1)
    engine.add_request([1], params, request_id="1")
    assert engine.add_request([1], params) != "1"
    assert len(run_to_end(engine)) == 2


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], SamplingParams(), "the prompt is empty"),
        ([1, 257], SamplingParams(), "token id 257 is not in the vocabulary: ids go from 0 to 256"),
        ([-1, 2], SamplingParams(), "token id -1 is not in the vocabulary"),
        ("text", SamplingParams(), "must be a list of token ids"),
        ([1.5], SamplingParams(), "must be a list of token ids"),
        (7, SamplingParams(), "must be a list of token ids"),
        ([1] * 2048, SamplingParams(max_tokens=1), "2048 + max_tokens 1 = 2049 tokens"),
        ([1], SamplingParams(max_tokens=2048), "the model handles 2048"),
        ([1], None, "must be a SamplingParams"),
    ],
)
def test_bad_requests_are_refused_and_the_engine_goes_on(tiny, engine, prompt, params, words):
    other = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5))
    engine.step()
    with pytest.raises(ValueError, match=re.escape(words)):
        engine.add_request(prompt, params)
    assert len(run_to_end(engine)[other]) == 4
    held_nothing(engine)


def test_the_longest_request_that_the_model_handles_is_taken(tiny):
    engine = make_engine(*tiny, max_model_len=10)
    request_id = engine.add_request([1] * 6, SamplingParams(max_tokens=4))
    assert len(run_to_end(engine)[request_id]) == 4


def test_tensors_and_tuples_of_token_ids_are_fine(engine, solo_run):
    params = SamplingParams(max_tokens=3)
    a = engine.add_request(torch.tensor([1, 2, 3]), params)
    b = engine.add_request((1, 2, 3), params)
    increments = run_to_end(engine)
    assert tokens_of(increments[a]) == tokens_of(increments[b]) == solo_run([1, 2, 3], params)[0]


def test_eos_ends_a_request_and_is_its_last_token(tiny, solo_run):
    prompt, long = PROMPTS[2], SamplingParams(max_tokens=20)
    tokens = solo_run(prompt, long)[0]
    eos = tokens[7]
    engine = make_engine(*tiny, eos_token_ids=[eos, EOS])
    request_id = engine.add_request(prompt, long)
    increments = run_to_end(engine)[request_id]
    expected = tokens[: tokens.index(eos) + 1]
    assert tokens_of(increments) == expected
    assert expected == transformers_greedy(tiny[0], prompt, 20, eos_token_id=[eos, EOS])
    assert ends(increments) == [StopReason.EOS]
    assert increments[-1].stop_reason == "eos"


def test_eos_in_the_prompt_stops_nothing(tiny):
    engine = make_engine(*tiny)
    prompt = [EOS, 1, 2, 3, EOS, 4]
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=4))
    tokens = tokens_of(run_to_end(engine)[request_id])
    assert tokens == transformers_greedy(tiny[0], prompt, 4)
    assert len(tokens) == 4


def test_ignore_eos(tiny, solo_run):
    tokens = solo_run(PROMPTS[2], SamplingParams(max_tokens=20))[0]
    engine = make_engine(*tiny, eos_token_ids=tokens)
    request_id = engine.add_request(PROMPTS[2], SamplingParams(max_tokens=20, ignore_eos=True))
    assert tokens_of(run_to_end(engine)[request_id]) == tokens


@pytest.mark.parametrize(
    ("configured", "expected"), [(7, {7, EOS}), ([7, 9], {7, 9, EOS}), (None, {EOS})]
)
def test_eos_comes_from_generation_config_and_tokenizer(tiny, monkeypatch, configured, expected):
    model, tokenizer = tiny
    monkeypatch.setattr(model.generation_config, "eos_token_id", configured)
    assert eos_token_ids(model, tokenizer) == expected


def test_a_stop_string_ends_a_request_and_is_cut(tiny, solo_run):
    long = SamplingParams(max_tokens=30)
    tokens, text, _ = solo_run(PROMPTS[4], long)
    at = next(i for i in range(3, len(text) - 2) if "\ufffd" not in text[i : i + 2])
    stop = text[at : at + 2]
    engine = make_engine(*tiny)
    request_id = engine.add_request(PROMPTS[4], SamplingParams(max_tokens=30, stop=stop))
    increments = run_to_end(engine)[request_id]
    assert text_of(increments) == text[: text.index(stop)]
    assert ends(increments) == [StopReason.STOP_STRING]
    assert tokens_of(increments) == tokens[: len(increments)]
    assert len(increments) < 30


def test_a_stop_string_that_never_comes_changes_nothing(tiny, solo_run):
    tokens, text, _ = solo_run(PROMPTS[4], SamplingParams(max_tokens=20))
    stopped = solo(*tiny, PROMPTS[4], SamplingParams(max_tokens=20, stop=text[-1] + "no"))
    assert stopped == (tokens, text, StopReason.MAX_TOKENS)


def test_increments_join_to_the_decoded_tokens(tiny):
    _, tokenizer = tiny
    for seed in range(20):
        params = SamplingParams(max_tokens=30, temperature=2.0, seed=seed)
        tokens, text, _ = solo(*tiny, [1, 2, 3], params)
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)


def test_an_engine_without_a_tokenizer_sends_tokens_only(tiny):
    engine = make_engine(*tiny, make_detokenizer=None)
    request_id = engine.add_request([1, 2], SamplingParams(max_tokens=3))
    increments = run_to_end(engine)[request_id]
    assert len(increments) == 3
    assert text_of(increments) == ""


@pytest.mark.parametrize("failing_call", [0, 1, 5])
@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()])
def test_a_step_that_fails_loses_no_request(tiny, solo_run, failing_call, error):
    """The cache of a half-run step cannot be trusted; the tokens can, so they are run again."""
    engine = make_engine(*tiny)
    params = SamplingParams(max_tokens=6)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS[:3]]
    forward, calls = engine.runner.model.forward, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == failing_call + 1:
            raise error
        return forward(*args, **kwargs)

    increments = {request_id: [] for request_id in ids}
    engine.runner.model.forward = failing
    try:
        for _ in range(50):
            try:
                step = engine.step()
            except (MemoryError, KeyboardInterrupt):
                check_books(engine)
                continue
            for increment in step:
                increments[increment.request_id].append(increment)
    finally:
        engine.runner.model.forward = forward
    for request_id, prompt in zip(ids, PROMPTS, strict=False):
        assert tokens_of(increments[request_id]) == solo_run(prompt, params)[0]
    held_nothing(engine)


def test_a_step_that_preempts_and_fails_keeps_no_old_cache(tiny, solo_run):
    """Whoever was preempted in it comes back with a new cache, not with the one it had."""
    failures = []

    def fail_once(step):
        if step.preempted and not failures:
            failures.append(step)
            raise MemoryError("no memory")

    engine = make_engine(*tiny, kv_cache=LimitedCache(16), on_step=fail_once)
    params = SamplingParams(max_tokens=9)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8] * 6]
    increments = {engine.add_request(prompt, params): [] for prompt in prompts}
    while engine.has_unfinished:
        try:
            for increment in engine.step():
                increments[increment.request_id].append(increment)
        except MemoryError:
            check_books(engine)
    assert failures, "nobody was preempted: the test shows nothing"
    for found, prompt in zip(increments.values(), prompts, strict=True):
        assert tokens_of(found) == solo_run(prompt, params)[0]
    held_nothing(engine)


def test_on_step_sees_finished_requests_before_they_free_their_memory(tiny):
    seen = []
    engine = make_engine(*tiny, on_step=lambda step: seen.append(engine.runner.kv_bytes()))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=1))
    run_to_end(engine)
    config = tiny[0].config
    per_token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
    assert seen == [3 * per_token]
