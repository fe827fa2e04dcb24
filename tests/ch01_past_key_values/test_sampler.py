"""The sampler: greedy, temperature, top-k, top-p, and a stream of its own for each request."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from minivllm.sampler import Sampler, keep_top_k, keep_top_p
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence

VOCAB = 50


def sequences(*params):
    return [Sequence(str(i), [1], p) for i, p in enumerate(params)]


def draws(logits, params, count):
    """Token ids of count draws for one request."""
    (seq,) = sequences(params)
    return [Sampler().sample(logits[None], [seq])[0] for _ in range(count)]


def kept(filtered):
    """The ranks that a filter left, as one set per row."""
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in filtered]


@pytest.fixture
def sorted_logits():
    torch.manual_seed(0)
    return torch.randn(6, VOCAB, dtype=torch.float64).sort(descending=True).values * 2


def test_top_k_keeps_what_transformers_keeps(sorted_logits):
    top_k = [1, 2, 7, VOCAB - 1, VOCAB, VOCAB + 1]
    ours = keep_top_k(sorted_logits, torch.tensor(top_k))
    for row, k in enumerate(top_k):
        reference = TopKLogitsWarper(k)(None, sorted_logits[row : row + 1])
        assert torch.equal(ours[row : row + 1], reference)


def test_top_k_of_zero_keeps_everything(sorted_logits):
    assert torch.equal(keep_top_k(sorted_logits, torch.zeros(6, dtype=torch.long)), sorted_logits)


def test_top_p_keeps_what_transformers_keeps(sorted_logits):
    top_p = [0.01, 0.3, 0.5, 0.9, 0.999, 1.0]
    ours = keep_top_p(sorted_logits, torch.tensor(top_p, dtype=torch.float64))
    for row, p in enumerate(top_p[:-1]):
        reference = TopPLogitsWarper(p)(None, sorted_logits[row : row + 1])
        assert kept(ours[row : row + 1]) == kept(reference)
    assert torch.equal(ours[-1], sorted_logits[-1])


def test_top_k_counts_equal_logits_one_by_one():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    assert kept(keep_top_k(logits, torch.tensor([2]))) == [{0, 1}]


def test_top_p_of_one_keeps_everything():
    """Also where the sum of the first probabilities rounds to 1, or to a little more."""
    torch.manual_seed(3)
    rows = (8 * torch.randn(400, VOCAB, dtype=torch.float64)).sort(descending=True).values
    probs = rows.softmax(-1)
    reached = probs.cumsum(-1) - probs >= 1
    assert reached.any(), "no such row: the test shows nothing"
    assert torch.equal(keep_top_p(rows, torch.ones(400, dtype=torch.float64)), rows)


def test_top_p_that_is_just_reached_keeps_nothing_more():
    """Four times a quarter, without rounding: two reach 0.5."""
    logits = torch.zeros(1, 4, dtype=torch.float64)
    assert kept(keep_top_p(logits, torch.tensor([0.5], dtype=torch.float64))) == [{0, 1}]


def test_top_p_by_hand():
    """Probabilities 0.5, 0.3, 0.15, 0.05: 0.7 needs the first two, 0.81 the third."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log().repeat(4, 1)
    top_p = torch.tensor([0.4, 0.7, 0.81, 1e-8], dtype=torch.float64)
    assert kept(keep_top_p(logits, top_p)) == [{0}, {0, 1}, {0, 1, 2}, {0}]


@pytest.mark.parametrize("temperature", [0.0, 0, 1e-6])
def test_temperature_zero_and_almost_zero_are_greedy(temperature):
    logits = torch.randn(VOCAB)
    assert draws(logits, SamplingParams(temperature=temperature), 5) == [int(logits.argmax())] * 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-8),
        SamplingParams(temperature=1.0, top_p=1e-300),
        SamplingParams(temperature=100.0, top_k=1, top_p=0.5),
    ],
)
def test_a_filter_that_leaves_one_token_takes_the_likeliest(params):
    logits = torch.randn(VOCAB)
    assert draws(logits, params, 20) == [int(logits.argmax())] * 20


@pytest.mark.parametrize("top_k", [0, 1, VOCAB, VOCAB + 1])
def test_any_legal_top_k_leaves_tokens_to_draw(top_k):
    tokens = draws(torch.zeros(VOCAB), SamplingParams(temperature=1.0, top_k=top_k), 20)
    assert all(0 <= token < VOCAB for token in tokens)


def test_one_batch_mixes_greedy_and_random_rows_with_masked_logits():
    torch.manual_seed(1)
    logits = torch.randn(4, VOCAB)
    logits[:, ::2] = -torch.inf
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1e300, seed=2),
    ]
    for _ in range(50):
        tokens = Sampler().sample(logits, sequences(*params))
        assert all(token % 2 == 1 for token in tokens), "a masked token was drawn"
        assert tokens[:2] == logits[:2].argmax(dim=-1).tolist()


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        tokens = draws(logits, SamplingParams(temperature=temperature, seed=0), 4000)
        found = torch.bincount(torch.tensor(tokens), minlength=4) / len(tokens)
        # Standard error under 0.008: 0.03 is almost four of them.
        torch.testing.assert_close(
            found, (logits / temperature).softmax(-1), atol=0.03, rtol=0, check_dtype=False
        )


def test_top_p_looks_at_the_probabilities_after_temperature_and_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # top_k leaves 0.4 and 0.3: renewed, 0.571 and 0.429; so 0.55 keeps only the first.
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.55, seed=3)
    assert set(draws(logits, params, 50)) == {0}


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it():
    torch.manual_seed(2)
    steps = torch.randn(12, 3, VOCAB)
    seeded = SamplingParams(temperature=1.0, seed=11)
    (alone,) = sequences(seeded)
    expected = [Sampler().sample(logits[:1], [alone])[0] for logits in steps]

    for others in ([SamplingParams()] * 2, [SamplingParams(temperature=1.0, seed=5)] * 2):
        batch = sequences(seeded, *others)
        tokens = [Sampler().sample(logits, batch)[0] for logits in steps]
        assert tokens == expected
        # In another place of the batch, too.
        batch = sequences(*others, seeded)
        assert [Sampler().sample(x.roll(-1, dims=0), batch)[2] for x in steps] == expected


def test_different_seeds_and_no_seed_differ():
    logits = torch.zeros(VOCAB)
    runs = {
        tuple(draws(logits, SamplingParams(temperature=1.0, seed=seed), 20))
        for seed in (0, 1, 2, None, None)
    }
    assert len(runs) == 5
