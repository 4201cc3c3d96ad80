"""The rotary embeddings of GGUF files, in the words of transformers: keys `*.rope.*`, and the tensor `rope_freqs`.

llama.cpp turns a pair of numbers by `position * frequency`, and scales frequencies as `rope.scaling.type` says: all of
them (linear), or the low ones more than the high ones (yarn). Without a type, a factor means linear. `rope_freqs` holds
a divisor for each frequency; Llama 3.1's scaling is stored so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError

DIVISORS: Final = "rope_freqs.weight"
_THETA: Final = 10000.0  # where a header names none
_MAPPED: Final = (  # keys of rope.scaling; finetuned says nothing of the numbers
    "type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "finetuned",
)  # fmt: skip
_NEUTRAL: Final = {  # those that transformers has no words for: the values that change nothing
    "yarn_log_multiplier": (0,),
    "yarn_ext_factor": (1, -1),
    "yarn_attn_factor": (1, -1),
    "alpha": (0, 1),
}
_LOW: Final = 1.0  # Llama 3.1's low_freq_factor: the others are told in relation to it
_HIGH: Final = 4.0  # its high_freq_factor
_ORIGINAL: Final = 8192  # and its original context
_ROUNDING: Final = 2.0**-18
"""The part of a frequency by which divisors may differ that were computed in float32."""


class RopeKeys:
    """What a header says of rotary embeddings.

    Args:
        path: of the file, for errors.
        metadata: of its header.
        size: columns of a head; None where that is unknown.

    Raises:
        CheckpointError: a value is no number that it can be.
        UnsupportedError: the embeddings are scaled in a way for which transformers has no words.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any], size: int | None) -> None:
        self._path, self._metadata, self._size = path, metadata, size
        self._prefix = f"{metadata['general.architecture']}.rope."
        self.theta = self._number("freq_base", _THETA)
        self._check_known()

    def values(self, divisors: Tensor | None) -> dict[str, Any]:
        """For a configuration of transformers.

        Args:
            divisors: the tensor `rope_freqs`; None where there is none.
        """
        scaling = self._scaling()
        if divisors is not None and scaling:
            raise UnsupportedError(
                f"{self._path}: {DIVISORS} beside {self._prefix}scaling.*: expected one way to scale frequencies, got "
                f"both ({scaling['rope_type']}); quantise the model's float original: qcutlass quantize"
            )
        scaling = scaling if divisors is None else self._llama3(divisors)
        return {"rope_parameters": {**scaling, "rope_theta": self.theta}} if scaling else {"rope_theta": self.theta}

    def values_by_reach(self) -> dict[str, Any]:
        """Those of models some of whose blocks attend to a window: these have a base of their own, and no scaling."""
        whole = {"rope_type": "default", **self._scaling(), "rope_theta": self.theta}
        window = {"rope_type": "default", "rope_theta": self._number("freq_base_swa", _THETA)}
        return {"rope_parameters": {"full_attention": whole, "sliding_attention": window}}

    def _scaling(self) -> dict[str, Any]:
        """That of the keys; empty where nothing is scaled."""
        kind = self._metadata.get(f"{self._prefix}scaling.type", "linear")
        factor = self._number("scaling.factor", self._number("scale_linear", 1.0))
        attention = self._number("scaling.attn_factor", 1.0)
        if kind == "yarn":
            return self._yarn(factor, attention)
        if kind not in ("linear", "none"):
            raise self._unsupported("scaling.type", kind, "linear, yarn or none")
        if attention != 1:
            raise self._unsupported("scaling.attn_factor", attention, f"1 where the type is {kind}")
        return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {}

    def _yarn(self, factor: float, attention: float) -> dict[str, Any]:
        context = self._metadata.get(f"{self._metadata['general.architecture']}.context_length")
        original = self._number("scaling.original_context_length", context)
        found = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(original),
            "beta_fast": self._number("scaling.yarn_beta_fast", 32.0),
            "beta_slow": self._number("scaling.yarn_beta_slow", 1.0),
        }
        usual = 1 + 0.1 * math.log(max(factor, 1))
        return found if attention == 1 else {**found, "attention_factor": attention * usual}

    def _llama3(self, divisors: Tensor) -> dict[str, Any]:
        """The parameters of Llama 3.1's scaling with these divisors, which are 1, its factor, and between them."""
        if self._size is not None and tuple(divisors.shape) != (self._size // 2,):
            raise CheckpointError(
                f"{self._path}: {DIVISORS}: expected a divisor for each of {self._size // 2} frequencies, got "
                f"{list(divisors.shape)}"
            )
        found = divisors.double()
        if not bool((found.isfinite() & (found > 0)).all()):
            raise CheckpointError(f"{self._path}: {DIVISORS}: expected numbers above 0; download it again")
        if bool((found == 1).all()):
            return {}
        pairs = torch.arange(len(found), dtype=torch.float64) / len(found)
        turns = self.theta**-pairs / (2 * math.pi)  # a position
        factor = float(found.max())
        for original, high in self._candidates(found, turns, factor):
            share = ((original * turns - _LOW) / (high - _LOW)).clamp(0, 1)  # of a frequency that is not divided
            if bool((((1 - share) / factor + share - 1 / found).abs() <= _ROUNDING).all()):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": _LOW,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
        raise UnsupportedError(
            f"{self._path}: {DIVISORS}: expected the divisors of Llama 3.1's scaling of frequencies, got others (from "
            f"{float(found.min()):g} to {factor:g}); quantise the model's float original: qcutlass quantize"
        )

    def _candidates(self, divisors: Tensor, turns: Tensor, factor: float) -> Iterator[tuple[int, float]]:
        """Original contexts and high_freq_factors that these divisors may be of."""
        yield _ORIGINAL, _HIGH
        said = self._metadata.get(f"{self._prefix}scaling.original_context_length")
        if said is not None:
            yield int(self._number("scaling.original_context_length", said)), _HIGH
        between = (divisors > 1) & (divisors < factor)
        share, x = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor), turns[between]
        if len(x) == 1:
            yield round(float((_LOW + share * (_HIGH - _LOW)) / x)), _HIGH
        elif len(x) > 1:  # share = slope * x + offset
            slope, offset = torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], dim=1), share).solution.tolist()
            if offset < 0 < slope:
                yield round(-_LOW * slope / offset), round(_LOW - _LOW / offset, 3)

    def _check_known(self) -> None:
        """Raises UnsupportedError where something else than the embeddings of whole heads is meant."""
        begin = f"{self._prefix}scaling."
        for name in (key.removeprefix(begin) for key in self._metadata if key.startswith(begin)):
            neutral, value = _NEUTRAL.get(name, ()), self._metadata[f"{begin}{name}"]
            if name not in _MAPPED and value not in neutral:
                expected = f"it absent, or {neutral[0]}" if neutral else "no such key"
                raise self._unsupported(f"scaling.{name}", value, expected)
        turned = self._metadata.get(f"{self._prefix}dimension_count", self._size)
        if self._size is not None and turned != self._size:
            raise self._unsupported("dimension_count", turned, f"{self._size}, all columns of a head")

    def _number(self, name: str, default: Any) -> float:
        """A number above 0; the default where it is absent or, as older files have it, 0."""
        value = self._metadata.get(f"{self._prefix}{name}")
        value = default if value is None or value == 0 else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self._path}: {self._prefix}{name}: expected a number above 0, got {value!r:.80}")
        return value

    def _unsupported(self, name: str, value: object, expected: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._path}: {self._prefix}{name}: expected {expected}, got {value!r:.80}; quantise the model's float "
            "original: qcutlass quantize"
        )
