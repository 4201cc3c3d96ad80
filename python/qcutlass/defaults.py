"""Names and defaults of options that the library's functions share with the command, which shows them without torch."""

from __future__ import annotations

from typing import Final

FORMAT_NAMES: Final = (
    "gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "marlin", "hqq", "tensorrt-llm", "nvfp4",
    "modelopt-awq", "mxfp4", "gguf", "floats",
)  # fmt: skip
"""The keys of `formats.FORMATS`."""
METHODS: Final = ("rtn", "gptq", "awq", "smoothquant", "w8a8", "fp8", "blockwise", "blockwise-fp8")
"""Methods of quantising models."""
UNCALIBRATED: Final = "rtn, blockwise, blockwise-fp8, w8a8 or fp8"
"""Those that need no calibration, the last two without static activations, in words."""
FLOAT_FORMATS: Final = ("mxfp4", "nvfp4")
"""Formats of 4-bit floats that models are quantised to."""
EXPORTS: Final = ("gptq", "compressed-tensors")
"""Formats of other engines that converted folders are written in."""

ROUTERS: Final = ("gate", "router", "*.router.*", "router_gate", "shared_expert_gate")
"""Layers that choose a token's experts, or weigh them: small, and an error in them sends tokens elsewhere."""
SKIPPED: Final = ("lm_head", *ROUTERS)
"""Layers that are left alone by default: by `replace_linear`, in conversion and in quantisation."""

DAMPING: Final = 0.01
"""Of GPTQ: the share of the mean diagonal that is added to it."""
SHARD_BYTES: Final = 4 << 30
"""The largest size of a file in a folder."""
