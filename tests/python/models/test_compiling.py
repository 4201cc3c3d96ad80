"""Where compiled steps are kept, and what becomes of steps that cannot be compiled."""

from __future__ import annotations

import functools
import getpass
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")
from qcutlass.models import compiling, stepping  # noqa: E402
from qcutlass.models.stepping import Decoder, in_steps  # noqa: E402

SLOWER = "steps are not compiled, which is slower: "
EAGER = "steps are not captured in a CUDA graph, which is slower: "
VARIABLES = "TORCHINDUCTOR_CACHE_DIR", "QCUTLASS_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR", "TRITON_CACHE_DIR"
LLAMA = "from transformers.models.llama.modeling_llama import LlamaModel"
COMPILER = "import torch._dynamo, torch._inductor.codecache"  # which sets torch's variable
PLACES: dict[str, tuple[str, dict[str, str], str]] = {  # what is imported before, variables, the folder
    "the user's caches": ("", {}, "users/qcutlass/inductor"),
    "behind transformers": (LLAMA, {}, "users/qcutlass/inductor"),
    "behind torch's compiler": (COMPILER, {"QCUTLASS_CACHE_DIR": "ours"}, "ours/inductor"),
    "a cache that is no folder": ("", {"QCUTLASS_CACHE_DIR": "file"}, f"torchinductor_{getpass.getuser()}"),
    "torch's variable": (COMPILER, {"QCUTLASS_CACHE_DIR": "ours", "TORCHINDUCTOR_CACHE_DIR": "own"}, "own"),
}


def printed(code: str, **variables: object) -> str:
    """What a fresh process prints, of whose environment nothing else names a cache."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {name: str(value) for name, value in variables.items()}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("place", PLACES)
def test_compiled_code_stays_in_the_users_cache(place: str, tmp_path: Path) -> None:
    before, variables, folder = PLACES[place]
    (tmp_path / "file").touch()
    chosen = {name: tmp_path / value for name, value in variables.items()}
    code = f"{before}\nfrom qcutlass.models.stepping import compiled_code\nprint(compiled_code())"
    found = printed(code, XDG_CACHE_HOME=tmp_path / "users", TMPDIR=tmp_path, **chosen)
    assert found == str(tmp_path / folder)


def test_torch_compiles_into_that_folder(tmp_path: Path) -> None:
    code = """
import torch, torch._dynamo
from qcutlass.models.compiling import compiled
print(compiled(lambda x: x.sin() + 1)(torch.zeros(2)).tolist())
"""
    assert printed(code, QCUTLASS_CACHE_DIR=tmp_path / "ours", TMPDIR=tmp_path) == "[1.0, 1.0]"
    assert list((tmp_path / "ours/inductor").rglob("*.py"))
    assert not list(tmp_path.glob("torchinductor_*/**/*.py"))


GENERATE = """
import warnings
import torch, transformers
from qcutlass.models.stepping import in_steps

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=96)).eval()
made = lambda: model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
expected = made()
with warnings.catch_warnings(record=True) as seen, in_steps(model, 16):
    warnings.simplefilter("always")
    assert made() == expected
