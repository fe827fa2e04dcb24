"""Layers computed in fewer calls: the same logits, and the model as it was afterwards."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from minivllm import fast_layers, fast_math, onednn_layers
from minivllm.attention.batch import Batch
from minivllm.attention.gather import GatherAttention
from minivllm.attention.hf import KVAccess, attention_through_pool
from minivllm.attention.kv_pool import KVPool
from minivllm.errors import RequestError
from minivllm.fast_layers import ROWS, FastLayers
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm.sequence import Sequence
from minivllm.stages import KVOptions

SIZES = {
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192,
    "intermediate_size": 320, "vocab_size": 300, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "llama with biases", "qwen2"])
def model(request):
    """Weights large enough to be worth it; in qwen2 the linear layers alone are replaced."""
    torch.manual_seed(0)
    if request.param == "qwen2":
        made = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    else:
        biased = request.param == "llama with biases"
        config = LlamaConfig(**SIZES, head_dim=48, attention_bias=biased, mlp_bias=biased)
        made = LlamaForCausalLM(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return made.eval()


@torch.inference_mode()
def logits_of(model, prompts, layers, kept=0):
    """After each token of a prefill in one packed pass, or those of them that are kept; then of one
    decode step."""
    head_dim = model.model.layers[0].self_attn.head_dim
    pool = KVPool(3, 40, 4, 2, head_dim)
    reader, found = GatherAttention(), []
    sequences = [
        Sequence(f"{i}", prompt, SamplingParams(), [], list(range(8 * i, 8 * i + 8)))
        for i, prompt in enumerate(prompts)
    ]
    for logits_to_keep in (kept, 0):
        for seq in sequences:
            seq.num_scheduled = seq.num_remaining
        batch = Batch.of(sequences, 4, torch.device("cpu"))
        with attention_through_pool(model), layers():
            output = model(
                input_ids=batch.input_ids[None], position_ids=batch.positions[None],
                use_cache=False, kv_access=KVAccess(pool, batch, reader),
                logits_to_keep=logits_to_keep,
            )  # fmt: skip
        found.append(output.logits[0])
        for seq in sequences:
            seq.num_computed, seq.num_scheduled = seq.context_len, 0
            seq.generated_token_ids.append(7)
    return found


PROMPTS = [[5, 6, 7, 8, 9], [1], list(range(100, 120))]


@pytest.mark.parametrize("product", fast_layers.PRODUCTS)
def test_the_same_logits(model, product, monkeypatch):
    """With each product for every number of rows."""
    from contextlib import nullcontext

    monkeypatch.setattr(fast_layers, "fastest_products", lambda weights: [product] * len(ROWS))
    layers = FastLayers(model)
    assert layers.fastest, "nothing was replaced"
    expected = logits_of(model, PROMPTS, nullcontext)
    for a, b in zip(logits_of(model, PROMPTS, layers), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "timed"),
    [(1, 1), (2, 4), (4, 4), (5, 16), (64, 64), (65, 256), (512, 512), (900, 512)],
)
def test_a_product_is_that_of_the_next_larger_number_of_rows(rows, timed):
    products = [lambda x, weight, said=number: torch.full((1, 1), said) for number in ROWS]
    product = fast_layers.product_of(torch.nn.Linear(2, 3, bias=False), products)
    assert product(torch.zeros(rows, 2)).item() == timed


def test_a_weight_too_large_to_be_timed_with_many_rows_gets_what_one_row_has(monkeypatch):
    monkeypatch.setattr(fast_layers, "LARGEST", 1)
    found = fast_layers.fastest_products([torch.zeros(8, 8)])
    assert len(found) == len(ROWS)
    assert set(found) == {found[0]}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_weight_in_parts_whether_or_not_threads_divide_it(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, weight = torch.randn(5, 7), torch.randn(16, 7)
    torch.testing.assert_close(fast_layers.in_parts(x, weight), x @ weight.t())


@pytest.mark.parametrize("product", fast_layers.PRODUCTS)
def test_a_single_row_has_the_steps_of_a_row(product):
    """A turned column has steps (1, 1). It is contiguous for torch, and yet bmm copies it."""
    assert product(torch.randn(1, 8), torch.randn(6, 8)).stride() == (6, 1)


def test_an_mlp_in_chunks_is_the_mlp(model, monkeypatch):
    before = logits_of(model, PROMPTS, FastLayers(model))
    monkeypatch.setattr(fast_layers, "CHUNK", 4)
    for a, b in zip(logits_of(model, PROMPTS, FastLayers(model)), before, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_whole_layers_of_llama_alone_are_replaced(model):
    layers = FastLayers(model)
    is_llama = type(model).__name__ == "LlamaForCausalLM"
    with layers():
        replaced = ["forward" in vars(layer) for layer in model.model.layers]
    assert replaced == [is_llama] * 3
    with FastLayers(model, whole=False)():
        assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_afterwards_the_model_is_as_it_was(model):
    def fail():
        assert any("forward" in vars(module) for module in model.modules())
        raise ZeroDivisionError

    layers = FastLayers(model)
    with pytest.raises(ZeroDivisionError), layers():
        fail()
    assert not any("forward" in vars(module) for module in model.modules())


def test_small_or_half_precision_weights_are_left_alone(tiny, model):
    assert FastLayers(tiny[0]).fastest == {}
    half = torch.nn.Linear(512, 512).to(torch.bfloat16)
    assert FastLayers(half).fastest == {}


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@needs_onednn
@pytest.mark.parametrize("chunk", [512, 4, 1])
def test_the_same_logits_by_onednn(model, chunk, monkeypatch):
    from contextlib import nullcontext

    if "Llama" not in type(model).__name__:
        pytest.skip("its forward pass is Llama's")
    monkeypatch.setattr(onednn_layers, "CHUNK", chunk)
    layers = onednn_layers.OneDnnLayers(model)
    with layers():
        assert "forward" in vars(model)
    expected = logits_of(model, PROMPTS, nullcontext)

    def refuse(*given):
        raise AssertionError("torch computed a linear layer")

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", refuse)
        found = logits_of(model, PROMPTS, layers)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert not any("forward" in vars(module) for module in model.modules())


@needs_onednn
@pytest.mark.parametrize("prompts", [[[5]], [[5], [250]]])
@pytest.mark.parametrize("product", [None, *fast_layers.PRODUCTS])
def test_the_same_logits_with_few_rows(model, product, prompts, monkeypatch):
    """With each product, whichever is fastest here."""
    if "Llama" not in type(model).__name__:
        pytest.skip("its forward pass is Llama's")
    from contextlib import nullcontext

    used = []

    def counted(x, weight):
        used.append(weight)
        return product(x, weight)

    monkeypatch.setattr(onednn_layers, "fastest", lambda ways, run: product and counted)
    found = logits_of(model, prompts, onednn_layers.OneDnnLayers(model))
    # 3 layers of 7 weights, and the head; prefill and decode.
    assert len(used) == (2 * (3 * 7 + 1) if product else 0)
    for a, b in zip(found, logits_of(model, prompts, nullcontext), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("seconds", "expected"), [((10, 8, 9), "b"), ((10, 9.7, 12), "a"), ((3, 8, 2.5), "c")]
)
def test_another_way_is_taken_if_it_is_clearly_faster(seconds, expected, monkeypatch):
    now, takes = [0.0], dict(zip("abc", seconds, strict=True))
    monkeypatch.setattr(fast_layers.time, "perf_counter", lambda: now[0])

    def run(way):
        now[0] += takes[way] + (100 if now[0] == 0 else 0)  # the very first call takes long

    assert fast_layers.fastest("abc", run) == expected


@needs_onednn
@pytest.mark.parametrize("kept", [0, 1, 3, [4], [4, 25], []])
def test_the_rows_that_are_asked_for(model, kept):
    if "Llama" not in type(model).__name__:
        pytest.skip("its forward pass is Llama's")
    from contextlib import nullcontext

    rows = kept if isinstance(kept, list) else slice(-kept, None)
    expected = logits_of(model, PROMPTS, nullcontext)[0][rows]
    if isinstance(kept, list):
        kept = torch.tensor(kept, dtype=torch.long)
    found = logits_of(model, PROMPTS, onednn_layers.OneDnnLayers(model), kept)[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@needs_onednn
@pytest.mark.parametrize("attention", ["gather", "numba"])
def test_the_same_tokens_by_onednn(tiny, attention):
    if attention == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[3, 4, 5], list(range(9, 60)), [7]]
    kv = KVOptions("paged", 512, block_size=4, attention=attention)
    by = {name: LLM(*tiny, kv=kv, layers=name) for name in ("torch", "onednn")}
    torch_tokens, onednn_tokens = (
        [c.token_ids for c in llm.generate(prompts, params, progress=False)] for llm in by.values()
    )
    assert onednn_tokens == torch_tokens


def test_onednn_layers_refuse_what_they_cannot_compute(tiny, model, monkeypatch):
    if type(model).__name__ == "Qwen2ForCausalLM":
        with pytest.raises(RequestError, match=r"for a Llama model .* qwen2 .*: use torch"):
            onednn_layers.OneDnnLayers(model)
    half = copy.deepcopy(tiny[0]).to(torch.bfloat16)
    with pytest.raises(RequestError, match=r"float32 on a CPU, and .*bfloat16"):
        onednn_layers.OneDnnLayers(half)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(RequestError, match="a torch with oneDNN, and this has none: use torch"):
        onednn_layers.OneDnnLayers(tiny[0])


def test_layers_that_nobody_knows_are_refused(tiny):
    with pytest.raises(RequestError, match="layers is 'onednm': use one of torch, onednn"):
        LLM(*tiny, kv=KVOptions("paged", 64), layers="onednm")
    with pytest.raises(RequestError, match="past_key_values goes with layers torch, not onednn"):
        LLM(*tiny, layers="onednn")


@pytest.mark.parametrize("rows", [1, 3, 65, 200])
def test_small_functions_by_numba_and_by_torch(rows):
    x, weight = torch.randn(rows, 96), torch.randn(96)
    torch.testing.assert_close(
        fast_math.rms_norm(x, weight, 1e-5), fast_math.rms_norm_by_torch(x, weight, 1e-5)
    )
    for change in (torch.randn(rows, 96), torch.randn(96, rows).t()):
        total, expected_total = torch.empty(2, rows, 96)
        found = fast_math.add_and_norm(total, x, change, weight, 1e-5)
        expected = fast_math.add_and_norm_by_torch(expected_total, x, change, weight, 1e-5)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(total, expected_total)
        torch.testing.assert_close(total, x + change)
    heads, angles = torch.randn(5, rows, 16).transpose(0, 1), torch.randn(rows, 16)
    for some in ((), (0, 2), (2, 5)):  # all heads, or those of the queries, or of the keys
        found = fast_math.rotate(heads, angles.cos(), angles.sin(), *some)
        expected = fast_math.rotate_by_torch(heads, angles.cos(), angles.sin(), *some)
        torch.testing.assert_close(found, expected)
