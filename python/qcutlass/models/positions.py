"""Models with a learned vector for each position, which read no longer texts than they have vectors."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

_MOST_BEYOND: Final = 2  # rows of such a table that are for no position: OPT's has two, of padding


def positions_of(model: Any) -> int | None:
    """The tokens of the longest text that a model has learned positions for; None: it has none, and computes them.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from qcutlass.models.positions import positions_of
        >>> positions_of(GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96, n_positions=32)))
        32
    """
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(longest, int) or not hasattr(model, "get_input_embeddings"):
        return None
    tokens = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens)
    return longest if any(0 <= table.num_embeddings - longest <= _MOST_BEYOND for table in tables) else None


def check_length(name: str, model: Any, count: int, what: str, advice: str) -> None:
    """Raises ValueError if a model has no positions for so many tokens.

    Args:
        name: of the argument.
        count: of tokens.
        what: what they are, for the message; `advice`: what to do.
    """
    longest = positions_of(model)
    if longest is not None and count > longest:
        raise ValueError(
            f"{name}: {what} {count} tokens, but the model has learned positions for {longest} alone "
            f"(max_position_embeddings); {advice}"
        )
