"""Threads of the CPU: those of torch and of the core, what limits them, forked children, calls at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import pytest

POLICIES: Final = {"torch's threads spin": {}, "torch's threads sleep": {"OMP_WAIT_POLICY": "passive"}}
"""With the first products run on torch's threads, with the second on those of the core."""

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")

PRELUDE = """
import os, sys, threading, time
import torch, qcutlass

torch.manual_seed(0)
packed = qcutlass.preprocess_weights(torch.randint(0, 16, (2048, 1024), dtype=torch.uint8), bits=4)
scales, a = torch.rand(8, 2048), torch.randn(3, 1024)

def product():
    return qcutlass.gemm(a, packed, scales)

def of_torch():
    return torch.randn(1 << 20).exp().sum()

def tasks():
    return [int(name) for name in os.listdir("/proc/self/task")]

def seconds_of_others():
    "Time that threads besides this one have had."
    ticks = 0
    for task in tasks():
        if task != threading.get_native_id():
            ticks += sum(map(int, open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")

def shared(call, seconds=0.5):
    "The share of the work that other threads do."
    end, before = time.perf_counter() + seconds, seconds_of_others()
    own = time.thread_time()
    while time.perf_counter() < end:
        call()
    own = time.thread_time() - own
    others = seconds_of_others() - before
    return others / (own + others)
"""


def run(code: str, environment: Mapping[str, str], timeout: float = 120, prelude: str = PRELUDE) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    result = subprocess.run(
        [sys.executable, "-c", prelude + code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> dict[str, str]:
    return POLICIES[request.param]


COUNT = """
torch.set_num_threads(2)
of_torch()
before = len(tasks())
for _ in range(200):
    product()
    of_torch()
print(len(tasks()) - before)
"""


def test_torchs_threads_that_spin_are_the_only_ones() -> None:
    assert run(COUNT, {}) == "0"


def test_beside_threads_that_sleep_are_no_more_than_asked_for() -> None:
    assert int(run(COUNT, POLICIES["torch's threads sleep"])) <= 1


@needs_two_cores
def test_two_threads_share_the_work(policy: dict[str, str]) -> None:
    """However busy the machine is, the second thread has some of it within seconds: where others fill all cores, one
    loop a second is tried with it. So the product takes a tenth of one, that a single loop is seen."""
    code = """
torch.set_num_threads(2)
rows = torch.randn(1024, 1024)
for _ in range(20):
    share = shared(lambda: qcutlass.gemm(rows, packed, scales))
    if share > 0.02:
        break
print(share)
"""
    assert float(run(code, policy)) > 0.02


def test_one_thread_does_all_when_asked_to(policy: dict[str, str]) -> None:
    code = """
torch.set_num_threads(2)
product(), of_torch()
torch.set_num_threads(1)
time.sleep(0.5)  # threads that spin have fallen asleep
print(shared(product))
"""
    assert float(run(code, policy)) < 0.02


def test_the_number_of_threads_in_the_environment(policy: dict[str, str]) -> None:
    code = "before = len(tasks()); product(); print(torch.get_num_threads(), len(tasks()) - before)"
    assert run(code, {**policy, "OMP_NUM_THREADS": "1"}) == "1 0"


ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"


def test_a_process_on_one_core(policy: dict[str, str]) -> None:
    """With one thread, or with more than it has cores."""
    code = """
print(torch.get_num_threads())
expected = product()
torch.set_num_threads(2)
print(all(torch.equal(product(), expected) for _ in range(20)))
"""
    assert run(code, policy, prelude=ONE_CORE + PRELUDE).split() == ["1", "True"]


def test_a_thread_that_is_moved_to_one_core_takes_no_other() -> None:
    code = f"""
torch.set_num_threads(2)
for _ in range(100):
    product()
{ONE_CORE}
print(shared(product))
"""
    assert float(run(code, POLICIES["torch's threads sleep"])) < 0.02


FORK = """
torch.set_num_threads(2)
expected = product()
of_torch()
for generation in range(3):
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(60)  # a child that waits for its parent's threads ends here
        same = all(torch.equal(product(), expected) for _ in range(20))
        grandchild = os.fork()
        if grandchild == 0:
            signal.alarm(60)
            os._exit(0 if torch.equal(product(), expected) else 1)
        same = same and os.waitpid(grandchild, 0)[1] == 0
        os._exit(0 if same else 1)
    print(os.waitpid(child, 0)[1], torch.equal(product(), expected))
"""


def test_forked_children_compute_the_same(policy: dict[str, str]) -> None:
    assert run(FORK, policy, timeout=300).split() == ["0", "True"] * 3


def test_the_first_product_may_be_in_a_forked_child(policy: dict[str, str]) -> None:
    """Where torch's runtime still counts on its parent's threads."""
    code = """
torch.set_num_threads(2)
of_torch()
child = os.fork()
if child == 0:
    import signal
    signal.alarm(60)
    product()
    os._exit(0)
print(os.waitpid(child, 0)[1], product().shape == (3, 2048))
"""
    packing = "packed = qcutlass.preprocess_weights(torch.randint(0, 16, (2048, 1024), dtype=torch.uint8), bits=4)"
    assert packing in PRELUDE
    late = PRELUDE.replace(packing, "").replace("def product():", f"def product():\n    {packing}")
    assert run(code, policy, prelude=late) == "0 True"


def test_calls_of_many_python_threads(policy: dict[str, str]) -> None:
    code = """
torch.set_num_threads(2)
expected = product()
wrong = []

def loop():
    for _ in range(30):
        if not torch.equal(product(), expected):
            wrong.append(threading.get_native_id())

threads = [threading.Thread(target=loop) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(wrong))
"""
    assert run(code, policy) == "0"


def test_the_interpreter_ends_beside_threads_that_wait(policy: dict[str, str]) -> None:
    code = """
torch.set_num_threads(2)
threads = [threading.Thread(target=lambda: [product() for _ in range(20)]) for _ in range(3)]
for thread in threads:
    thread.start()
product(), of_torch(), product()
print("end")
"""
    assert [run(code, policy) for _ in range(3)] == ["end"] * 3


def test_torchs_threads_keep_their_floating_point_mode(policy: dict[str, str]) -> None:
    """Products are computed in the caller's, on whatever threads."""
    code = """
torch.set_num_threads(2)
small = torch.full((1 << 20,), 1e-40)
assert (small * 1).count_nonzero() == small.numel()
torch.set_flush_denormal(True)
for _ in range(100):
    product()
torch.set_flush_denormal(False)
print(int((small * 1).count_nonzero()) == small.numel())
"""
    assert run(code, policy) == "True"
