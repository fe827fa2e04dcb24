"""LLM: texts, chats and token ids in; completions and streams out."""

import pytest
from support import check_books

from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams

SHORT = SamplingParams(max_tokens=5)


@pytest.fixture
def llm(tiny):
    return LLM(*tiny)


def held_nothing(llm):
    check_books(llm.engine)
    assert not llm.engine.has_unfinished
    assert not llm.engine.runner.caches


def test_text_chat_and_token_ids(llm):
    chat = [{"role": "user", "content": "Hi"}]
    text, from_chat, ids = llm.generate(["ab", chat, [64, 65]], SHORT, progress=False)
    assert text.prompt_token_ids == [64, 65]
    assert text == ids
    assert bytes(llm.tokenizer.decode(from_chat.prompt_token_ids), "utf8") == (
        b"user: Hi\nassistant: "
    )


@pytest.mark.parametrize("prompt", ["ab", [64, 65], [{"role": "user", "content": "x"}]])
def test_one_prompt_need_not_be_in_a_list(llm, prompt):
    assert llm.generate(prompt, SHORT, progress=False) == llm.generate(
        [prompt], SHORT, progress=False
    )


def test_no_prompts_no_results(llm):
    assert llm.generate([], SHORT) == []


def test_results_in_input_order_although_short_ones_end_first(llm, solo_run):
    prompts = [[1, 2], [3], [4, 5, 6]]
    params = [SamplingParams(max_tokens=n) for n in (9, 1, 4)]
    for _ in range(2):  # the second call on the same engine, too
        completions = llm.generate(prompts, params, progress=False)
        for prompt, p, completion in zip(prompts, params, completions, strict=True):
            tokens, text, reason = solo_run(prompt, p)
            assert completion.prompt_token_ids == prompt
            assert (completion.token_ids, completion.text) == (tokens, text)
            assert completion.stop_reason == reason
        held_nothing(llm)


def test_stream_yields_what_generate_joins(llm):
    prompts = ["one", "two", "three"]
    texts = [""] * 3
    for position, increment in llm.stream(prompts, SamplingParams(max_tokens=12)):
        texts[position] += increment.text
    completions = llm.generate(prompts, SamplingParams(max_tokens=12), progress=False)
    assert texts == [completion.text for completion in completions]


def test_two_streams_and_a_generate_at_the_same_time(llm, solo_run):
    """Each step serves all of them; nobody loses an increment to somebody else's loop."""
    params = SamplingParams(max_tokens=6)
    first, second = llm.stream([[1, 2]], params), llm.stream([[3, 4], [5]], params)
    got = {"first": [next(first)[1]], "second": [next(second)[1]]}
    (completion,) = llm.generate([[6, 7]], params, progress=False)
    assert completion.token_ids == solo_run([6, 7], params)[0]
    got["first"] += [increment for _, increment in first]
    got["second"] += [increment for _, increment in second]
    assert [i.token_id for i in got["first"]] == solo_run([1, 2], params)[0]
    assert len(got["second"]) == 12
    held_nothing(llm)


def test_closing_a_stream_aborts_its_requests(llm):
    stream = llm.stream(["one", "two"], SamplingParams(max_tokens=50))
    next(stream)
    assert llm.engine.has_unfinished
    stream.close()
    held_nothing(llm)


def test_a_stream_ends_when_its_request_is_aborted(llm):
    stream = llm.stream("one", SamplingParams(max_tokens=50))
    _, increment = next(stream)
    llm.engine.abort(increment.request_id)
    assert list(stream) == []
    held_nothing(llm)


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (["fine", ""], SHORT, "the prompt is empty"),
        (["fine", []], SHORT, "the prompt is empty"),
        (["fine", [999]], SHORT, "token id 999 is not in the vocabulary"),
        (["fine", "x" * 2044], SHORT, "the model handles 2048"),
        (["fine", "also"], [SHORT], "1 params for 2 prompts"),
        ([[{"role": "user"}, 3]], SHORT, "the chat template refuses"),
    ],
)
def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_behind(llm, prompts, params, words):
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, params, progress=False)
    held_nothing(llm)
    assert len(llm.generate("fine", SHORT, progress=False)[0].token_ids) == 5


def test_a_model_without_a_chat_template_says_so(tiny, monkeypatch):
    monkeypatch.setattr(tiny[1], "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        LLM(*tiny).generate([[{"role": "user", "content": "Hi"}]], progress=False)


def test_a_model_in_train_mode_answers_the_same_every_time(tiny):
    import transformers

    config = transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=6, vocab_size=257, n_positions=256, initializer_range=0.3
    )
    llm = LLM(transformers.GPT2LMHeadModel(config).train(), tiny[1])
    assert len({llm.generate("Hi", SHORT, progress=False)[0].text for _ in range(3)}) == 1


def test_a_model_with_a_running_state_is_refused_by_name(tiny):
    import transformers

    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=257, state_size=4
    )
    with pytest.raises(RuntimeError, match="mamba keeps a running state"):
        LLM(transformers.MambaForCausalLM(config), tiny[1])


def test_a_loaded_model_needs_its_tokenizer(tiny):
    with pytest.raises(ValueError, match="needs its tokenizer"):
        LLM(tiny[0])
