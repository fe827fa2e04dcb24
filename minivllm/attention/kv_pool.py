"""KVPool: one piece of memory for the K and V of everybody."""

import torch
from torch import Tensor

from minivllm.memory.kv_cache_manager import SlotCopy


class KVPool:
    """K and V in blocks of slots; with block_size 1 a block is a slot.

    keys, values: [num_layers, num_blocks, block_size, num_kv_heads, head_dim]. What no request
    has written must not be read: it can be anything.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
        *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        # Not filled: on a CPU the system hands out memory at the first touch, so blocks that nobody
        # ever needs cost nothing.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.block_size = block_size
        by_slot = self.keys.flatten(1, 2), self.values.flatten(1, 2)
        self._layers = list(zip(*by_slot, strict=True))  # views, made once: each step asks for all

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer by slot, each [num_slots, num_kv_heads, head_dim]: views."""
        return self._layers[index]

    def write(self, index: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores the new tokens of a layer, [num_tokens, num_kv_heads, head_dim], by slot."""
        keys, values = self.layer(index)
        keys.index_copy_(0, slot_mapping, key)
        values.index_copy_(0, slot_mapping, value)

    def copy(self, copies: list[SlotCopy]) -> None:
        """Moves K and V in all layers, one copy after the other: a later one may overwrite the
        place that an earlier one left."""
        for source, destination, count in copies:
            for tensor in (self.keys.flatten(1, 2), self.values.flatten(1, 2)):
                tensor[:, destination : destination + count] = tensor[:, source : source + count]
