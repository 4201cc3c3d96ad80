"""Processes around products: children by fork and spawn, Ctrl-C, sub-interpreters; tensors that are freed, resized and
replaced between calls."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from tests.python import test_grouped, test_moe
from tests.python.kinds import DESCRIPTIONS, OUTLINES
from torch import Tensor

import qcutlass
from qcutlass import blockwise, moe, testing
from qcutlass.products.decoder_operators import add_rms_norm, gate, rms_norm, rms_norm_quantized
from qcutlass.products.moe_operators import gate_rows, sum_slots
from qcutlass.products.rotary_operators import rotary
from qcutlass.testing import Case, GroupedCase
from qcutlass.testing.moe import MoeCase

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_both = pytest.mark.parametrize("device", DEVICES)

PRELUDE = """
import multiprocessing, os, random, signal, sys, threading, time
import torch, qcutlass
from tests.python.random_products import KINDS
from tests.python.soak import same

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it

def trials(seed):
    return [trial for kind in KINDS for trial in KINDS[kind](random.Random(f"{kind} {seed}"), "cpu")]

def worst(seed):
    return max(trial.judge(trial.run()) for trial in trials(seed))
"""


def run(code: str, repository: Path, prelude: str = PRELUDE) -> str:
    process = [sys.executable, "-c", prelude + code]
    result = subprocess.run(process, cwd=repository, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_kind_after_a_fork(seed: int, repository: Path) -> None:
    """Children of a process that has used every kind, and their children; the parent goes on.

    The children have one thread, since torch's own loops on several wait forever in a forked child; products on several
    threads there are in `test_threads.py`.
    """
    code = f"""
torch.set_num_threads(2)
work = trials({seed})
expected = [[out.clone() for out in trial.run()] for trial in work]
print(max(trial.judge(outs) for trial, outs in zip(work, expected)) <= 1)

def wrong():
    return [str(trial.label) for trial, outs in zip(work, expected) if not same(trial.run(), outs)]

for generation in range(2):
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # a child that waits for its parent's threads ends here
        torch.set_num_threads(1)
        here = wrong()
        grandchild = os.fork()
        if grandchild == 0:
            signal.alarm(120)
            os._exit(len(wrong()) > 0)
        os._exit(len(here) > 0 or os.waitpid(grandchild, 0)[1] != 0)
    print(os.waitpid(child, 0)[1], wrong())
"""
    assert run(code, repository).splitlines() == ["True", "0 []", "0 []"]


def product_of(operands: dict[str, Tensor]) -> Tensor:
    return qcutlass.gemm(**operands)  # type: ignore[arg-type]


def operands_of(m: int, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    p = testing.random_problem(m, 96, 256, device=device, seed=seed)
    assert p.zeros is not None
    return {"a": p.a, "w_packed": qcutlass.preprocess_weights(p.codes, 4), "scales": p.scales, "zeros": p.zeros}


def test_spawned_children_compute_the_same(seed: int, tmp_path: Path) -> None:
    """Operands come to them through shared memory."""
    script = tmp_path / "spawned.py"
    script.write_text(f"""
import torch, qcutlass
from torch import multiprocessing
from qcutlass import testing

def product(operands):
    return qcutlass.gemm(*operands)

if __name__ == "__main__":
    p = testing.random_problem(5, 96, 256, seed={seed})
    operands = p.a, qcutlass.preprocess_weights(p.codes, 4), p.scales, p.zeros
    expected = product(operands)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(all(torch.equal(out, expected) for out in pool.map(product, [operands] * 4)))
""")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=600)
    assert (result.returncode, result.stdout.strip()) == (0, "True"), result.stderr


def test_ctrl_c_ends_long_work(seed: int, repository: Path) -> None:
    """KeyboardInterrupt comes when the product that runs has returned, and the next products are right."""
    code = f"""
