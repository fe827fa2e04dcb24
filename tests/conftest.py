import os

import pytest
import torch
from hypothesis import Phase, settings

# For runs that are expected to fail, and of which nobody reads the examples.
settings.register_profile("no-shrink", phases=[Phase.explicit, Phase.reuse, Phase.generate])


def pytest_configure(config):
    # A reader's files fail often, and shrinking what a random engine did takes minutes.
    if config.getoption("--impl") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("no-shrink")


# Triton decides when it is first imported whether its kernels are compiled or interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The package is imported inside the fixtures: `--impl` must have its say first.


@pytest.fixture(scope="session")
def tiny():
    """(model, tokenizer): two layers of random weights, one token per byte."""
    from minivllm.models import tiny_random_model

    return tiny_random_model()


@pytest.fixture(scope="session")
def real():
    """(model, tokenizer) of the packaged SmolLM2; fetched and converted the first time."""
    from minivllm.models import load_model

    return load_model("smollm2-135m")


@pytest.fixture(scope="session")
def real_requests(real):
    """24 requests on the real model: (prompts, params, the tokens of chapter 1's engine)."""
    from minivllm.llm import LLM
    from minivllm.sampling_params import SamplingParams

    ids = real[1]("The wind had turned in the night, and the boats lay the other way. " * 8)
    prompts = [ids.input_ids[i : i + 1 + (i * 37) % 61] for i in range(24)]
    params = [SamplingParams(max_tokens=2 + 3 * i % 11) for i in range(24)]
    answers = LLM(*real).generate(prompts, params, progress=False)
    return prompts, params, [answer.token_ids for answer in answers]


@pytest.fixture(scope="session")
def solo_run(tiny):
    """solo_run(prompt, params) on the tiny model: (tokens, text, stop reason), remembered."""
    from support import solo

    results = {}

    def run(prompt, params):
        key = (tuple(prompt), params)
        if key not in results:
            results[key] = solo(*tiny, prompt, params)
        return results[key]

    return run
