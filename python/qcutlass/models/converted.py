"""The layers of converted folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qcutlass.formats.converted import PackedFolder
from qcutlass.layers import QuantLinear
from qcutlass.layers.base import empty_layer, from_layer


class ConvertedFolder(PackedFolder, Mapping[str, QuantLinear]):
    """The quantised layers of a folder that `qcutlass.models.convert` wrote, by name; each is read when asked for.

    Args:
        folder: with `config.json` and safetensors files.

    Attributes:
        config: what `config.json` holds.
        spec: its `quantization_config`.
        names: of the quantised layers.
        rest: names of the tensors that belong to no quantised layer.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it is damaged, or written for another layout.

    Example:
        >>> import json, pathlib, tempfile, torch
        >>> from safetensors.torch import save_file
        >>> from qcutlass import models
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = pathlib.Path(name) / "float"
        ...     folder.mkdir()
        ...     _ = (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        ...     save_file({"up.weight": torch.randn(32, 64)}, folder / "model.safetensors")
        ...     _ = models.convert(folder, pathlib.Path(name) / "w4")
        ...     models.ConvertedFolder(pathlib.Path(name) / "w4")["up"]
        WeightOnlyLinear(in_features=64, out_features=32, bits=4, group_size=64, zeros=uint8, bias=False)
    """

    def __getitem__(self, name: str) -> QuantLinear:
        """One layer, on the CPU.

        Raises:
            KeyError: no layer has this name.
            CheckpointError: its tensors are not those that `config.json` and its shape demand, or hold NaN or infinity.
        """
        return from_layer(self.packed(name), name)

    def empty(self, name: str) -> QuantLinear:
        """One layer on the meta device, with the tensors that the files hold of it; errors as for `__getitem__`."""
        return empty_layer(self.packed(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