(warning,) = [each for each in seen if each.category is RuntimeWarning]
print(warning.message)
"""


def test_a_broken_compiler_leaves_the_text_as_it_is(tmp_path: Path) -> None:
    found = printed(GENERATE, CXX="/nonexistent", QCUTLASS_CACHE_DIR=tmp_path)
    assert found.startswith(SLOWER)
    assert "No working C++ compiler found" in found
    assert len(found.splitlines()) == 1


def model_of() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=96, initializer_range=0.1)
    return transformers.LlamaForCausalLM(config).eval()


def broken(*arguments: Any, **options: Any) -> Any:
    raise OSError("no space left\non device")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))


def assert_steps_are_right(model: Any, decoder: Decoder) -> None:
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1)).to(model.device)
    with torch.inference_mode():
        expected = model(ids).logits
    found = [decoder.prefill(ids[:, :5])]
    for place in range(5, 12):
        decoder.tokens.copy_(ids[:, place : place + 1])
        found.append(decoder.step().clone())
    assert (torch.stack(found, dim=1) - expected[:, 4:]).abs().max() < 1e-4 * expected.std()


@pytest.mark.usefixtures("no_compiler")
def test_a_step_that_cannot_be_compiled_is_taken_all_the_same() -> None:
    model, told = model_of(), list[str]()
    decoder = Decoder(model, 2, 12, on_failure=told.append)
    assert not decoder.is_ready
    assert_steps_are_right(model, decoder)
    assert_steps_are_right(model, decoder)
    assert told == [SLOWER + "backend='broken' raised: OSError: no space left"]
    assert decoder.is_ready


def fake_graphs(monkeypatch: pytest.MonkeyPatch, graph: Callable[..., Any]) -> None:
    """Stand-ins for streams and graphs; `graph`: that of `torch.cuda.graph`."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"Stream": lambda: stream, "current_stream": lambda: stream, "stream": nullcontext, "graph": graph}
    for name, fake in {**fakes, "CUDAGraph": SimpleNamespace, "graph_pool_handle": lambda: (0, 1)}.items():
        monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.usefixtures("no_compiler")
def test_a_graph_is_captured_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph captures is not computed, but by its replays."""
    model, told = model_of(), list[str]()
    decoder = Decoder(model, 2, 12, on_failure=told.append)
    decoder._graph = True
    captured = []

    @contextmanager
    def graph(into: SimpleNamespace, pool: object) -> Iterator[None]:
        before = [tensor.clone() for tensor in decoder._state()]
        captured.append(decoder._compiled)
        yield
        for tensor, value in zip(decoder._state(), before, strict=True):
            tensor.copy_(value)
        into.replay = lambda: setattr(decoder, "_logits", decoder._compute())

    fake_graphs(monkeypatch, graph)
    assert_steps_are_right(model, decoder)
    assert captured == [False], "the first step fails ahead of the capture"
    assert len(told) == 1


@pytest.fixture
def failing_captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each capture that was tried, all of which fail, as where another thread allocates memory meanwhile."""
    tried: list[str] = []

    @contextmanager
    def graph(into: SimpleNamespace, pool: object) -> Iterator[None]:
        tried.append("tried")
        try:
            yield
            raise RuntimeError("CUDA error: operation not permitted\nSearch for it")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    fake_graphs(monkeypatch, graph)
    return tried


