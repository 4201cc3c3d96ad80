"""Whole models quantised block by block: what the driver finds in a block, what it writes, and runs that end early."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qcutlass import W8A8, CheckpointError, UnsupportedError, WeightOnly, models
from qcutlass.algorithms import InputStatistics, gptq, round_to_nearest
from qcutlass.layers import QuantLinear
from qcutlass.models.quantizing import run
from qcutlass.models.quantizing.decoder import Call
from qcutlass.models.quantizing.decoder import run as run_block
from qcutlass.models.quantizing.methods import METHODS, READERS
from qcutlass.models.quantizing.wiring import InputGroup, divide, find_groups
from qcutlass.testing import quantizing

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.models.quantizations import KINDS, VOCABULARY, calibration, make

KILLS = int(os.environ.get("QCUTLASS_KILLS", 5))
LLAMA = [
    InputGroup(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    InputGroup(("self_attn.o_proj",), None),
    InputGroup(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    InputGroup(("mlp.down_proj",), "mlp.up_proj"),
]
WIRING = {
    "llama": LLAMA,
    "qwen2": [LLAMA[0], InputGroup(("self_attn.o_proj",), "self_attn.v_proj"), *LLAMA[2:]],
    "llama-mha": [LLAMA[0], InputGroup(("self_attn.o_proj",), "self_attn.v_proj"), *LLAMA[2:]],
    "olmo2": [
        InputGroup(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), None),
        InputGroup(("self_attn.o_proj",), "self_attn.v_proj"),
        InputGroup(("mlp.gate_proj", "mlp.up_proj"), None),
        InputGroup(("mlp.down_proj",), "mlp.up_proj"),
    ],
    "opt": [
        InputGroup(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn_layer_norm"),
        InputGroup(("self_attn.out_proj",), "self_attn.v_proj"),
        InputGroup(("fc1",), "final_layer_norm"),
        InputGroup(("fc2",), "fc1"),  # ReLU
    ],
    "gpt_neox": [
        InputGroup(("attention.query_key_value",), "input_layernorm"),
        InputGroup(("attention.dense",), None),
        InputGroup(("mlp.dense_h_to_4h",), "post_attention_layernorm"),
        InputGroup(("mlp.dense_4h_to_h",), None),  # GELU
    ],
}


def block_of(model: Any, index: int = 1) -> tuple[Any, Tensor, Callable[[Tensor], Tensor]]:
    """A block of a model in memory, an input of it, and what it gives for one."""
    blocks = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    seen: list[Any] = []
    hook = blocks[index].register_forward_pre_hook(
        lambda module, arguments, keywords: seen.append((arguments, keywords)), with_kwargs=True
    )
    with torch.no_grad():
        model(calibration(0)[:1], use_cache=False)
    hook.remove()
    (hidden, *rest), keywords = seen[0]

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            answer = blocks[index](x, *rest, **keywords)
        return answer[0] if isinstance(answer, tuple) else answer

    return blocks[index], hidden, run


def linears_of(block: Any) -> list[str]:
    return [name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_wiring_of_a_block_is_found(kind: str, seed: int) -> None:
    block, hidden, run = block_of(make(kind, seed))
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    assert find_groups(block, linears_of(block), hidden, run) == WIRING[kind]
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())


def test_a_block_that_adds_nothing_tells_nothing(seed: int) -> None:
    block, hidden, run = block_of(make("llama", seed))
    with torch.no_grad():
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    groups = find_groups(block, linears_of(block), hidden, run)
    assert [group.linears for group in groups] == [group.linears for group in LLAMA]
    assert all(group.previous is None and not group.is_telling for group in groups)


@pytest.mark.parametrize("kind", KINDS)
def test_factors_of_any_size_keep_the_function(kind: str, seed: int) -> None:
    block, hidden, run = block_of(make(kind, seed))
    expected = run(hidden) - hidden
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for group in WIRING[kind]:
            linears = [block.get_submodule(name) for name in group.linears]
            factors = (4 * torch.rand(linears[0].in_features, generator=generator) - 2).exp()
            if group.previous is not None:
                divide(block.get_submodule(group.previous), factors)
                for linear in linears:
                    linear.weight.mul_(factors)
    assert quantizing.relative_norm(run(hidden) - hidden, expected) <= quantizing.FOLDING


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    import qcutlass.models.transformers  # noqa: F401  # registers the quantiser

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_a_quantised_model_is_loaded(kind: str, name: str, seed: int, tmp_path: Path) -> None:
    model, ids = make(kind, seed), calibration(seed)
    model.save_pretrained(tmp_path / "source")
    calls: list[tuple[str, int, int]] = []
    method = models.Method(name, WeightOnly(8, 32)) if name in ("rtn", "gptq", "awq") else models.Method(name)
    found = models.quantize_model(
        tmp_path / "source",
        tmp_path / "new",
        method,
        calibration=ids if method.needs_calibration else None,
        progress=lambda *call: calls.append(call),
    )
    linears = len(linears_of(block_of(model)[0]))
    assert (found.layers, found.resumed) == (3 * linears, 0)
    quantized = loaded(tmp_path / "new")
    layers = [each for each in quantized.modules() if isinstance(each, QuantLinear)]
    assert len(layers) == 3 * linears
    factors = [getattr(each, "act_scale" if name == "awq" else "smooth", None) for each in layers]
    alone = sum(len(group.linears) for group in WIRING[kind] if group.previous is None)
    assert sum(each is not None for each in factors) <= (3 * alone if name in ("awq", "smoothquant") else 0)
    with torch.no_grad():
        error = quantizing.relative_norm(quantized(ids).logits, model(ids).logits)
    assert error < {"smoothquant": 0.15, "w8a8": 0.15, "blockwise": 0.15, "fp8": 0.5, "blockwise-fp8": 0.5}.get(
        name, 0.05
    )
    steps = [done for what, done, total in calls if what.startswith("block")]
    assert steps == list(range(1, len(steps) + 1))
    assert calls[0][2] == len(steps)
    assert not (tmp_path / "new.work").exists()


def test_methods_beat_rounding_to_nearest(seed: int, tmp_path: Path) -> None:
    model, ids = make("llama", seed, initializer_range=0.05), calibration(seed, 32, 32)
    model.save_pretrained(tmp_path / "source")
    with torch.no_grad():
        expected = model(ids).logits
    errors = {}
    for name, options in {"rtn": {}, "gptq": {}, "act-order": {"act_order": True}, "awq": {}}.items():
        method = models.Method("gptq" if name == "act-order" else name, WeightOnly(4, 32, True), **options)
        needed = ids if method.needs_calibration else None
        models.quantize_model(tmp_path / "source", tmp_path / name, method, calibration=needed)
        with torch.no_grad():
            errors[name] = quantizing.relative_norm(loaded(tmp_path / name)(ids).logits, expected)
    assert errors["gptq"] < 0.8 * errors["rtn"], errors
    assert errors["act-order"] < 0.8 * errors["rtn"], errors
    assert errors["awq"] < errors["rtn"], errors


def test_smoothing_saves_a_model_with_outliers(seed: int, tmp_path: Path) -> None:
    model, ids = make("llama", seed), calibration(seed)
    with torch.no_grad():
        for block in model.model.layers:
            for norm, names in ((block.input_layernorm, LLAMA[0]), (block.post_attention_layernorm, LLAMA[2])):
                norm.weight[:3] *= 200  # as in large models, a few channels have huge activations
                for name in names.linears:
                    block.get_submodule(name).weight[:, :3] /= 200
        expected = model(ids).logits
    model.save_pretrained(tmp_path / "source")
    errors = {}
    for name, needed in (("w8a8", None), ("smoothquant", ids)):
        models.quantize_model(tmp_path / "source", tmp_path / name, name, calibration=needed)
        with torch.no_grad():
            errors[name] = quantizing.relative_norm(loaded(tmp_path / name)(ids).logits, expected)
    assert errors["smoothquant"] < errors["w8a8"] / 10, errors


def test_each_block_sees_what_the_quantised_ones_before_it_give(seed: int, tmp_path: Path) -> None:
    """The same by the whole model in memory, without the driver."""
    model, ids, scheme = make("qwen2", seed), calibration(seed), WeightOnly(4, 32, scale_dtype=torch.float16)
    model.save_pretrained(tmp_path / "source")
    models.quantize_model(tmp_path / "source", tmp_path / "new", models.Method("gptq", scheme), calibration=ids)
    folder = models.ConvertedFolder(tmp_path / "new")
    for index, block in enumerate(model.model.layers):
        found = {}
        for name in linears_of(block):
            statistics = InputStatistics.empty(block.get_submodule(name).in_features)
            hook = block.get_submodule(name).register_forward_pre_hook(
                lambda module, arguments, into=statistics: into.add(arguments[0])
            )
            with torch.no_grad():
                for row in ids:
                    model(row[None], use_cache=False)
            hook.remove()
            found[name] = gptq(block.get_submodule(name).weight, statistics.second_moment, scheme).weight
        for name, quantized in found.items():
            written = models.weights_of(folder[f"model.layers.{index}.{name}"])
            assert torch.equal(written, quantized.dequantize(torch.float32)), (index, name)
            block.get_submodule(name).weight.data = written


def test_layers_to_skip_stay_floats(seed: int, tmp_path: Path) -> None:
    model = make("llama", seed)
    model.half().save_pretrained(tmp_path / "source")
    method = models.Method("awq", WeightOnly(4, 32))
    found = models.quantize_model(
        tmp_path / "source", tmp_path / "new", method, calibration=calibration(seed), skip=["up_proj", "*.2.*"]
    )
    assert found.layers == 2 * 6
    folder = models.ConvertedFolder(tmp_path / "new")
    for name in ("model.layers.1.mlp.up_proj", "model.layers.2.self_attn.q_proj"):
        assert name in folder.spec.modules_to_not_convert
    written = folder.tensor("model.layers.2.self_attn.q_proj.weight")
    assert torch.equal(written, model.model.layers[2].self_attn.q_proj.weight)
    assert written.dtype == folder.tensor("model.layers.0.input_layernorm.weight").dtype == torch.float16
    assert folder["model.layers.0.mlp.down_proj"].scales.dtype == torch.float16


def test_rtn_needs_no_calibration(seed: int, tmp_path: Path) -> None:
    model = make("llama", seed)
    model.save_pretrained(tmp_path / "source")
    method = models.Method("rtn", WeightOnly(4, 32, True))
    found = models.quantize_model(tmp_path / "source", tmp_path / "new", method)
    folder = models.ConvertedFolder(tmp_path / "new")
    assert len(folder) == found.layers == 21
    expected = round_to_nearest(model.model.layers[2].mlp.up_proj.weight, method.scheme)
    assert torch.equal(models.weights_of(folder["model.layers.2.mlp.up_proj"]), expected.dequantize(torch.float32))


def test_what_cannot_be_done_is_refused(seed: int, tmp_path: Path) -> None:
    make("llama", seed).save_pretrained(tmp_path / "source")

    def quantize(method: Any = "gptq", ids: Any = None, **options: Any) -> None:
        models.quantize_model(tmp_path / "source", tmp_path / "new", method, calibration=ids, **options)

    with pytest.raises(ValueError, match="calibration: gptq needs tokens"):
        quantize()
    with pytest.raises(ValueError, match="method: expected one of rtn, gptq"):
        quantize("hqq")
    with pytest.raises(ValueError, match="skip: no linear layer of the blocks is left"):
        quantize(ids=calibration(0), skip=["*_proj"])
    with pytest.raises(ValueError, match="calibration: expected a text of at least 9 tokens, got 8"):
        models.calibration_windows(torch.arange(8), 2, 9, 0)
    with pytest.raises(ValueError, match="seed: expected an integer of 64 bits"):
        models.calibration_windows(torch.arange(8), 2, 4, 2**64)
    with pytest.raises(ValueError, match=r"skip: 'up_porj' matches no layer; there are .*up_proj"):
        quantize(ids=calibration(0), skip=["*.0.*", "up_porj"])
    with pytest.raises(ValueError, match=r"skip: 'model\.layers\.7\.mlp\.up_proj' .* model\.layers\.\d\.mlp\.up_proj"):
        quantize(ids=calibration(0), skip=["model.layers.7.mlp.up_proj"])
    with pytest.raises(ValueError, match="skip: 'zzz' matches no layer; there are down_proj, gate_proj, k_proj"):
        quantize("rtn", skip=["zzz"])
    for token in (VOCABULARY, -1):
        with pytest.raises(ValueError, match=rf"calibration: expected tokens in \[0, {VOCABULARY}\), .* got {token};"):
            quantize(ids=torch.full((2, 8), token))
    with pytest.raises(ValueError, match=r"calibration: expected windows of at most 2048 tokens .*, got 2049"):
        quantize(ids=torch.zeros(1, 2049, dtype=torch.int64))
    assert not (tmp_path / "new.work").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there: exists; pass overwrite=True"):
        models.quantize_model(tmp_path / "source", tmp_path / "there", "rtn")
    assert not (tmp_path / "there.work").exists()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(UnsupportedError, match="model_type 'unheard of'"):
        quantize(ids=calibration(0))
    assert not (tmp_path / "new").exists()


CHOSEN = {
    "scheme": WeightOnly(8),
    "clip": False,
    "damping": 0.1,
    "act_order": True,
    "act_scale": False,
    "activations": "static",
}


@pytest.mark.parametrize("option", [*CHOSEN, "calibration"])
def test_options_that_a_method_does_not_read_are_refused(option: str, tmp_path: Path) -> None:
    readers = READERS[option]
    for name in METHODS:

        def choose(name: str = name) -> None:
            if option == "calibration":
                method = models.Method(name, activations="static") if name in ("w8a8", "fp8") else name
                models.quantize_model(tmp_path / "absent", tmp_path / "new", method, calibration=calibration(0))
            else:
                models.Method(name, **{option: CHOSEN[option]})

        if name not in readers:
            with pytest.raises(
                ValueError, match=f"^{option}: {name} does not read it, only {', '.join(readers)}; leave"
            ):
                choose()
        elif option == "calibration":
            with pytest.raises(FileNotFoundError, match="no such file or folder"):
                choose()
        else:
            choose()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activations": "none"}, ValueError, "activations: expected 'dynamic' or 'static', got 'none'"),
        ({"damping": -1}, ValueError, r"damping: expected a number in \[0, 100\], got -1"),
        ({"damping": "much"}, TypeError, "damping: expected a number, got str"),
        ({"act_order": 1}, TypeError, "act_order: expected True or False, got int"),
        ({"scheme": W8A8()}, TypeError, r"scheme: expected a qcutlass\.WeightOnly, got W8A8"),
    ],
)
def test_options_of_a_method_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        models.Method("gptq", **options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("granitemoe", r"a mixture of experts \(num_local_experts is 4\)"),
        ("gpt_oss", r"model\.layers\.0\.mlp\.experts: experts of GptOssExperts.*qcutlass convert --bits"),
    ],
)
def test_mixtures_of_other_forms_are_refused_as_such(kind: str, message: str, seed: int, tmp_path: Path) -> None:
    model = make(kind, seed, intermediate_size=32, num_local_experts=4, num_key_value_heads=2, head_dim=16)
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(UnsupportedError, match=message):
        models.quantize_model(tmp_path / "source", tmp_path / "new", "rtn")
    assert not (tmp_path / "new.work").exists()


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_a_layer_that_cannot_be_quantised_is_named(method: str, seed: int, tmp_path: Path) -> None:
    model = make("llama", seed)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3, 5] = 1e8
    model.save_pretrained(tmp_path / "source")
    ids = calibration(seed) if method in READERS["calibration"] else None
    message = r"^model\.layers\.1\.self_attn\.o_proj: weight: a scale overflows torch\.float16"
    with pytest.raises(CheckpointError, match=message):
        models.quantize_model(tmp_path / "source", tmp_path / "new", method, calibration=ids)
    assert not (tmp_path / "new.work").exists()  # though a block is finished: it would be refused again


def test_blocks_that_return_no_hidden_states_are_refused() -> None:
    block = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match=r"calibration: Identity returns dict, and no hidden states .*--method"):
        run_block(block, {}, Call((), {}))  # type: ignore[arg-type]


def test_calibration_windows_follow_the_seed() -> None:
    ids = torch.arange(1000)
    first, again, other = (models.calibration_windows(ids, 5, 10, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert bool((first.diff(dim=1) == 1).all())
    assert models.calibration_windows(ids[:10], 1, 10, 0).tolist() == [list(range(10))]


class _Stopped(Exception):
    pass


def test_a_run_goes_on_where_it_was(seed: int, tmp_path: Path) -> None:
    make("llama", seed).save_pretrained(tmp_path / "source")
    ids = calibration(seed)

    def quantize(name: str, stop: str | None = None, bits: int = 4, **options: Any) -> models.Quantization:
        def progress(what: str, done: int, total: int) -> None:
            if stop is not None and what.startswith(stop):
                raise _Stopped

        method = models.Method("awq", WeightOnly(bits, 32))
        return models.quantize_model(
            tmp_path / "source", tmp_path / name, method, calibration=ids, progress=progress, **options
        )

    def bytes_of(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    quantize("reference")
    work = tmp_path / "new.work"
    for stop, resumed in {"block 0": 0, "block 1": 0, "block 2": 1, "writing": 2}.items():
        with pytest.raises(_Stopped):
            quantize("new", stop)
        assert len(list(work.glob("block-*.json"))) == resumed + (stop in ("block 1", "block 2", "writing"))
        assert len(list(work.glob("state-*"))) == (stop in ("block 1", "block 2"))
        assert not (tmp_path / "new").exists()
    with pytest.raises(FileExistsError, match=r"another method\.scheme\.bits \(4, now 8\); pass restart=True"):
        quantize("new", bits=8)
    assert quantize("new").resumed == 3
    assert bytes_of("new") == bytes_of("reference")

    for damaged in ("block-00000.safetensors", "block-00001.safetensors", "state-00001.safetensors"):
        with pytest.raises(_Stopped):
            quantize("new", "block 2", overwrite=True)
        content = bytearray((work / damaged).read_bytes())
        content[-1] ^= 1
        (work / damaged).write_bytes(content)
        assert quantize("new", overwrite=True).resumed == 0  # without the states behind the last block: anew
        assert bytes_of("new") == bytes_of("reference")
    with pytest.raises(_Stopped):
        quantize("new", "block 2", overwrite=True)
    assert quantize("new", overwrite=True, restart=True).resumed == 0


def test_a_run_does_not_go_on_with_other_inputs(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, ids = tmp_path / "source", calibration(seed)
    make("llama", seed).save_pretrained(source)

    def quantize(ids: Tensor = ids, stop: str = "block 2", name: str = "gptq", **options: Any) -> None:
        def progress(what: str, done: int, total: int) -> None:
            if what.startswith(stop):
                raise _Stopped

        models.quantize_model(source, tmp_path / "new", name, calibration=ids, progress=progress, **options)

    def refused(names: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(FileExistsError, match=f"left by a run with another {names}; pass restart=True"):
            quantize(*arguments, **options)
        assert len(list((tmp_path / "new.work").glob("block-*.json"))) == 2

    with pytest.raises(_Stopped):
        quantize()
    changed = ids.clone()
    changed[-1, -1] = (changed[-1, -1] + 1) % VOCABULARY
    refused(r"calibration\.sha256", changed)
    refused(r"calibration\.shape \(\[8, 24\], now \[4, 48\]\)", ids.view(4, 48))
    refused("skip", skip=["*.2.*"])
    refused(r"method\.name \(gptq, now awq\)", name="awq")
    for name, module in (("torch", torch), ("transformers", sys.modules["transformers"]), ("qcutlass", run)):
        with monkeypatch.context() as context:
            context.setattr(module, "__version__", "99.0.0")
            refused(rf"versions\.{name} \(.*, now 99\.0\.0\)")
    path, stat = source / "config.json", (source / "config.json").stat()
    text = path.read_text()
    path.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    refused(r"model\.rms_norm_eps \(1e-06, now 1e-05\)")
    path.write_text(text)
    refused(r"source\.config\.json")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(_Stopped):
        quantize(stop="writing")


def test_two_runs_do_not_share_a_folder(seed: int, tmp_path: Path) -> None:
    make("llama", seed).save_pretrained(tmp_path / "source")
    other: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        if not other:
            with pytest.raises(FileExistsError, match="another process is working there") as caught:
                models.quantize_model(tmp_path / "source", tmp_path / "new", "rtn")
            other.append(str(caught.value))

    models.quantize_model(tmp_path / "source", tmp_path / "new", "rtn", progress=progress)
    assert len(other) == 1
    (tmp_path / "next.work").mkdir()
    (tmp_path / "next.work" / "precious").write_text("x")
    for restart in (False, True):
        with pytest.raises(FileExistsError, match="holds files that no run has left"):
            models.quantize_model(tmp_path / "source", tmp_path / "next", "rtn", restart=restart)
    assert (tmp_path / "next.work" / "precious").read_text() == "x"


def test_memory_is_that_of_one_block(process: Any) -> None:
    found = process("quantizations", "watch_memory")
    assert found["model"] > 140
    assert found["used"] < found["model"] / 2, found


@pytest.mark.slow
def test_a_billion_weights_within_six_gigabytes(process: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = process("quantizations", "billion", 6)
    with capsys.disabled():
        print(f"\ngptq of a billion weights: {found}")
    assert found["peak GB"] < found["limit GB"], found
