"""Faults that every kind of product can have, as mixins of a model: `type(name, (fault, Model), {})`.

A model has stations: `columns()` `[M, K]`, `weight()` `[N, K]` and `store(out)`, what memory holds afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qcutlass import testing


class Fault:
    """Base of the mixins, which declares the stations that they find behind `super()`."""

    def columns(self) -> Tensor:
        return super().columns()  # type: ignore[misc,no-any-return]

    def weight(self) -> Tensor:
        return super().weight()  # type: ignore[misc,no-any-return]


class LastKDropped(Fault):
    def columns(self) -> Tensor:
        a = super().columns().clone()
        a[:, -1] = 0
        return a


class TwoKSwapped(Fault):
    channels = slice(None)

    def weight(self) -> Tensor:
        w = super().weight().clone()
        other = int((w[37] - w[37, 100]).abs().argmax())  # swapping weights that are as good as equal would be no fault
        w[self.channels, 100], w[self.channels, other] = w[self.channels, other].clone(), w[self.channels, 100].clone()
        return w


class TwoKSwappedInOneChannel(TwoKSwapped):
    channels = slice(37, 38)


class OneStaleElement(Fault):
    def store(self, out: Tensor) -> Tensor:
        stale = out.clone()
        column = int((out[41].double() - out[40].double()).abs().argmax())  # elsewhere both may be as good as equal
        stale[41, column] = out[40, column]
        return stale


class LastRowUnwritten(Fault):
    def store(self, out: Tensor) -> Tensor:
        box = testing.Poisoned(tuple(out.shape), out.dtype)
        box.tensor[:-1] = out[:-1]
        return box.tensor


class LastEightColumnsUnwritten(Fault):
    def store(self, out: Tensor) -> Tensor:
        box = testing.Poisoned(tuple(out.shape), out.dtype)
        box.tensor[:, :-8] = out[:, :-8]
        return box.tensor


class LastRowUnwrittenOverZeros(Fault):
    def store(self, out: Tensor) -> Tensor:
        return torch.cat([out[:-1], torch.zeros_like(out[-1:])])


def faults_of(model: type[Any]) -> list[type[Any]]:
    """Each of them in a model."""
    faults = [
        LastKDropped,
        TwoKSwapped,
        TwoKSwappedInOneChannel,
        OneStaleElement,
        LastRowUnwritten,
        LastEightColumnsUnwritten,
        LastRowUnwrittenOverZeros,
    ]
    return [type(fault.__name__, (fault, model), {}) for fault in faults]
