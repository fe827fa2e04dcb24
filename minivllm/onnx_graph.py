"""Graph: a function of tensors in ONNX's notation, computed by ONNX Runtime; Piece: its lines."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.errors import ModelError

try:
    import onnx
    import onnxruntime
except ImportError as error:
    raise ModelError(
        f"{error.name} is not installed: pip install onnx onnxruntime, or use --layers torch"
    ) from error


@cache
def share_an_arena() -> None:
    """What lies between a graph's products is gone when it ends: all graphs have the same room.

    The weights stay outside it. Its room grows by what is asked for, not by powers of two.
    """
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    as_requested = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1})
    onnxruntime.create_and_register_allocator(memory, as_requested)


class Graph:
    """For any number of rows.

    text: `name (inputs) => (outputs) { lines }`. weights: float32, by the name that a line gives
    them; kept, and those of products copied once, into the order in which they are read.
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
        share_an_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        # Its threads must not wait for the next graph: attention needs the cores meanwhile.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._binding = self._session.io_binding()
        self._names = [
            [value.name for value in values] for values in (model.graph.input, model.graph.output)
        ]
        self._places: dict[str, tuple[int, torch.Size]] = {}  # what is bound to each name

    def __call__(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        """In the graph's order, contiguous float32 on the CPU; outputs are written into."""
        bind = self._binding.bind_input, self._binding.bind_output
        for bind_one, names, tensors in zip(bind, self._names, (inputs, outputs), strict=True):
            for name, tensor in zip(names, tensors, strict=True):
                place = tensor.data_ptr(), tensor.shape
                if self._places.get(name) != place:  # binding takes longer than this comparison
                    bind_one(name, "cpu", 0, np.float32, tensor.shape, tensor.data_ptr())
                    self._places[name] = place
        self._session.run_with_iobinding(self._binding)


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
