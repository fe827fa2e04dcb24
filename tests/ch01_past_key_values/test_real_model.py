"""The packaged SmolLM2 through the engine and the command line, against transformers' generate."""

import json
import subprocess
import sys

import pytest
import torch
from support import make_engine, run_to_end, tokens_of, transformers_greedy

from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams

pytestmark = pytest.mark.real_model

# Chosen with tools/margins.py: along each answer the two best logits differ by more than 0.05,
# and the noise between two ways of summing is about 1e-4.
PROMPTS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "List three fruits.",
    "Who wrote Hamlet?",
    "Give me a short recipe for pancakes.",
    "Tell me about the history of the printing press, and why it mattered for the spread of "
    "books in Europe.",
]
TEXT = (
    "A ship left the harbour at dawn with eleven people on board, four of whom had never been at "
    "sea. The captain kept a log. On the first day he wrote down the wind, the course and the "
    "names of the passengers; on the second, that the water in the third barrel was bad. "
) * 5


def generate_json(*arguments):
    """What `python -m minivllm generate --json` prints, which must be JSON and nothing else."""
    command = [sys.executable, "-m", "minivllm", "generate", "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def references(real):
    """[(prompt token ids, greedy token ids)] from transformers alone."""
    model, tokenizer = real
    result = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        result.append((ids, transformers_greedy(model, ids, 24)))
    return result


def test_the_command_line_answers_like_transformers_all_together(real, references):
    _, tokenizer = real
    answers = generate_json(*PROMPTS, "--max-tokens", "24")
    assert [set(answer) for answer in answers] == [
        {"prompt_token_ids", "token_ids", "text", "stop_reason"}
    ] * len(PROMPTS)
    for answer, (prompt, tokens) in zip(answers, references, strict=True):
        assert answer["prompt_token_ids"] == prompt
        assert answer["token_ids"] == tokens
        assert answer["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
        ended = tokens[-1] == tokenizer.eos_token_id
        assert answer["stop_reason"] == ("eos" if ended else "max_tokens")


def test_the_command_line_answers_one_prompt_like_transformers(references):
    (answer,) = generate_json(PROMPTS[0], "--max-tokens", "24")
    assert answer["token_ids"] == references[0][1]


def test_raw_prompts_skip_the_chat_template(real):
    (answer,) = generate_json("The quick brown", "--raw", "--max-tokens", "3")
    assert answer["prompt_token_ids"] == real[1]("The quick brown").input_ids


@pytest.mark.parametrize("budget", [2048, 16])
def test_each_alone_and_a_budget_smaller_than_a_prompt(real, references, budget):
    for prompt, tokens in references:
        engine = make_engine(*real, budget=budget)
        request_id = engine.add_request(prompt, SamplingParams(max_tokens=24))
        assert tokens_of(run_to_end(engine)[request_id]) == tokens


def test_generate_twice_on_one_llm(real, references):
    """All results, in the order of the prompts, the second time as well."""
    llm = LLM(*real)
    for order in ([0, 1, 2], [2, 0, 1]):
        completions = llm.generate(
            [references[i][0] for i in order], SamplingParams(max_tokens=8), progress=False
        )
        assert [c.token_ids for c in completions] == [references[i][1][:8] for i in order]


def first_real_difference(model, prompt, ours, reference):
    """None, or the margin of transformers' choice where the tokens part; under 1e-3 is a tie."""
    for position, (a, b) in enumerate(zip(ours, reference, strict=True)):
        if a != b:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + reference[:position]])).logits[0, -1]
            margin = float(logits[b] - logits[a])
            return None if margin < 1e-3 else margin
    return None


@pytest.mark.full
def test_twenty_prompts_of_1_to_300_tokens(real):
    model, tokenizer = real
    ids = tokenizer(TEXT).input_ids
    assert len(ids) >= 300
    prompts = [ids[: 1 + round(i * 299 / 19)] for i in range(20)]
    assert (len(prompts[0]), len(prompts[-1])) == (1, 300)
    references = [transformers_greedy(model, prompt, 64) for prompt in prompts]
    params = SamplingParams(max_tokens=64)
    llm = LLM(model, tokenizer)
    together = llm.generate(prompts, params, progress=False)
    for prompt, reference, completion in zip(prompts, references, together, strict=True):
        (alone,) = llm.generate([prompt], params, progress=False)
        for tokens in (completion.token_ids, alone.token_ids):
            assert len(tokens) == len(reference)
            assert first_real_difference(model, prompt, tokens, reference) is None
