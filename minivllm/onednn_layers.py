"""OneDnnLayers: all of a Llama model but attention, with its products by oneDNN.

torch brings oneDNN with it. Each weight is copied once, into the order in which its product reads
it. That costs memory for the weights a second time, and gains most where a step has several rows.
What follows a product (SiLU, times, plus) is done while its results are still in the registers.
With a row or two, a product of fast_layers may be faster, with the weight as the model has it. They
are timed at start-up.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.modeling_outputs import CausalLMOutputWithPast

from minivllm.attention.hf import KVAccess, pool_attention
from minivllm.errors import RequestError
from minivllm.fast_layers import PRODUCTS, SAMPLE, SMALLEST, Layers, WeightProduct, fastest
from minivllm.fast_math import rms_norm, rotate

CHUNK = 512  # rows of an MLP that are computed together: more would take more memory
FEW = 2  # rows, at most, for which other products are timed


class OneDnnLayers(Layers):
    """Within `with onednn_layers():` the forward pass of a Llama model is llama_forward's.

    Raises RequestError for another model, another dtype than float32, or another device than a
    CPU for which torch has oneDNN. The weights must not change after this.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        refuse_other_models(model)
        super().__init__()
        self._forwards.append((model.__dict__, llama_forward(model)))


class Packed:
    """The weights of some linear layers with the same input, one below the other, for oneDNN.

    x, and what is added or multiplied: float32, row by row in memory.
    """

    def __init__(self, *linears: Any) -> None:
        self.weights = [linear.weight.detach() for linear in linears]
        # One alone is not copied twice: the head's is a fifth of all weights.
        weight = torch.cat(self.weights) if len(linears) > 1 else self.weights[0]
        # The rows that are expected; the order of the weight hardly depends on it.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, CHUNK)
        has_bias = linears[0].bias is not None
        self._bias = torch.cat([linear.bias.detach() for linear in linears]) if has_bias else None
        self.with_few: dict[int, WeightProduct | None] = {}  # by the number of rows; None: oneDNN's

    def __call__(self, x: Tensor, then: str = "none") -> Tensor:
        """[rows, in] -> [rows, out]. then: none, or swish, as SiLU is called there."""
        if other_product := self.with_few.get(len(x)):
            output = self._by(other_product, x)
            return output if then == "none" else silu(output, inplace=True)
        product = torch.ops.mkldnn._linear_pointwise.default
        return product(x, self._weight, self._bias, then, [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        if other_product := self.with_few.get(len(x)):
            return self._by(other_product, x).add_(other)
        return self._and(x, other, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        if other_product := self.with_few.get(len(x)):
            return self._by(other_product, x).mul_(other)
        return self._and(x, other, "mul")

    def _and(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise.binary
        return product(x, other, self._weight, self._bias, operation)

    def _by(self, product: WeightProduct, x: Tensor) -> Tensor:
        outputs = [product(x, weight) for weight in self.weights]
        output = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0].contiguous()
        return output if self._bias is None else output.add_(self._bias)


@torch.inference_mode()
def choose_with_few(all_packed: Iterable[Packed]) -> None:
    """Sets `with_few` of each to the fastest for its shapes, where weights are large enough."""
    by_shapes: dict[tuple[torch.Size, ...], list[Packed]] = {}
    for packed in all_packed:
        if all(weight.nbytes >= SMALLEST for weight in packed.weights):
            by_shapes.setdefault(tuple(w.shape for w in packed.weights), []).append(packed)
    for shapes, same in by_shapes.items():
        some = same[: max(1, SAMPLE // sum(weight.nbytes for weight in same[0].weights))]
        for rows in range(1, FEW + 1):
            run = partial(multiply, torch.randn(rows, shapes[0][1]), some)
            best = fastest([None, *PRODUCTS], run)
            for packed in same:
                packed.with_few[rows] = best


def multiply(x: Tensor, some: Iterable[Packed], product: WeightProduct | None) -> None:
    for packed in some:
        packed.with_few[len(x)] = product
        packed(x)


class PackedLayer:
    """A LlamaDecoderLayer in two parts: up to the end of its attention, and the rest."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention, self._head_dim = attention, attention.head_dim
        self._qkv = Packed(attention.q_proj, attention.k_proj, attention.v_proj)
        widths = (linear.out_features for linear in (attention.q_proj, attention.k_proj))
        self._heads = [width // attention.head_dim for width in widths]
        self._output = Packed(attention.o_proj)
        self._gate, self._up, self._down = map(Packed, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self.packed = [self._qkv, self._output, self._gate, self._up, self._down]
        self._norm = Norm(layer.input_layernorm)
        self._mlp_norm = Norm(layer.post_attention_layernorm)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, kv_access: KVAccess) -> Tensor:
        """x: [rows, width]; cos, sin: [rows, head_dim]. Returns [rows, query heads * head_dim]."""
        rows, (num_queries, num_keys) = len(x), self._heads
        qkv = self._qkv(self._norm(x)).view(rows, -1, self._head_dim)
        query = rotate(qkv, cos, sin, 0, num_queries)
        key = rotate(qkv, cos, sin, num_queries, num_queries + num_keys)
        value = qkv[:, num_queries + num_keys :]
        query, key, value = (new.transpose(0, 1)[None] for new in (query, key, value))
        attended, _ = pool_attention(
            self._attention, query, key, value, None,
            kv_access=kv_access, scaling=self._attention.scaling,
        )  # fmt: skip
        return attended.view(rows, -1)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """[rows, width], the input of the next layer."""
        if len(x) > CHUNK:
            parts = zip(x.split(CHUNK), attended.split(CHUNK), strict=True)
            return torch.cat([self.rest(*part) for part in parts])
        x = self._output.plus(attended, x)
        normed = self._mlp_norm(x)
        inner = self._up.times(normed, self._gate(normed, "swish"))
        return self._down.plus(inner, x)


class Norm:
    """A LlamaRMSNorm in one call."""

    def __init__(self, norm: Any) -> None:
        self._weight, self._eps = norm.weight.detach(), norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, self._eps)


def llama_forward(model: Any) -> Callable[..., CausalLMOutputWithPast]:
    """forward of a LlamaForCausalLM, with the arguments that PoolRunner gives it."""
    decoder = model.model
    *layers, last = map(PackedLayer, decoder.layers)
    norm, head = Norm(decoder.norm), Packed(model.lm_head)
    choose_with_few([head, *(packed for layer in [*layers, last] for packed in layer.packed)])

    def forward(
        input_ids: Tensor, position_ids: Tensor, kv_access: KVAccess,
        logits_to_keep: Tensor | int = 0, **others: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        x = decoder.embed_tokens(input_ids[0])
        cos, sin = (angles[0] for angles in decoder.rotary_emb(x, position_ids))
        for layer in layers:
            x = layer.rest(x, layer.attend(x, cos, sin, kv_access))
        attended = last.attend(x, cos, sin, kv_access)
        # After the last attention no token concerns another: only those that are asked for.
        is_count = isinstance(logits_to_keep, int)
        kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits = head(norm(last.rest(x[kept], attended[kept])))
        return CausalLMOutputWithPast(logits=logits[None])

    return forward


def refuse_other_models(model: Any) -> None:
    config = model.config
    kind = f"{config.model_type} in {model.dtype} on {model.device.type}"
    if type(model).__name__ != "LlamaForCausalLM" or config.hidden_act != "silu":
        reason = "a Llama model with SiLU"
    elif model.dtype != torch.float32 or model.device.type != "cpu":
        reason = "float32 on a CPU"
    elif not torch.backends.mkldnn.is_available():
        raise RequestError("layers onednn need a torch with oneDNN, and this has none: use torch")
    else:
        return
    raise RequestError(f"layers onednn are for {reason}, and the model is {kind}: use torch")
