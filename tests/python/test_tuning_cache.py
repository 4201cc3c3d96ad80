"""The file of tuned plans: what is found, what is ignored, and that nothing is lost."""

from __future__ import annotations

import doctest
import json
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.absent_gpu import H200, LAYER, NAME, look_up

from qcutlass import _C, tuning
from qcutlass.products import tuned_plans as cache
from qcutlass.products.tuned_plans import Gpu, PlanCache, TunedPlan, product_key
from qcutlass.tuning.layer import Layer


def candidate(m: int, rank: int, layer: Layer = LAYER) -> TunedPlan:
    """The plan that selection likes in place `rank`."""
    plan = _C.candidates(layer.arguments(m), H200)[rank].plan
    return TunedPlan(plan.tactic, plan.split_k, 1.5)


def remember(m: int, plan: TunedPlan, layer: Layer = LAYER) -> Path | None:
    return cache.store({product_key(layer.arguments(m), m): plan}, H200, 0)


def test_a_stored_plan_is_found_by_later_processes(plans: Path) -> None:
    assert look_up(16) is None
    path = remember(16, candidate(16, 3))
    assert path is not None
    assert path.parent == plans
    assert look_up(16) == candidate(16, 3)[:2]
    tuning.forget()
    assert look_up(16) == candidate(16, 3)[:2]
    assert [entry.suffix for entry in sorted(plans.iterdir())] == [".json", ".lock"]
    content = json.loads(path.read_text())
    assert content["gpu"] == {"name": NAME, "sm_count": 132}
    assert content["kernels"] == _C.kernel_set_hash()


def test_whatever_selection_offers_is_read_back(plans: Path) -> None:
    """Kernels of asynchronous MMAs share K by other numbers of blocks than the others do."""
    device, splits = _C.DeviceTraits(90, 132, 232448, wgmma=True), set()
    for m in (1, 64, 96, 128):
        for layer in (LAYER, Layer(4096, 14336), Layer(2560, 4096), Layer(256, 8192)):
            key = product_key(layer.arguments(m), m)
            for offered in _C.candidates(layer.arguments(m), device):
                plan = TunedPlan(offered.plan.tactic, offered.plan.split_k, 1.5)
                assert cache.store({key: plan}, device, 0) is not None
                tuning.forget()
                assert look_up(m, layer, device) == plan[:2]
                splits.add(plan.split_k)
    assert splits > {1, 2, 3, 4, 5, 6, 8}


def test_a_plan_serves_the_rows_of_its_bucket(plans: Path) -> None:
    remember(16, candidate(16, 3))
    assert look_up(9) == look_up(16) is not None
    assert look_up(8) is None
    assert look_up(17) is None
    assert tuning.bucket(16384) == 16384
    assert look_up(16385) is None


def test_a_plan_is_made_for_the_very_product(plans: Path) -> None:
    wide = Layer(4096, 65536)
    remember(16, candidate(16, 0, wide)._replace(split_k=9), wide)  # too many for a cluster: sums need memory
    few, many = (tuning.lookup(wide.arguments(m), H200, 0) for m in (10, 11))
    assert few is not None
    assert many is not None
    assert few.workspace_bytes == 9 * 10 * 4096 * 4
    assert many.workspace_bytes == 9 * 11 * 4096 * 4


@pytest.mark.parametrize(
    "other",
    [
        Layer(4096, 2048), Layer(2048, 1024), Layer(4096, 1024, bits=8), Layer(4096, 1024, group_size=64),
        Layer(4096, 1024, group_size=1024), Layer(4096, 1024, dtype=torch.bfloat16, scale_dtype=torch.bfloat16),
        Layer(4096, 1024, scale_dtype=torch.float32), Layer(4096, 1024, zero_dtype=torch.uint8),
        Layer(4096, 1024, zero_dtype=torch.float16),
    ],
)  # fmt: skip
def test_plans_of_another_scheme_or_shape_are_not_taken(other: Layer, plans: Path) -> None:
    remember(16, candidate(16, 3))
    assert look_up(16, other) is None
    remember(16, candidate(16, 2, other), other)
    assert look_up(16, other) == candidate(16, 2, other)[:2]
    assert look_up(16) == candidate(16, 3)[:2]


def test_another_gpu_has_plans_of_its_own(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(16, candidate(16, 3))
    tuning.forget()
    assert look_up(16, traits=_C.DeviceTraits(90, 78, 232448)) is None, "fewer multiprocessors"
    tuning.forget()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "another")
    assert look_up(16) is None
    tuning.forget()
    monkeypatch.setattr(_C, "kernel_set_hash", lambda: "0123456789abcdef")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAME)
    assert look_up(16) is None, "other kernels"


