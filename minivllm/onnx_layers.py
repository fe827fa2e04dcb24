"""OnnxLayers: all of a Llama model but attention as ONNX graphs, computed by ONNX Runtime.

Attention stays ours. A graph is what lies between two attentions: the end of a layer and the start
of the next. ONNX Runtime keeps a copy of each weight, in the order in which its products read it.
That costs memory for the weights a second time, and gains most where a step has several rows.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from minivllm.attention.hf import KVAccess, pool_attention
from minivllm.errors import RequestError
from minivllm.fast_layers import Layers
from minivllm.heap import return_free_memory
from minivllm.onnx_graph import Graph, Piece

CHUNK = 512  # rows that a graph takes at once: more would take more memory, and no less time

# What goes into a graph and comes out of it, in ONNX's notation.
X = "float[rows, width] x"
ATTENDED = "float[rows, query_width] attended"
ANGLES = "float[1, rows, half] cos, float[1, rows, half] sin"
Y = "float[rows, width] y"
QKV = "float[1, rows, query_width] query, float[1, rows, kv_width] key, float[rows, kv_width] value"
LOGITS = "float[rows, vocab_size] logits"


class OnnxLayers(Layers):
    """Within `with onnx_layers():` ONNX Runtime computes all of a Llama model but attention.

    Raises RequestError for another model, another dtype than float32, or another device than the
    CPU. Changes of the weights after this are not seen.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        refuse_other_models(model)
        super().__init__()
        self._forwards.append((model.__dict__, llama_forward(model)))
        return_free_memory()


class Buffers:
    """What lies between the graphs of a step with so many rows."""

    def __init__(self, attention: Any, rows: int) -> None:
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        width, head_dim = attention.q_proj.in_features, attention.head_dim
        self.x, self.y = torch.empty(2, rows, width)
        self.angles = torch.empty(2, 1, rows, head_dim // 2)
        query, key, value = (torch.empty(rows, linear.out_features) for linear in projections)
        self.qkv_by_head = [
            new.view(1, rows, -1, head_dim).transpose(1, 2) for new in (query, key, value)
        ]
        cos, sin = self.angles
        self.parts = [
            (part, (cos[:, part], sin[:, part]), (query[None, part], key[None, part], value[part]))
            for part in (slice(i, i + CHUNK) for i in range(0, rows, CHUNK))
        ]


def llama_forward(model: Any) -> Callable[..., CausalLMOutputWithPast]:
    """forward of a LlamaForCausalLM, with the arguments that PoolRunner gives it."""
    decoder, vocab_size = model.model, model.lm_head.out_features
    attentions = [layer.self_attn for layer in decoder.layers]
    start = graph_to_attention(decoder.layers[0])
    between = [graph_between(*pair) for pair in pairwise(decoder.layers)]
    end = graph_to_logits(decoder.layers[-1], decoder.norm, model.lm_head)
    # Decode after decode finds its buffers again, and the graphs are bound to them already.
    buffers_of = lru_cache(maxsize=1)(partial(Buffers, attentions[0]))

    def forward(
        input_ids: Tensor, position_ids: Tensor, kv_access: KVAccess,
        logits_to_keep: Tensor | int = 0, **others: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        buffers = buffers_of(input_ids.shape[1])
        x, y, parts = buffers.x, buffers.y, buffers.parts
        x.copy_(decoder.embed_tokens(input_ids[0]))
        for angles, given in zip(buffers.angles, decoder.rotary_emb(x, position_ids), strict=True):
            angles.copy_(given[..., : angles.shape[-1]])  # the other half of a head has the same

        def attend(attention: Any) -> Tensor:
            query, key, value = buffers.qkv_by_head
            attended, _ = pool_attention(
                attention, query, key, value, None, kv_access=kv_access, scaling=attention.scaling
            )
            return attended.reshape(len(x), -1)

        for part, turned_by, qkv in parts:
            start((x[part], *turned_by), qkv)
        for attention, graph in zip(attentions[:-1], between, strict=True):
            attended = attend(attention)
            for part, turned_by, qkv in parts:
                graph((x[part], attended[part], *turned_by), (y[part], *qkv))
            x, y = y, x
        attended = attend(attentions[-1])
        # After the last attention no token concerns another: only those that are asked for.
        is_count = isinstance(logits_to_keep, int)
        kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
        x, attended = x[kept], attended[kept]
        logits = x.new_empty(len(x), vocab_size)
        end((x, attended), (logits,))
        return CausalLMOutputWithPast(logits=logits[None])

    return forward


def graph_to_attention(layer: Any) -> Graph:
    piece = Piece()
    piece.before_attention(layer, "x")
    return piece.graph([X, ANGLES], [QKV])


def graph_between(layer: Any, following: Any) -> Graph:
    piece = Piece()
    piece.after_attention(layer)
    piece.before_attention(following, "y")
    return piece.graph([X, ATTENDED, ANGLES], [Y, QKV])


def graph_to_logits(layer: Any, norm: Any, head: torch.nn.Linear) -> Graph:
    piece = Piece()
    piece.after_attention(layer)
    piece.norm("normed", "norm", "y", norm)
    piece.linear("logits", "head", "normed", head)
    return piece.graph([X, ATTENDED], [LOGITS])


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
