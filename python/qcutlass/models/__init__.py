"""Whole models: conversion of checkpoints, converted folders, perplexity, generation.

`import qcutlass.models.transformers` lets transformers load them.
"""

from qcutlass.models.conversion import Conversion, convert, weights_of
from qcutlass.models.converted import ConvertedFolder, is_converted
from qcutlass.models.inspection import FolderSummary, LayerGroup, inspect

__all__ = [
    "Conversion",
    "ConvertedFolder",
    "FolderSummary",
    "LayerGroup",
    "convert",
    "inspect",
    "is_converted",
    "weights_of",
]
