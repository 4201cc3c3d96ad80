"""A plug-in for vLLM: its models multiply by qcutlass. `docs/serving.md` says how to use it.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`. Modules of this package
that import vLLM are `interface`, which alone knows the differences of its versions, `config`, `method`, `mixture`,
`embedding` and `kernel`.
"""

from __future__ import annotations

from qcutlass.products import invariance

__all__ = ["register"]


def register() -> None:
    """Makes the quantisation method "qcutlass", and a linear kernel, known to vLLM; calling it again changes nothing.

    Where vLLM's own `VLLM_BATCH_INVARIANT=1` is set, all products of the process become batch-invariant.

    Raises:
        ImportError: vLLM is absent, or of a version whose interface is another one.

    Example:
        >>> from qcutlass.vllm import register
        >>> try:
        ...     register()
        ... except ImportError as error:
        ...     assert "vllm" in str(error)
    """
    try:
        from qcutlass.vllm import config, interface, kernel
    except ImportError as error:
        raise ImportError(
            "qcutlass.vllm: expected vllm 0.26 or a version with the same interface, which "
            f'`pip install "qcutlass[vllm]"` installs; got: {error}'
        ) from error
    if interface.is_batch_invariant():
        invariance.switch(True)
    config.register_method()
    kernel.register_kernel()
