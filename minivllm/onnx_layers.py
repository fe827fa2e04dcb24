"""OnnxLayers: a Llama model's layers as ONNX graphs, computed by ONNX Runtime.

Attention stays ours. A graph is what lies between two attentions: the end of a layer and the start
of the next. ONNX Runtime keeps a copy of each weight, in the order in which its products read it;
so it needs memory for the weights a second time, and 16 rows take hardly longer than four.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.hf import KVAccess, pool_attention
from minivllm.errors import ModelError, RequestError
from minivllm.fast_layers import Layers

try:
    import onnx
    import onnxruntime
except ImportError as error:
    raise ModelError(
        f"{error.name} is not installed: pip install onnx onnxruntime, or use --layers torch"
    ) from error

CHUNK = 256  # rows that a graph takes at once: what lies between its products stays in the cache

# In ONNX's own notation; `linear` writes a Gemm. The names before the arrow are given for a step.
X = "float[rows, width] x"
ATTENDED = "float[rows, query_width] attended"
ANGLES = "float[1, rows, half] cos, float[1, rows, half] sin"
Y = "float[rows, width] y"
QKV = "float[1, rows, query_width] query, float[1, rows, kv_width] key, float[rows, kv_width] value"


class Graph:
    """A function of tensors in ONNX's notation, with its weights, for any number of rows.

    weights: float32; read where they are, and kept. Inputs and outputs of a call stand in the
    graph's order; outputs are written into.
    """

    def __init__(self, text: str, weights: dict[str, Tensor]) -> None:
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> {text}')
        for name, weight in weights.items():
            # A name and a shape: the numbers are not in the graph but in the tensor.
            declared = model.graph.initializer.add(name=name, dims=weight.shape)
            declared.data_type = onnx.TensorProto.FLOAT
            declared.data_location = onnx.TensorProto.EXTERNAL
            declared.external_data.add(key="location", value="a tensor")
        self._weights = [
            onnxruntime.OrtValue.ortvalue_from_numpy(weight.detach().numpy())
            for weight in weights.values()
        ]
        options = onnxruntime.SessionOptions()
        options.add_external_initializers(list(weights), self._weights)
        options.intra_op_num_threads = torch.get_num_threads()
        options.enable_cpu_mem_arena = False  # each graph would keep one of its own
        # Its threads must not wait for the next graph: attention needs the cores meanwhile.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._binding = self._session.io_binding()
        self._inputs = [value.name for value in model.graph.input]
        self._outputs = [value.name for value in model.graph.output]

    def __call__(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        """Both contiguous float32 on the CPU."""
        binding = self._binding
        for name, given in zip(self._inputs, inputs, strict=True):
            binding.bind_input(name, "cpu", 0, np.float32, given.shape, given.data_ptr())
        for name, filled in zip(self._outputs, outputs, strict=True):
            binding.bind_output(name, "cpu", 0, np.float32, filled.shape, filled.data_ptr())
        self._session.run_with_iobinding(binding)


class Piece:
    """Lines of a graph, and the weights that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.weights: dict[str, Tensor] = {}

    def linear(self, output: str, name: str, x: str, linear: torch.nn.Linear) -> None:
        given = f"{x}, {name}"
        self.weights[name] = linear.weight
        if linear.bias is not None:
            given += f", {name}_bias"
            self.weights[f"{name}_bias"] = linear.bias
        self.lines.append(f"{output} = Gemm <transB = 1> ({given})")

    def norm(self, output: str, name: str, x: str, norm: Any) -> None:
        self.weights[name] = norm.weight
        eps = norm.variance_epsilon
        self.lines.append(f"{output} = RMSNormalization <axis = -1, epsilon = {eps}> ({x}, {name})")

    def before_attention(self, layer: Any, x: str) -> None:
        """x, cos, sin -> query, key, value."""
        attention = layer.self_attn
        self.norm("attention_input", "input_norm", x, layer.input_layernorm)
        self.linear("query_rows", "q", "attention_input", attention.q_proj)
        self.linear("key_rows", "k", "attention_input", attention.k_proj)
        self.linear("value", "v", "attention_input", attention.v_proj)
        self.lines.append("first = Constant <value_ints = [0]> ()")
        for name, linear in (("query", attention.q_proj), ("key", attention.k_proj)):
            heads = linear.out_features // attention.head_dim
            self.lines += [
                f"{name}_batch = Unsqueeze ({name}_rows, first)",
                f"{name} = RotaryEmbedding <num_heads = {heads}> ({name}_batch, cos, sin)",
            ]

    def after_attention(self, layer: Any) -> None:
        """x, attended -> y."""
        mlp = layer.mlp
        self.linear("change", "o", "attended", layer.self_attn.o_proj)
        self.lines.append("between = Add (x, change)")
        self.norm("mlp_input", "mlp_norm", "between", layer.post_attention_layernorm)
        self.linear("gate_output", "gate", "mlp_input", mlp.gate_proj)
        self.linear("up_output", "up", "mlp_input", mlp.up_proj)
        self.lines += [
            "share = Sigmoid (gate_output)",
            "activated = Mul (gate_output, share)",
            "inner = Mul (activated, up_output)",
        ]
        self.linear("mlp_output", "down", "inner", mlp.down_proj)
        self.lines.append("y = Add (between, mlp_output)")

    def graph(self, inputs: list[str], outputs: list[str]) -> Graph:
        head = f"graph ({', '.join(inputs)}) => ({', '.join(outputs)})"
        return Graph("\n".join([head, "{", *self.lines, "}"]), self.weights)


class OnnxLayers(Layers):
    """Within `with onnx_layers():` ONNX Runtime computes all of a Llama model but attention.

    Raises RequestError for another model, another dtype than float32, or another device than the
    CPU. Changes of the weights after this are not seen.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        check_supported(model)
        super().__init__()
        layers: list[Any] = list(model.model.layers)  # type: ignore[union-attr, arg-type]
        start = Piece()
        start.before_attention(layers[0], "x")
        self._start = start.graph([X, ANGLES], [QKV])
        self._qkv: tuple[Tensor, ...] = ()  # what the next layer's attention takes
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            self._forwards.append((layer.__dict__, self._layer(layer, following)))
        head = model.lm_head
        self._forwards.append((head.__dict__, linear_forward(head)))

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


def check_supported(model: Any) -> None:
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


def linear_forward(linear: Any) -> Callable[[Tensor], Tensor]:
    piece = Piece()
    piece.linear("y", "weight", "x", linear)
    graph = piece.graph([X], ["float[rows, out_width] y"])

    def forward(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        output = flat.new_empty(len(flat), linear.out_features)
        graph((flat,), (output,))
        return output.view(*x.shape[:-1], -1)

    return forward
