"""Models on a GPU: logits and text of folders in every format, commands, CUDA graphs, moves; SmolLM2 where it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import tokens
from tests.python.kinds.int4 import DTYPES as INT4_TYPES
from tests.python.kinds.int4 import INT4
from tests.python.models.folders import Cut, Cuts, RandomCut
from tests.python.test_super_blocks import quantized
from torch import Tensor
from typer.testing import CliRunner

import qcutlass
from qcutlass import models
from qcutlass.cli import app
from qcutlass.layers import FusedProjection, Int4Linear, QuantLinear
from qcutlass.models.evaluation import perplexity
from qcutlass.models.transformers import load_model
from qcutlass.testing import Case
from qcutlass.testing.models import NOISE, noise_ratio

pytestmark = pytest.mark.gpu
pytest.importorskip("transformers", reason="needs transformers")

KINDS = ("gptq", "awq", "compressed", "fp8", "nvfp4", "converted", "k_quants")
"""Formats whose layers multiply activations as they are; the last two are converted folders."""
DTYPES = (torch.float16, torch.bfloat16)
STEPS = 8
SUPERS = ("super_scales", "super_minimums")
CODES = 2.0
"""The largest difference of logits that other codes of activations make, in units of what quantising these makes:
activations of 16 bits make 0.8 to 1.4, scales of one layer that are half as large again 3.2 to 11."""


def load(folder: Path, dtype: torch.dtype, *, direct: bool = True, device_map: str | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    from qcutlass.models.transformers import checkpoint_config

    keywords: dict[str, Any] = {"config": checkpoint_config(folder)} if direct else {}
    if device_map is not None:
        pytest.importorskip("accelerate", reason="device_map needs accelerate")
        keywords["device_map"] = device_map
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **keywords)
    return (model if device_map is not None else model.cuda()).eval()


def random_ids(batch: int, length: int, seed: int, vocabulary: int = RandomCut.VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocabulary, (batch, length), generator=generator).cuda()


def check(out: Tensor, cut: Any, source: Cuts, dtype: torch.dtype, ids: Tensor, last: int | None = None) -> None:
    """Logits of the last tokens, or of all, against the dequantised model in the same type."""
    with torch.inference_mode():
        exact, dense = (source.dense(cut, kind).cuda()(ids).logits for kind in (torch.float64, dtype))
    some = slice(None) if last is None else slice(-last, None)
    assert noise_ratio(out, dense[:, some], exact[:, some]) <= NOISE


@pytest.fixture(scope="module")
def converted(random_cut: RandomCut, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cut]:
    """Converted folders: of a GPTQ one, and one of GGUF's mix Q4_K_M."""
    root = tmp_path_factory.mktemp("cut")
    models.convert(random_cut.gptq().folder, root / "converted", verify=True)
    return {
        "converted": Cut(root / "converted", random_cut.gptq().weights),
        "k_quants": k_quants(random_cut, root / "k_quants"),
    }


def k_quants(source: RandomCut, folder: Path) -> Cut:
    """Scales and minimums of two levels: 4 bits as those of Q4_K, and of `down_proj` 8 as those of Q6_K."""
    model, weights = source.dense(source.floats(), torch.float32), {}
    assert qcutlass.replace_linear(model, qcutlass.WeightOnly()) == source.names
    for seed, name in enumerate(source.names):
        n, k = source.weight(name).shape
        bits, size, zeros, groups = (8, 16, "none", 16) if "down_proj" in name else (4, 32, "minimum", 8)
        drawn = quantized(Case(1, n, k, bits, size, zeros, super_groups=groups).random(seed=seed))  # type: ignore[arg-type]
        factor = k**-0.5 / float(drawn.dequantize(torch.float32).std())
        scaled = {name: part * factor for name in SUPERS if (part := getattr(drawn, name)) is not None}
        layer = QuantLinear.from_quantized(replace(drawn, **scaled))
        model.set_submodule(name, layer)
        weights[name] = layer.weights()
    model.save_pretrained(folder)
    return Cut(folder, weights)


def cut_of(kind: str, random_cut: RandomCut, converted: dict[str, Cut]) -> Cut:
    found: Cut = converted[kind] if kind in converted else getattr(random_cut, kind)()
    return found