class CapturingDecoder(Decoder):
    """It captures on the CPU, too."""

    def __init__(self, *arguments: Any, graph: bool = True, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._graph = graph


def test_a_step_that_cannot_be_captured_is_taken_all_the_same(failing_captures: list[str]) -> None:
    model, told = model_of(), list[str]()
    decoder = CapturingDecoder(model, 2, 12, compiled=False, on_failure=told.append)
    for _ in range(2):
        assert_steps_are_right(model, decoder)
    assert told == [EAGER + "CUDA error: operation not permitted"]
    assert (len(failing_captures), decoder.is_ready) == (1, True)


def test_nothing_else_is_captured_behind_a_failure(
    failing_captures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, told = model_of(), list[str]()
    ids, options = torch.tensor([[5, 6, 7], [8, 9, 5]]), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = [model.generate(ids[:count], **options).tolist() for count in (1, 2)]
    monkeypatch.setattr(stepping, "Decoder", CapturingDecoder)
    with in_steps(model, 16, compiled=False, on_failure=told.append):
        assert [model.generate(ids[:count], **options).tolist() for count in (1, 2)] == expected
    assert (len(told), len(failing_captures)) == (1, 1)


@pytest.mark.parametrize("error", [IndexError("no such token"), RuntimeError("no such token"), KeyboardInterrupt()])
@pytest.mark.parametrize("calls", [0, 2], ids=["ahead", "inside"])
@pytest.mark.usefixtures("failing_captures")
def test_errors_of_a_step_are_raised_where_it_is_captured(
    error: BaseException, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it is not: ahead of a capture, and behind one that they ended; an interrupt is one wherever it comes."""
    told: list[str] = []
    decoder = CapturingDecoder(model_of(), 1, 12, compiled=False, on_failure=told.append)
    own, left = decoder._called, iter(range(calls))

    def called() -> Any:
        if next(left, None) is None:
            raise error
        return own()

    monkeypatch.setattr(decoder, "_called", called)
    with pytest.raises(type(error)):
        decoder.step()
    is_interrupt = isinstance(error, KeyboardInterrupt)
    assert told == ([EAGER + "no such token"] if calls and not is_interrupt else [])


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_gpu_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = model_of().cuda(), list[str]()
    decoder = Decoder(model, 2, 12, compiled=False, on_failure=told.append)
    own, stream = decoder._called, torch.cuda.current_stream()

    def called() -> Any:
        if torch.cuda.is_current_stream_capturing():
            decoder.tokens.tolist()  # waits for the stream, which none may do that is captured
        return own()

    monkeypatch.setattr(decoder, "_called", called)
    with torch.cuda.device(model.device):
        assert_steps_are_right(model, decoder)
        (line,) = told
        assert line.startswith(EAGER)
        assert "captur" in line.removeprefix(EAGER)
        assert torch.cuda.current_stream() == stream
        assert torch.rand(8, device="cuda").unique().numel() == 8
        before = torch.cuda.memory_reserved()
        torch.empty(2**28, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before


@pytest.mark.usefixtures("no_compiler")
def test_nothing_else_is_compiled_behind_a_failure() -> None:
    model, told, waited = model_of(), list[str](), list[int]()
    ids, options = torch.tensor([[5, 6, 7], [8, 9, 5]]), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = [model.generate(ids[:count], **options).tolist() for count in (1, 2)]
    with in_steps(model, 16, on_first_step=lambda: waited.append(1), on_failure=told.append):
        assert [model.generate(ids[:count], **options).tolist() for count in (1, 2)] == expected
    assert (len(told), len(waited)) == (1, 1)


def test_a_decoder_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model, waited = model_of(), list[int]()
    with warnings.catch_warnings(), in_steps(model, 16, on_first_step=lambda: waited.append(1)):
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        for _ in range(2):
            model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert len(waited) == 1


def test_errors_of_the_model_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is compiled, and of one that fails uncompiled, too."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        raise IndexError("no such token")

    told: list[str] = []
    for call, error in ((wrong, IndexError), (broken, OSError)):
        decoder = Decoder(model_of(), 1, 12, on_failure=told.append)
        monkeypatch.setattr(decoder, "_called", call)
        with pytest.raises(error):
            decoder.step()
    assert told == [SLOWER + "no space left"]


def test_a_full_disk_leaves_steps_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands some errors of its folder on as they are."""
    model, told = model_of(), list[str]()
    decoder = Decoder(model, 2, 12, on_failure=told.append)
    called = decoder._called
    monkeypatch.setattr(decoder, "_called", lambda: broken() if decoder._compiled else called())
    assert_steps_are_right(model, decoder)
    assert told == [SLOWER + "no space left"]


REASONS = {
    "RuntimeError: Failed to find C compiler. Please specify via CC\n\nSet TORCHDYNAMO_VERBOSE=1": (
        "RuntimeError: Failed to find C compiler. Please specify via CC"
    ),
    "CppCompileError: C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\nx.cpp:1:9: fatal error: no omp.h\nended\n": (
        "CppCompileError: C++ compile error: x.cpp:1:9: fatal error: no omp.h"
    ),
    "SubprocException: An exception occurred in a subprocess:\n\nName=k\nTraceback (...):\n  File\nOSError: full\n": (
        "SubprocException: An exception occurred in a subprocess: OSError: full"
    ),
    "": "TorchDynamoException",
}


@pytest.mark.parametrize("text", REASONS)
def test_a_failure_is_told_in_a_line(text: str) -> None:
    assert compiling.failure(compiling.FAILURES[0](text)) == SLOWER + REASONS[text]
