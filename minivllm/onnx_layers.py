"""OnnxLayers: a Llama model's layers as ONNX graphs, computed by ONNX Runtime.

Attention stays ours. A graph is what lies between two attentions: the end of a layer and the start
of the next. ONNX Runtime keeps a copy of each weight, in the order in which its products read it.
That costs memory for the weights a second time, and pays where a step has more than a row or two.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.attention.hf import KVAccess, pool_attention
from minivllm.errors import RequestError
from minivllm.fast_layers import Layers, Product, linear_forward
from minivllm.onnx_graph import Piece

CHUNK = 256  # rows that a graph takes at once: what lies between its products stays in the cache

# What goes into a graph and comes out of it, in ONNX's notation.
X = "float[rows, width] x"
ATTENDED = "float[rows, query_width] attended"
ANGLES = "float[1, rows, half] cos, float[1, rows, half] sin"
Y = "float[rows, width] y"
QKV = "float[1, rows, query_width] query, float[1, rows, kv_width] key, float[rows, kv_width] value"


class OnnxLayers(Layers):
    """Within `with onnx_layers():` ONNX Runtime computes all of a Llama model but attention.

    Raises RequestError for another model, another dtype than float32, or another device than the
    CPU. Changes of the weights after this are not seen.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        refuse_other_models(model)
        super().__init__()
        layers: list[Any] = list(model.model.layers)  # type: ignore[union-attr, arg-type]
        start = Piece()
        start.before_attention(layers[0], "x")
        self._start = start.graph([X, ANGLES], [QKV])
        self._qkv: tuple[Tensor, ...] = ()  # what the next layer's attention takes
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            self._forwards.append((layer.__dict__, self._layer(layer, following)))
        head = model.lm_head
        self._forwards.append((head.__dict__, linear_forward(product_of(head))))

    def _layer(self, layer: Any, following: Any) -> Callable[..., Tensor]:
        piece, attention = Piece(), layer.self_attn
        piece.after_attention(layer)
        if following is None:
            graph = piece.graph([X, ATTENDED], [Y])
        else:
            piece.before_attention(following, "y")
            graph = piece.graph([X, ATTENDED, ANGLES], [Y, QKV])
        is_first, head_dim = attention.layer_idx == 0, attention.head_dim
        widths = [linear.out_features for linear in (attention.q_proj, attention.k_proj)]

        def forward(
            hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor],
            kv_access: KVAccess, **others: Any,
        ) -> Tensor:  # fmt: skip
            x = hidden_states[0].contiguous()
            rows = len(x)
            chunks = [slice(i, i + CHUNK) for i in range(0, rows, CHUNK)]
            # transformers gives each angle twice, once for each half of a head.
            cos, sin = (a[..., : head_dim // 2].contiguous() for a in position_embeddings)
            if is_first:
                self._qkv = new_qkv(rows, *widths)
                for chunk in chunks:
                    self._start((x[chunk], cos[:, chunk], sin[:, chunk]), rows_of(self._qkv, chunk))
            query, key, value = (
                new.view(1, rows, -1, head_dim).transpose(1, 2) for new in self._qkv
            )
            attended, _ = pool_attention(
                attention, query, key, value, None, kv_access=kv_access, scaling=attention.scaling
            )
            attended = attended.reshape(rows, -1)
            y = torch.empty_like(x)
            self._qkv = new_qkv(rows, *widths)
            for chunk in chunks:
                given = (x[chunk], attended[chunk])
                if following is None:
                    graph(given, (y[chunk],))
                else:
                    angles = cos[:, chunk], sin[:, chunk]
                    graph((*given, *angles), (y[chunk], *rows_of(self._qkv, chunk)))
            return y[None]

        return forward


def refuse_other_models(model: Any) -> None:
    config = model.config
    kind = f"{config.model_type} in {model.dtype} on {model.device.type}"
    if type(model).__name__ != "LlamaForCausalLM" or config.hidden_act != "silu":
        reason = "a Llama model with SiLU"
    elif model.dtype != torch.float32 or model.device.type != "cpu":
        reason = "float32 on a CPU"
    else:
        return
    raise RequestError(f"layers onnx are for {reason}, and the model is {kind}: use torch")


def new_qkv(rows: int, query_width: int, kv_width: int) -> tuple[Tensor, ...]:
    """Room for query and key, [1, rows, width] as the rotation takes them, and value."""
    shapes = (1, rows, query_width), (1, rows, kv_width), (rows, kv_width)
    return tuple(map(torch.empty, shapes))


def rows_of(qkv: tuple[Tensor, ...], chunk: slice) -> tuple[Tensor, ...]:
    query, key, value = qkv
    return query[:, chunk], key[:, chunk], value[chunk]


def product_of(linear: Any) -> Product:
    piece = Piece()
    piece.linear("y", "weight", "x", linear)
    graph = piece.graph([X], ["float[rows, out_width] y"])

    def product(x: Tensor) -> Tensor:
        output = x.new_empty(len(x), linear.out_features)
        graph((x,), (output,))
        return output

    return product