@pytest.mark.parametrize("device_map", [None, "cuda", "auto"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_folders_are_loaded(
    kind: str, dtype: torch.dtype, device_map: str | None, random_cut: RandomCut, converted: dict[str, Cut], seed: int
) -> None:
    cut = cut_of(kind, random_cut, converted)
    model = load(cut.folder, dtype, direct=kind not in converted, device_map=device_map)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    assert sorted(layers) == sorted(cut.weights)
    assert all(torch.equal(models.weights_of(layer).cpu(), cut.weights[name]) for name, layer in layers.items())
    ids = random_ids(2, 24, seed)
    with torch.inference_mode():
        check(model(ids).logits, cut, random_cut, dtype, ids)


@pytest.mark.parametrize("fuse", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_generated_has_the_logits_of_the_dequantised_model(
    kind: str, dtype: torch.dtype, fuse: bool, random_cut: RandomCut, converted: dict[str, Cut], seed: int
) -> None:
    cut = cut_of(kind, random_cut, converted)
    model = load(cut.folder, dtype, direct=kind not in converted)
    if fuse:
        expected = 0 if kind in ("gptq", "converted") else 4  # where each layer has an act-order of its own: none
        assert len(qcutlass.fuse_projections(model).fused) == expected
    ids = random_ids(3, 16, seed)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert found.sequences.shape == (3, 16 + STEPS)
    logits = torch.stack(found.logits, dim=1)
    assert torch.equal(logits.argmax(-1), found.sequences[:, 16:])
    check(logits.to(dtype), cut, random_cut, dtype, found.sequences[:, :-1], last=STEPS)


QUANTISING: dict[str, tuple[str, str | None, str]] = {
    "w8a8": ("w8a8", None, "Int8Linear"),
    "fp8": ("fp8_channels", None, "Fp8Linear"),
    "blockwise-fp8": ("fp8", "fp8", "BlockwiseLinear"),
    "w4a8-fp8": ("awq", "fp8", "Int4Linear"),
    "w4a8-int8": ("compressed", "int8", "Int4Linear"),
}
"""Folders, the activations to which they are converted, if they are, and the layers that these are for."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", QUANTISING)
def test_layers_that_quantise_activations_run(
    kind: str, dtype: torch.dtype, random_cut: RandomCut, tmp_path: Path, seed: int
) -> None:
    """The difference from the CPU's logits in fp32 is that of codes of activations, which rounding changes."""
    form, activations, layer = QUANTISING[kind]
    cut = getattr(random_cut, form)()
    folder = cut.folder
    if activations is not None:
        models.convert(folder, folder := tmp_path / "new", activations=activations)
    model, on_cpu = load_model(folder, "cuda", dtype)[0], load_model(folder, "cpu", torch.float32)[0]
    assert {type(model.get_submodule(name)).__name__ for name in cut.weights} == {layer}  # of which the GPU has kernels
    ids = random_ids(2, 24, seed)
    with torch.inference_mode():
        out, expected = model(ids).logits.cpu().float(), on_cpu(ids.cpu()).logits
        dense = random_cut.dense(cut, torch.float32)(ids.cpu()).logits
    assert float((out - expected).norm()) < float((dense - expected).norm()) * CODES


@pytest.mark.parametrize("activations", list(INT4_TYPES))
@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
def test_4_bit_layers_quantise_each_token(
    kind: str, activations: Any, random_cut: RandomCut, tmp_path: Path, seed: int
) -> None:
    """As the folder does on the CPU that `convert` writes with the same option, by the weights of the source."""
    INT4.skip_without_instructions(INT4.case(24, 128, 256, dtype=INT4_TYPES[activations]))
    cut = getattr(random_cut, kind)()
    model, _ = load_model(cut.folder, "cuda", torch.float16, activations)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    assert sorted(layers) == sorted(cut.weights)
    for name, layer in layers.items():
        assert isinstance(layer, Int4Linear)
        assert (layer.activations, layer.w_packed.device.type) == (activations, "cuda")
        assert torch.equal(models.weights_of(layer).cpu(), cut.weights[name])
    models.convert(cut.folder, tmp_path / "new", activations=activations)
    on_cpu, ids = load(tmp_path / "new", torch.float32, direct=False).cpu(), random_ids(2, 24, seed)
    with torch.inference_mode():
        out, expected = model(ids).logits.cpu().float(), on_cpu(ids.cpu()).logits
        dense = random_cut.dense(cut, torch.float32)(ids.cpu()).logits
    assert float((out - expected).norm()) < float((dense - expected).norm()) * NOISE
    words = "generate", cut.folder, "--prompt", "5 6 7", "--max-new-tokens", 6, "--device", "cuda"
    compiled = () if kind == "awq" else ("--eager",)  # half a minute
    result = command(*words, "--activations", activations, *compiled)
    assert result.exit_code == 0, result.output
    assert "; 6 in all" in result.stderr


@pytest.mark.parametrize("fuse", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_step_is_captured_in_a_graph(
    fuse: bool, batch: int, random_cut: RandomCut, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = random_cut.awq()
    model = load(cut.folder, torch.float16)
    if fuse:
        qcutlass.fuse_projections(model)
    ids = random_ids(batch, 12, seed)
    with torch.inference_mode():
        static = ids.clone()
        for _ in range(2):
            model(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(static).logits
        for shift in range(3):
            static.copy_((ids + shift) % RandomCut.VOCABULARY)
            graph.replay()
            check(out, cut, random_cut, torch.float16, static)  # dense products choose other algorithms in a graph
        monkeypatch.setattr(tokens, "STEPS", STEPS)  # decoding with a cache, a whole step in a graph
        texts = [tokens._text(model, batch, 12, graph=graph) for graph in (False, True)]
    assert torch.equal(*texts)


@pytest.mark.slow
def test_a_static_cache_compiles(random_cut: RandomCut, seed: int) -> None:
    """transformers compiles the step then, in CUDA graphs of its own."""
    pytest.importorskip("triton", reason="torch.compile needs triton")
    model = load(random_cut.awq().folder, torch.float16)
    assert len(qcutlass.fuse_projections(model).fused) == 4
    ids = random_ids(2, 16, seed)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS,
        do_sample=False,
        cache_implementation="static",
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(found.logits, dim=1).half()
    check(logits, random_cut.awq(), random_cut, torch.float16, found.sequences[:, :-1], last=STEPS)


MOVES: dict[str, Callable[[Any], Any]] = {
    "to the CPU and back": lambda model: model.cpu().cuda(),
    "deepcopy": copy.deepcopy,
    "deepcopy on the CPU": lambda model: copy.deepcopy(model.cpu()).cuda(),
}


@pytest.mark.parametrize("fuse", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("move", MOVES)
def test_moves_change_nothing(move: str, fuse: bool, random_cut: RandomCut, seed: int) -> None:
    model = load(random_cut.compressed().folder, torch.float16)
    if fuse:
        qcutlass.fuse_projections(model)
    ids = random_ids(1, 12, seed)
    with torch.inference_mode():
        expected = model(ids).logits
        moved = MOVES[move](model)
        assert torch.equal(moved(ids).logits, expected)
    parts = [module for module in moved.modules() if isinstance(module, FusedProjection)]
    assert len({id(part.product) for part in parts}) == (4 if fuse else 0)


@pytest.mark.parametrize("fuse", [False, True], ids=["separate", "fused"])
def test_what_is_saved_from_a_gpu_is_what_was_loaded(fuse: bool, random_cut: RandomCut, tmp_path: Path) -> None:
    model = load(random_cut.awq().folder, torch.float16)
    if fuse:
        qcutlass.fuse_projections(model)
    model.save_pretrained(tmp_path / "saved")
    models.convert(random_cut.awq().folder, tmp_path / "expected")
    found, expected = models.ConvertedFolder(tmp_path / "saved"), models.ConvertedFolder(tmp_path / "expected")
    assert set(found) == set(expected)
    for name in expected:
        buffers, others = (dict(folder[name].named_buffers()) for folder in (found, expected))
        assert buffers.keys() == others.keys()
        assert all(torch.equal(buffers[key], others[key]) for key in others)


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.parametrize("options", [(), ("--no-fuse",), ("--fuse", "--dtype", "bfloat16")], ids=" ".join)
def test_commands(options: tuple[str, ...], random_cut: RandomCut, tmp_path: Path) -> None:
    """The commands print the results of the same model in Python, whose logits other tests check."""
    from transformers import AutoTokenizer

    folder = random_cut.awq().folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if "bfloat16" in options else torch.float16  # which the configuration says
    model = load(folder, dtype)
    if "--no-fuse" not in options:
        qcutlass.fuse_block(model)
    ids = torch.tensor([[5, 6, 7]]).cuda()
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)[0, 3:]
    result = command("generate", folder, "--prompt", "5 6 7", "--max-new-tokens", 6, "--device", "cuda", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == tokenizer.decode(made, skip_special_tokens=True).split()
    assert re.search(r"3 tokens of prompt, the first new one after \d+ ms", result.stderr)

    text = " ".join(map(str, random_ids(1, 70, 0)[0].tolist()))
    (tmp_path / "text.txt").write_text(text)
    score = command("eval", folder, "--text", tmp_path / "text.txt", "--window", 32, "--device", "cuda", *options)
    assert score.exit_code == 0, score.output
    expected = perplexity(model, tokenizer(text, return_tensors="pt").input_ids[0], 32)
    assert expected.tokens >= 62
    assert score.stdout.startswith(f"perplexity {expected.perplexity:.4f} of {expected.tokens} tokens in windows of 32")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_smollm2(dtype: torch.dtype, smol_file: Path, tmp_path: Path, seed: int) -> None:
    from bench import llama

    models.convert(smol_file, tmp_path / "smol")
    model = load(tmp_path / "smol", dtype, direct=False)
    ids = random_ids(1, 64, seed, vocabulary=49152)
    with torch.inference_mode():
        dense = llama.dense(model, dtype)(ids).logits
        exact = copy.deepcopy(llama.dense(load(tmp_path / "smol", torch.float32, direct=False), torch.float32))
        reference = exact.double()(ids).logits
        assert noise_ratio(model(ids).logits, dense, reference) <= NOISE
        assert len(qcutlass.fuse_projections(model).fused) == 60
        assert noise_ratio(model(ids).logits, dense, reference) <= NOISE
