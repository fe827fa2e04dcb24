"""The real model under a block manager's books: preemptions change no token of chapter 1's."""

import pytest
from support import make_engine, run_to_end, tokens_of

from minivllm.memory.block_manager import BlockManager
from minivllm.sampling_params import SamplingParams

pytestmark = pytest.mark.real_model


def test_tokens_equal_chapter_1_s_under_preemption(real):
    model, tokenizer = real
    text = tokenizer("The wind had turned in the night, and the boats lay still. " * 3).input_ids
    prompts = [text[i : i + 3 + 4 * i] for i in range(5)]

    def answers(kv_cache=None):
        engine = make_engine(model, tokenizer, kv_cache=kv_cache)
        preempted = []
        engine.on_step = lambda step: preempted.extend(step.preempted)
        ids = [engine.add_request(prompt, SamplingParams(max_tokens=8)) for prompt in prompts]
        increments = run_to_end(engine)
        return [tokens_of(increments[request_id]) for request_id in ids], len(preempted)

    expected, _ = answers()
    found, preempted = answers(BlockManager(8, 4))
    assert found == expected
    assert preempted > 0