def test_unknown_names_and_splits_are_ignored(plans: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remember(16, TunedPlan("a_kernel_of_tomorrow", 1, 1.0))
        assert look_up(16) is None
        remember(16, candidate(16, 3)._replace(split_k=64))  # more blocks than stages of this K
        assert look_up(16) is None


def test_a_dense_plan_serves_plain_products(plans: Path) -> None:
    remember(512, TunedPlan(_C.dense_tactic(LAYER.arguments(512)), 1, 1.0))
    arguments = LAYER.arguments(300)
    plan = tuning.lookup(arguments, H200, 0)
    assert plan is not None
    assert plan.dense
    arguments.activation = _C.Activation.SILU
    assert tuning.lookup(arguments, H200, 0) is None
    arguments = LAYER.arguments(300)
    arguments.bias_type = _C.DType.FLOAT16
    assert tuning.lookup(arguments, H200, 0) is None


def valid(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def entry(**fields: object) -> Callable[[dict[str, Any]], object]:
    """A damage: fields of the only plan replaced."""

    def damage(content: dict[str, Any]) -> None:
        next(iter(content["plans"].values())).update(fields)

    return damage


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "format": lambda content: content.update(format=2),
    "format type": lambda content: content.update(format=True),
    "no plans": lambda content: content.pop("plans"),
    "more fields": lambda content: content.update(more=1),
    "plans type": lambda content: content.update(plans=[]),
    "plan type": lambda content: content["plans"].update(key=[1]),
    "plan without fields": lambda content: content["plans"].update(key={}),
    "gpu": lambda content: content["gpu"].update(name="another"),
    "gpu type": lambda content: content.update(gpu="NVIDIA"),
    "SM count": lambda content: content["gpu"].update(sm_count=131),
    "kernels": lambda content: content.update(kernels="0123456789abcdef"),
    "tactic type": entry(tactic=5),
    "tactic empty": entry(tactic=""),
    "tactic long": entry(tactic="x" * 10_000),
    "tactic no text": entry(tactic="\ud800"),
    "split 0": entry(split_k=0),
    "split huge": entry(split_k=10**9),
    "split 17": entry(split_k=17),
    "split float": entry(split_k=1.0),
    "split bool": entry(split_k=True),
    "time 0": entry(microseconds=0),
    "time negative": entry(microseconds=-1.0),
    "time NaN": entry(microseconds=float("nan")),
    "time infinite": entry(microseconds=float("inf")),
    "time huge": entry(microseconds=10**400),
    "time text": entry(microseconds="fast"),
    "extra field": entry(more=1),
}
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "no object": lambda data: b"[1, 2]",
    "no UTF-8": lambda data: b"\xff\xfe" + data,
    "nested": lambda data: b"[" * 100_000,
    "binary": lambda data: bytes(range(256)),
    "too large": lambda data: data + b" " * (1 << 24),
}


@pytest.mark.parametrize("how", [*DAMAGES, *BYTES])
def test_a_wrong_file_is_ignored_with_one_warning_and_replaced(how: str, plans: Path) -> None:
    path = remember(16, candidate(16, 3))
    assert path is not None
    if how in BYTES:
        path.write_bytes(BYTES[how](path.read_bytes()))
    else:
        content = valid(path)
        DAMAGES[how](content)
        path.write_text(json.dumps(content))
    tuning.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert look_up(16) is None
        assert look_up(32) is None
        remember(32, candidate(32, 1))
    assert len(caught) == 1
    assert f"{path} is ignored: " in str(caught[0].message)
    tuning.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert look_up(32) == candidate(32, 1)[:2]
        assert look_up(16) is None


def test_without_a_writable_folder_plans_stay_in_memory(
    plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("QCUTLASS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    tuning.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert remember(16, candidate(16, 3)) is None
        assert remember(32, candidate(32, 3)) is None
    assert len(caught) == 1
    assert look_up(16) == candidate(16, 3)[:2]
    assert look_up(32) == candidate(32, 3)[:2]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(step: str, plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = remember(16, candidate(16, 3))
    assert path is not None
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.warns(RuntimeWarning, match="No space left on device.*stay in memory"):
            assert remember(32, candidate(32, 3)) is None
    assert path.read_bytes() == before
    assert sorted(entry.suffix for entry in plans.iterdir()) == [".json", ".lock"], "no temporary file is left"
    assert look_up(32) == candidate(32, 3)[:2], "in memory"
    remember(64, candidate(64, 3))
    assert len(valid(path)["plans"]) == 3, "and written with the next ones"


def test_concurrent_writers_lose_nothing_and_readers_see_whole_files(plans: Path) -> None:
    gpu, kernels, writers, rounds = Gpu(NAME, 132), _C.kernel_set_hash(), 6, 15
    path = PlanCache(gpu, kernels, plans).path
    failures: list[BaseException] = []
    done = threading.Event()

    def write(writer: int) -> None:
        try:
            own = PlanCache(gpu, kernels, plans)  # as a process of its own has
            for index in range(rounds):
                assert own.update({f"writer {writer}, {index}": TunedPlan("tactic", 1, 1.0)})
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        try:
            while not done.is_set():
                if path.exists():
                    cache.parse(path.read_text(), gpu, kernels)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    reader = threading.Thread(target=read)
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert failures == []
    assert len(cache.parse(path.read_text(), gpu, kernels)) == writers * rounds


def test_changes_are_announced(plans: Path) -> None:
    calls: list[int] = []
    tuning.on_change(lambda: calls.append(1))
    remember(16, candidate(16, 3))
    assert len(calls) == 1
    tuning.forget()
    assert len(calls) == 2


def test_the_folder_is_the_users_unless_the_environment_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUTLASS_CACHE_DIR", "~/somewhere")
    assert tuning.cache_folder() == Path.home() / "somewhere"
    monkeypatch.delenv("QCUTLASS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/somebody")
    assert tuning.cache_folder() == Path("/var/cache/somebody/qcutlass")


def test_the_examples_of_the_documentation() -> None:
    result = doctest.testmod(cache)
    assert result.attempted > 3
    assert result.failed == 0


def test_a_folder_of_a_user_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUTLASS_CACHE_DIR", "~no such user/plans")
    assert tuning.cache_folder() == Path("~no such user/plans")
