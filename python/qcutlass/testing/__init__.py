"""The standard of a correct product: references, error bounds, problem generators and poisoned buffers.

Every tolerance of the project lives in this package. It is plain torch: it knows neither the packed layout nor the
extension, so it can judge both. Two oracles are offered:

* **E, exact** (`exact_problem`): small integers and power-of-two scales make every order of summation exact in fp32,
  so an output must equal the correctly rounded reference.
* **T, real data** (`random_problem`, `reference`, `bound`): each element must lie within an a-priori error bound of
  the float64 reference.

Products of 8-bit activations have the same two (`EightBitCase`), and their integer sums must be right bit for bit;
blockwise ones too (`BlockwiseCase`), with `assert_quantized` for outputs that are quantised in turn. Those by 4-bit
weights have `Int4Case`. Weight-only products that quantise their activations are judged by
`int8_activations_reference`.

Example:
    >>> import torch
    >>> from qcutlass import testing
    >>> p = testing.random_problem(3, 16, 64, bits=4, group_size=32, dtype=torch.float16, seed=1)
    >>> out = (p.a.float() @ p.weight().T).half()
    >>> testing.error_ratio(out, p.reference()) <= 1
    True
"""

from qcutlass.testing.blockwise import (
    BlockwiseCase,
    BlockwiseProblem,
    BlockwiseReference,
    assert_gelu,
    assert_quantized,
    quantized_error_ratio,
)
from qcutlass.testing.bounds import (
    SLOPE,
    UNIT_ROUNDOFF,
    Reference,
    activate,
    assert_close,
    assert_equal,
    bound,
    dequantized_weight,
    error_ratio,
    error_ratios,
    reference,
    scaled_activations,
)
from qcutlass.testing.eight_bit import EightBitCase, EightBitProblem, EightBitReference, Scope
from qcutlass.testing.grouped import GroupedCase, GroupedProblem
from qcutlass.testing.int4 import Int4Case, Int4Problem, Int4Reference
from qcutlass.testing.int8_activations import (
    Int8ActivationsReference,
    int8_activations,
    int8_activations_reference,
)
from qcutlass.testing.poison import Poisoned, poison_free_memory
from qcutlass.testing.problems import Case, Problem, Zeros, exact_problem, random_problem

__all__ = [
    "SLOPE",
    "UNIT_ROUNDOFF",
    "BlockwiseCase",
    "BlockwiseProblem",
    "BlockwiseReference",
    "Case",
    "EightBitCase",
    "EightBitProblem",
    "EightBitReference",
    "GroupedCase",
    "GroupedProblem",
    "Int4Case",
    "Int4Problem",
    "Int4Reference",
    "Int8ActivationsReference",
    "Poisoned",
    "Problem",
    "Reference",
    "Scope",
    "Zeros",
    "activate",
    "assert_close",
    "assert_equal",
    "assert_gelu",
    "assert_quantized",
    "bound",
    "dequantized_weight",
    "error_ratio",
    "error_ratios",
    "exact_problem",
    "int8_activations",
    "int8_activations_reference",
    "poison_free_memory",
    "quantized_error_ratio",
    "random_problem",
    "reference",
    "scaled_activations",
]
