"""Attention of one token of each sequence to all of its keys: torch's `flex_attention`, told how a step uses it."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

NAME: Final = "qcutlass_step"
"""Of this attention, in transformers' registry."""

BLOCK: Final = 128  # keys that are skipped or taken together

_KEYS: Final = 64  # of a tile; these three are the fastest of 18 on an H200, or nearly, from 1 to 32 sequences
_WARPS: Final = 4
_STAGES: Final = 3
_SHARE: Final = 0.75  # of a block's shared memory for tiles; the rest is Triton's own


def grouped_queries(model: Any) -> int | None:
    """Heads of queries that share one of keys in the decoder of a model; None: not the same in all layers.

    Layers that do not say have as many heads of keys as of queries.
    """
    groups = {getattr(module, "num_key_value_groups", None) for module in model.get_decoder().modules()} - {None}
    return groups.pop() if len(groups) == 1 else None if groups else 1


def is_plain(model: Any) -> bool:
    """Whether scores of attention are products of queries and keys alone: without a soft cap, and without sinks."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return False
    return not any(hasattr(module, "sinks") for module in model.get_decoder().modules())


def block_mask(begins: Tensor, place: Tensor, blocks: Tensor, length: int, queries: int) -> BlockMask:
    """What a token attends to, read anew in each step: its sequence's keys up to its own.

    Args:
        begins: int64 `[batch]`: the first key of each sequence; padding is before it.
        place: int64 `[1]`: the last key.
        blocks: int32 `[batch, 1, 1]`: blocks of keys with the place's.
        length: keys that there is room for, a multiple of `BLOCK`.
        queries: as `grouped_queries` says.
    """
    indices = torch.arange(length // BLOCK, dtype=torch.int32, device=begins.device)
    return BlockMask.from_kv_blocks(
        blocks,
        indices.expand(*blocks.shape, -1).contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, query, key: (key >= begins[batch]) & (key <= place[0]),
        seq_lengths=(queries, length),
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    scaling: float | None = None,
    **others: Any,  # of models that `is_plain` lets through, nothing that scores depend on
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers asks for it, of one token of each sequence.

    The queries that share keys are rows of one product, whatever their number: transformers' own function repeats keys
    and values where it is not a power of two, and torch shares them among heads only where it is. Keys and values of a
    cache lie in order; those that a step computes (DeepSeek) are brought into it, as what torch 2.13 compiles for a CPU
    reads views of them wrongly. Of views of queries it fails to compile anything there.

    Args:
        query: `[batch, heads, 1, size]`.
        key: `[batch, heads of keys, length, size]`.
        value: the same, of any size.
        attention_mask: from `block_mask`.

    Returns:
        `[batch, 1, heads, size of a value]`, and None.
    """
    batch, heads, _, size = query.shape
    bytes_of_pair = (size + value.shape[-1]) * query.element_size()
    options = _options(batch * key.shape[1], bytes_of_pair, query.device)
    rows = query.reshape(batch, key.shape[1], -1, size)
    if query.device.type == "cpu":
        rows = torch.maximum(rows, rows)  # a copy that is not compiled away
    result = flex_attention(
        rows,
        key.contiguous(),
        value.contiguous(),
        block_mask=attention_mask,
        scale=scaling,
        kernel_options=options,  # type: ignore[arg-type]
    )
    assert isinstance(result, Tensor)
    return result.reshape(batch, 1, heads, -1), None


def _options(pairs: int, bytes_of_pair: int, device: torch.device) -> dict[str, Any] | None:
    """How `flex_attention` shares one step's work of (sequence, head of keys) pairs.

    Each SM gets a block, or two halves where all pairs fit. torch's own choice splits keys twice as often, for blocks
    of two warps, and takes 1.6 to 1.9 times as long in steps of 1 to 32 sequences of 512 keys on an H200. On a CPU keys
    are not split: what torch 2.13 makes for that, of 512 keys and more a sequence, is C++ that does not compile, unless
    parts are no whole blocks, which keeps it from it.
    """
    if device.type != "cuda":
        return {"PARTITION_SIZE": BLOCK // 2}
    properties = torch.cuda.get_device_properties(device)
    sms = properties.multi_processor_count
    options = {"SPLIT_KV": max(2 if pairs <= sms else 1, sms // pairs)}
    room: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    if _STAGES * _KEYS * bytes_of_pair <= _SHARE * room:  # of a key and its value
        options |= {"fwd_BLOCK_N": _KEYS, "fwd_num_warps": _WARPS, "fwd_num_stages": _STAGES}
    return options


AttentionInterface.register(NAME, attend)
