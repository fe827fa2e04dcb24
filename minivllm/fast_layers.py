"""FastLayers: the same layers of the same model, computed with less time around the products.

A step multiplies a few rows, or some hundreds, by every weight. Two things beside reading the
weights cost time on a CPU. First the product: torch has several calls for it, by two libraries, and
which is fastest depends on the processor, the weight's shape and the number of rows. They are timed
once, at start-up. Second the many small calls between the products: a Llama layer is written here
with fewer of them. The weights stay where they are, and nothing is copied.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from minivllm.attention.hf import KVAccess, pool_attention
from minivllm.fast_math import add_and_norm, in_order, rms_norm, rotate

ROWS = (1, 4, 16, 32, 64, 256, 512)  # the numbers of rows that are timed
SMALLEST = 2**16  # bytes of a weight; below, there is nothing to gain
SAMPLE = 2**25  # bytes of weights of one shape that are timed: more than a core's own cache
LARGEST = 2**30  # multiplications of a product that is timed; more rows get what fewer rows have
ROUNDS = 3
CHUNK = 256  # rows of an MLP that are computed together: what lies between stays in the cache
GAIN = 0.95  # another product is taken where it needs less than this share of the usual one's time

Way = TypeVar("Way")
Product = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]
WeightProduct = Callable[[Tensor, Tensor], Tensor]  # the same, and the weight [out, in]


class Layers:
    """Within `with layers():` some modules of a model compute in another way."""

    def __init__(self) -> None:
        self._forwards: list[tuple[dict[str, Any], Callable]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        try:
            # A module looks for `forward` on itself first. Its __setattr__ would take longer.
            for attributes, forward in self._forwards:
                attributes["forward"] = forward
            yield
        finally:
            for attributes, _ in self._forwards:
                attributes.pop("forward", None)


class FastLayers(Layers):
    """Linear layers of any model; whole layers of Llama models, unless `whole` is False.

    Only float32 on a CPU; elsewhere, and where weights are small, nothing is replaced.
    """

    def __init__(self, model: torch.nn.Module, *, whole: bool = True) -> None:
        super().__init__()
        linears = [m for m in model.modules() if type(m) is torch.nn.Linear and is_worth_it(m)]
        weights: dict[torch.Size, list[Tensor]] = {}
        for linear in linears:
            weights.setdefault(linear.weight.shape, []).append(linear.weight.detach())
        self.fastest = {shape: fastest_products(same) for shape, same in weights.items()}
        products = {m: product_of(m, self.fastest[m.weight.shape]) for m in linears}
        for layer in model.modules():
            is_llama = type(layer).__name__ == "LlamaDecoderLayer"
            if whole and is_llama and has_all(layer, products):
                self._forwards.append((layer.__dict__, llama_layer(layer, products)))
        for linear, product in products.items():
            self._forwards.append((linear.__dict__, linear_forward(product)))


def is_worth_it(linear: torch.nn.Linear) -> bool:
    weight = linear.weight
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    return fits and weight.nbytes >= SMALLEST


def has_all(layer: torch.nn.Module, products: dict[torch.nn.Linear, Product]) -> bool:
    linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    return len(linears) == 7 and all(linear in products for linear in linears)


def linear_forward(product: Product) -> Product:
    def forward(x: Tensor) -> Tensor:
        output = product(x.reshape(-1, x.shape[-1]))
        return output.view(*x.shape[:-1], output.shape[-1])

    return forward


def llama_layer(layer: Any, products: dict[torch.nn.Linear, Product]) -> Callable[..., Tensor]:
    """forward of a LlamaDecoderLayer: the same mathematics in fewer calls."""
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, o = (products[getattr(attention, f"{name}_proj")] for name in "qkvo")
    gate, up, down = (products[getattr(mlp, f"{name}_proj")] for name in ("gate", "up", "down"))
    norms = layer.input_layernorm, layer.post_attention_layernorm
    (weight, eps), (weight_2, eps_2) = ((norm.weight, norm.variance_epsilon) for norm in norms)
    head_dim, scaling, activation = attention.head_dim, attention.scaling, mlp.act_fn

    def forward(
        hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], kv_access: KVAccess,
        **others: Any,
    ) -> Tensor:  # fmt: skip
        x = hidden_states[0]
        num_tokens = len(x)
        normed = rms_norm(x, weight, eps)
        cos, sin = (angles[0] for angles in position_embeddings)
        query = rotate(q(normed).view(num_tokens, -1, head_dim), cos, sin)
        key = rotate(k(normed).view(num_tokens, -1, head_dim), cos, sin)
        value = v(normed).view(num_tokens, -1, head_dim)
        query, key, value = (new.transpose(0, 1)[None] for new in (query, key, value))
        attended, _ = pool_attention(
            attention, query, key, value, None, kv_access=kv_access, scaling=scaling
        )
        attended = o(attended.view(num_tokens, -1))
        output = torch.empty_like(x)
        pieces = zip(output.split(CHUNK), x.split(CHUNK), attended.split(CHUNK), strict=True)
        for total, before, change in pieces:
            normed = add_and_norm(total, before, change, weight_2, eps_2)
            total += in_order(down(activation(gate(normed)).mul_(up(normed))))
        return output[None]

    return forward


def usual(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t())


def turned(x: Tensor, weight: Tensor) -> Tensor:
    return upright(torch.mm(weight, x.t()))


def by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """A part of the weight for each thread: with one row torch would use a single thread."""
    parts = torch.get_num_threads()
    width = weight.shape[1]
    if len(weight) % parts:
        return turned(x, weight)
    columns = x.t().expand(parts, width, len(x))
    outputs = torch.bmm(weight.view(parts, -1, width), columns)
    return upright(outputs.view(len(weight), len(x)))


def upright(output: Tensor) -> Tensor:
    """[out, rows] -> [rows, out]. A single row, turned, would have steps of 1 in both directions;
    the next product would not see that it lies in order, and would take several times as long."""
    return output.t() if output.shape[1] > 1 else output.view(1, -1)


PRODUCTS = [usual, turned, in_parts]
if torch.backends.mkldnn.is_available():
    PRODUCTS.append(by_onednn)


def product_of(linear: torch.nn.Linear, fastest: SequenceOf[WeightProduct]) -> Product:
    """fastest: the product for each member of ROWS."""
    weight, bias = linear.weight.detach(), linear.bias
    # For any number of rows: as for the next larger member of ROWS, or the largest.
    by_rows = [fastest[bisect_left(ROWS, rows)] for rows in range(ROWS[-1])]
    above = fastest[-1]

    def product(x: Tensor) -> Tensor:
        rows = len(x)
        output = (by_rows[rows] if rows < len(by_rows) else above)(x, weight)
        return output if bias is None else output + bias

    return product


@torch.inference_mode()
def fastest_products(weights: list[Tensor]) -> list[WeightProduct]:
    """The fastest product for each member of ROWS, with weights of this shape."""
    found: list[WeightProduct] = []
    for rows in ROWS:
        size = rows * weights[0].numel()
        if found and size > LARGEST:
            found.append(found[-1])
            continue
        # Fewer weights as rows grow: what then takes the time is to multiply, not to read.
        some = weights[: max(1, min(SAMPLE // weights[0].nbytes, LARGEST // (8 * size)))]
        found.append(
            fastest(PRODUCTS, partial(multiply, torch.randn(rows, some[0].shape[1]), some))
        )
    return found


def multiply(x: Tensor, weights: SequenceOf[Tensor], product: WeightProduct) -> None:
    for weight in weights:
        product(x, weight).contiguous()  # what follows reads it row by row


def fastest(ways: SequenceOf[Way], run: Callable[[Way], None]) -> Way:
    """The first of the ways, unless run(another) needs clearly less time."""
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for way in ways:
            start = time.perf_counter()
            run(way)
            seconds[way] = min(seconds[way], time.perf_counter() - start)
    best = min(ways, key=seconds.__getitem__)
    return best if seconds[best] < GAIN * seconds[ways[0]] else ways[0]
