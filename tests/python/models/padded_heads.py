"""A model of heads that no number of ranks divides, with heads of zeros behind them: the same function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_padded_heads(model: Any, key_heads: int) -> Any:
    """A Llama with so many heads of keys and values, and as many of queries for each of them as it has.

    Added heads have weights of zero, in the output projection too, so that they add nothing.
    """
    described = model.config.to_diff_dict()
    described.pop("quantization_config", None)  # of the file that the model came from
    config = type(model.config)(**described)
    head = config.hidden_size // config.num_attention_heads
    query_heads = key_heads * (config.num_attention_heads // config.num_key_value_heads)
    config.head_dim, config.num_attention_heads, config.num_key_value_heads = head, query_heads, key_heads
    shapes = {"k_proj": (0, key_heads), "v_proj": (0, key_heads)}
    shapes |= {"q_proj": (0, query_heads), "o_proj": (1, query_heads)}
    state = model.state_dict()
    for name, weight in state.items():
        layer = name.split(".")[-2]
        if layer in shapes:
            dim, heads = shapes[layer]
            state[name] = padded(weight, dim, heads * head)
    result = type(model)(config)
    result.load_state_dict(state)
    return result


def padded(weight: Tensor, dim: int, size: int) -> Tensor:
    """With zeros behind it, `size` numbers along `dim`."""
    shape = list(weight.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([weight, weight.new_zeros(shape)], dim)
