"""Whole models: conversion and quantisation of checkpoints, converted folders, perplexity, generation.

transformers loads them where qcutlass is imported.
"""

from qcutlass.formats.converted import is_converted
from qcutlass.models.conversion import Conversion, convert, weights_of
from qcutlass.models.converted import ConvertedFolder
from qcutlass.models.exporting import EXPORTS, export_model, export_note
from qcutlass.models.inspection import FolderSummary, LayerGroup, inspect
from qcutlass.models.parallel import parallelise
from qcutlass.models.quantizing.methods import Method
from qcutlass.models.quantizing.run import Quantization, calibration_windows, quantize_model

__all__ = [
    "EXPORTS",
    "Conversion",
    "ConvertedFolder",
    "FolderSummary",
    "LayerGroup",
    "Method",
    "Quantization",
    "calibration_windows",
    "convert",
    "export_model",
    "export_note",
    "inspect",
    "is_converted",
    "parallelise",
    "quantize_model",
    "weights_of",
]