torch.set_num_threads(2)
packed = qcutlass.preprocess_weights(torch.randint(0, 16, (2048, 2048), dtype=torch.uint8), bits=4)
a, scales = torch.randn(64, 2048), torch.rand(16, 2048)
expected, interrupts = qcutlass.gemm(a, packed, scales), 0
choose = random.Random({seed})
for _ in range(20):
    try:  # the interrupt may come before the first product, too
        threading.Timer(choose.random() / 20, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            qcutlass.gemm(a, packed, scales)
            qcutlass.quantize(a)
    except KeyboardInterrupt:
        interrupts += 1
    assert torch.equal(qcutlass.gemm(a, packed, scales), expected)
print(interrupts, worst({seed}) <= 1)
"""
    assert run(code, repository) == "20 True"


INTERPRETERS = "_interpreters" if importlib.util.find_spec("_interpreters") else "_xxsubinterpreters"


@pytest.mark.parametrize("first", ["", "import qcutlass, torch; qcutlass.gemm\n"], ids=["alone", "beside the main one"])
def test_sub_interpreters_are_refused(first: str, repository: Path) -> None:
    code = f"""
import {INTERPRETERS} as interpreters, sys
{first}
other = interpreters.create()
try:
    found = interpreters.run_string(other, f'''
import sys
sys.path[:] = {{sys.path}}
try:
    import qcutlass
except ImportError as error:
    print(str(error), "torch" in sys.modules, flush=True)
''')
finally:
    interpreters.destroy(other)
"""
    printed = run(code, repository, prelude="")
    assert printed.startswith("qcutlass: expected Python's main interpreter, got a sub-interpreter")
    assert printed.endswith(" False")


@on_both
def test_tensors_come_and_go_between_calls(device: str, seed: int) -> None:
    """Calls of one shape are remembered; new tensors at old addresses, old ones at new addresses are read so."""
    expected = [product_of(operands_of(m, seed + m, device)) for m in (3, 40)]
    kept = operands_of(3, seed, device)
    for number in range(30):
        for m, right in zip((3, 40), expected, strict=True):
            fresh = operands_of(m, seed + m, device)  # the last ones' memory, as often as not
            testing.assert_equal(product_of(fresh), right)
            for name, tensor in kept.items():
                tensor.resize_(fresh[name].shape).copy_(fresh[name])
            testing.assert_equal(product_of(kept), right)
            for name, tensor in kept.items():
                tensor.set_(fresh[name])  # type: ignore[no-untyped-call]
            del fresh
            testing.assert_equal(product_of(kept), right, label=number)


def test_operands_that_shrank_are_refused(seed: int) -> None:
    for name, wrong in {"w_packed": (3, 4, 32, 16), "scales": (1, 96), "zeros": (2, 95), "a": (3, 255)}.items():
        operands = operands_of(3, seed)
        product_of(operands)
        operands[name].resize_(wrong)
        with pytest.raises(ValueError, match=name):
            product_of(operands)


Call: TypeAlias = tuple[Callable[..., Any], list[Tensor]]


def products(seed: int, device: str) -> dict[str, Call]:
    """Products of every kind, and blocks of experts, with all operands."""
    found: dict[str, Call] = {}
    for name, kind in DESCRIPTIONS.items():
        product = kind.random(kind.on(device, kind.whole), device, seed)
        found[name] = (
            partial(by_name, kind.function, list(product.operands), product.options),
            [*product.operands.values()],
        )
    case = Case(9, 72, 256, 4, 32, "int", torch.float16, bias=True)
    grouped = GroupedCase(case, (5, 0, 9), scaled=True).random(device=device, seed=seed)
    operands, options = test_grouped.arguments(grouped)
    values = dict(zip(("a", "w_packed", "scales", "zeros"), operands, strict=True)) | options
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in values.items() if name not in tensors}
    found["gemm_grouped"] = partial(by_name, qcutlass.gemm_grouped, list(tensors), rest), [*tensors.values()]
    block = MoeCase(5, 64, 64, 4, 2, zeros="int", bias=True).random(device=device, seed=seed)
    x, gate_up, down, ids, shares = test_moe.arguments(block)
    parts = [part for weights in (gate_up, down) for part in weights[:PARTS]]
    found["experts"] = experts_of, [x, *parts, ids, shares.contiguous()]
    return found


PARTS = 4  # of the weights of experts: w_packed, scales, zeros, bias


def by_name(function: Callable[..., Any], names: list[str], options: dict[str, Any], *tensors: Tensor) -> Any:
    return function(**dict(zip(names, tensors, strict=True)), **options)


def experts_of(x: Tensor, *given: Tensor) -> Tensor:
    gate_up, down = (moe.ExpertWeights(*given[at : at + PARTS]) for at in (0, PARTS))
    return moe.experts(x, gate_up, down, *given[2 * PARTS :])


def calls(seed: int, device: str = "cpu") -> dict[str, Call]:
    """Functions and their tensors, one or more of which are then freed."""
    _, packed, scales, zeros = operands_of(3, seed, device).values()
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.float16)

    def integers(end: int, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=generator).to(device, dtype)

    x, weight, one = normal(3, 64), normal(64), torch.ones(1, device=device)
    q, angles = normal(1, 3, 2, 16), normal(1, 3, 16)
    quantized, scale = blockwise.act_quant(x)
    ids, shares = integers(4, torch.int64, 3, 2), normal(3, 2).float()
    order = moe.route(ids, 4).order
    return products(seed, device) | {
        "preprocess_weights": (lambda t: qcutlass.preprocess_weights(t, 4), [integers(16, torch.uint8, 32, 64)]),
        "unpack_weights": (lambda t: qcutlass.unpack_weights(t, 4, (96, 256)), [packed]),
        "dequantize": (lambda *t: qcutlass.dequantize(*t, k=256), [packed, scales, zeros]),
        "weight_sums": (qcutlass.weight_sums, [integers(9, torch.int8, 32, 64)]),
        "act_quant": (blockwise.act_quant, [x]),
        "act_dequant": (blockwise.act_dequant, [quantized, scale]),
        "rms_norm": (lambda *t: rms_norm(*t, 1e-5), [x, weight]),
        "add_rms_norm": (lambda *t: add_rms_norm(*t, 1e-5), [x, x.clone(), weight]),
        "rms_norm_quantized": (lambda a, w, scale: rms_norm_quantized(a, w, 1e-5, torch.int8, scale), [x, weight, one]),
        "gate": (lambda *t: gate("silu_mul", *t), [x, x.clone()]),
        "rotary": (rotary, [q, q.clone(), angles, angles.clone()]),
        "route": (lambda *t: moe.route(t[0], 4, t[1]), [ids, shares]),
        "gate_rows": (gate_rows, [x]),
        "sum_slots": (sum_slots, [normal(6, 8), order]),
    }


FREED = [(name, index) for name, (_, tensors) in calls(0).items() for index in range(len(tensors))]


REFUSAL = r"no storage; was it freed\?|data is not allocated|out of bounds for storage of size 0"
"""Ours, and torch's, of views of a tensor such as one expert's part."""


@on_both
@pytest.mark.parametrize(("name", "index"), FREED)
def test_freed_tensors_are_refused(name: str, index: int, device: str, seed: int) -> None:
    function, tensors = calls(seed, device)[name]
    function(*tensors)
    tensors = [tensor.clone() for tensor in tensors]
    tensors[index].untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError), match=REFUSAL):
        function(*tensors)


def test_every_kind_of_product_is_among_the_freed() -> None:
    functions = {kind.function.__name__ for kind in DESCRIPTIONS.values()} | {*OUTLINES}
    assert functions >= {"gemm", "gemm_w4a8", "gemm_w8a8", "gemm_fp8", "gemm_grouped"}
    assert {*DESCRIPTIONS, *OUTLINES, "experts"} <= {name for name, _ in FREED}
