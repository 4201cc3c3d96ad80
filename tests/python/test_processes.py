"""Processes around products: children by fork and spawn, Ctrl-C, sub-interpreters; tensors that are freed, resized and
replaced between calls."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import blockwise, moe, testing
from qcutlass.products.decoder_operators import add_rms_norm, gate, rms_norm, rms_norm_quantized
from qcutlass.products.moe_operators import gate_rows, sum_slots
from qcutlass.products.rotary_operators import rotary

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


def calls(seed: int) -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Functions and their tensors, one or more of which are then freed."""
    given = operands_of(3, seed)
    a, packed, scales, zeros = given.values()
    x, weight, one = torch.randn(3, 64), torch.randn(64), torch.ones(1)
    q, angles = torch.randn(1, 3, 2, 16), torch.randn(1, 3, 16)
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    quantized, scale = blockwise.act_quant(x)
    ids, shares = torch.randint(0, 4, (3, 2)), torch.rand(3, 2)
    order = moe.route(ids, 4).order
    return {
        "gemm": (qcutlass.gemm, [a, packed, scales, zeros]),
        "preprocess_weights": (lambda t: qcutlass.preprocess_weights(t, 4), [codes]),
        "unpack_weights": (lambda t: qcutlass.unpack_weights(t, 4, (96, 256)), [packed]),
        "dequantize": (lambda *t: qcutlass.dequantize(*t, k=256), [packed, scales, zeros]),
        "weight_sums": (qcutlass.weight_sums, [torch.ones(32, 64, dtype=torch.int8)]),
        "act_quant": (blockwise.act_quant, [x]),
        "act_dequant": (blockwise.act_dequant, [quantized, scale]),
        "rms_norm": (lambda *t: rms_norm(*t, 1e-5), [x, weight]),
        "add_rms_norm": (lambda *t: add_rms_norm(*t, 1e-5), [x, x.clone(), weight]),
        "rms_norm_quantized": (lambda a, w, scale: rms_norm_quantized(a, w, 1e-5, torch.int8, scale), [x, weight, one]),
        "gate": (lambda *t: gate("silu_mul", *t), [x, x.clone()]),
        "rotary": (rotary, [q, q.clone(), angles, angles.clone()]),
        "route": (lambda *t: moe.route(t[0], 4, t[1]), [ids, shares]),
        "gate_rows": (gate_rows, [x]),
        "sum_slots": (sum_slots, [torch.randn(6, 8), order]),
    }


FREED = [(name, index) for name, (_, tensors) in calls(0).items() for index in range(len(tensors))]


@pytest.mark.parametrize(("name", "index"), FREED)
def test_freed_tensors_are_refused(name: str, index: int, seed: int) -> None:
    function, tensors = calls(seed)[name]
    function(*tensors)
    tensors = [tensor.clone() for tensor in tensors]
    tensors[index].untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError), match=r"no storage; was it freed\?|data is not allocated"):
        function(*tensors)
