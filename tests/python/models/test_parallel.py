"""Tensor parallelism of whole models: two ranks, as threads and as processes that torchrun starts."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.python.manual import run_by
from tests.python.models.folders import RandomCut
from tests.python.models.mixtures import EXPERTS, VOCABULARY, MixtureCut, model_of
from tests.python.models.test_mixtures import experts_of, load, logits
from torch import Tensor, nn

import qcutlass
from qcutlass.models.parallel import Axis, cut_blocks, parallelise
from qcutlass.testing.models import NOISE, noise_ratio

pytest.importorskip("transformers", reason="needs transformers")


def random_llama(seed: int, kv_heads: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=32)
    return LlamaForCausalLM(config).eval()


def quantized(model: Any) -> Any:
    found = copy.deepcopy(model)
    qcutlass.replace_linear(found.model, qcutlass.WeightOnly(bits=4, group_size=32))
    return found


def dense(model: Any) -> Any:
    """The same with dequantised weights, in float64."""
    found = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, qcutlass.QuantLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=False)
            linear.weight.data = qcutlass.models.weights_of(layer).float()
            found.set_submodule(name, linear)
    return found


class Ranks:
    """Threads that add tensors."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count)
        self._given: list[Tensor | None] = [None] * count

    def adding(self, rank: int) -> Any:
        def add(out: Tensor) -> None:
            self._given[rank] = out.clone()
            self._barrier.wait(60)
            total = sum(part for part in self._given if part is not None)
            self._barrier.wait(60)
            out.copy_(total)

        return add

    def logits(self, model: Any, tokens: Tensor, experts: Axis = "intermediate") -> list[Tensor]:
        def run(rank: int) -> Tensor:
            part = cut_blocks(copy.deepcopy(model), rank, self.count, self.adding(rank), experts)
            with torch.inference_mode():
                found: Tensor = part(tokens).logits
            return found

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(run, range(self.count)))


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_logits_of_two_ranks_are_those_of_one(kv_heads: int, seed: int) -> None:
    """With one head of keys attention stays whole."""
    model = quantized(random_llama(seed, kv_heads))
    tokens = torch.arange(20)[None] * 7 % 96
    plain = dense(model)
    with torch.inference_mode():
        in_float32, exact = plain(tokens).logits, copy.deepcopy(plain).double()(tokens).logits
    first, second = Ranks(2).logits(model, tokens)
    assert torch.equal(first, second)
    assert noise_ratio(first, in_float32, exact) <= NOISE
    part = cut_blocks(copy.deepcopy(model), 0, 2, lambda out: None)
    layer = part.model.layers[0]
    assert layer.mlp.down_proj.in_features == 128
    assert layer.self_attn.q_proj.out_features == (64 if kv_heads == 2 else 128)
    with torch.inference_mode():  # sums of one rank alone are wrong, and the bound shows it
        assert noise_ratio(part(tokens).logits, in_float32, exact) > NOISE


def test_what_computes_with_several_heads_or_channels_stays_whole(seed: int) -> None:
    """Norms over all heads (OLMo2), an activation that looks at all channels (Gemma 3n), counts of heads (StableLM)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sparse = {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5], "layer_types": ["full_attention"]}
    kinds: dict[str, dict[str, Any]] = {"olmo2": {}, "gemma3n_text": sparse, "stablelm": {}}
    for kind, options in kinds.items():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **sizes, **options)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        qcutlass.replace_linear(model, qcutlass.WeightOnly(bits=4, group_size=32))
        tokens = torch.arange(20)[None] * 7 % 96
        plain = dense(model)
        with torch.inference_mode():
            in_float32, exact = plain(tokens).logits, copy.deepcopy(plain).double()(tokens).logits
        assert noise_ratio(Ranks(2).logits(model, tokens)[0], in_float32, exact) <= NOISE
        part = cut_blocks(copy.deepcopy(model), 0, 2, lambda out: None)
        block = next(each for each in part.modules() if hasattr(each, "self_attn"))
        assert (block.self_attn.q_proj.out_features == 64) == (kind == "gemma3n_text")
        assert (block.mlp.down_proj.in_features == 128) == (kind != "gemma3n_text")


def test_models_without_such_layers_are_refused(seed: int) -> None:
    with pytest.raises(
        ValueError, match="model: LlamaForCausalLM has no attention, MLP or experts of quantised layers"
    ):
        cut_blocks(random_llama(seed), 0, 2, lambda out: None)
    with pytest.raises(ValueError, match="can be cut into 5 parts"):
        cut_blocks(quantized(random_llama(seed)), 0, 5, lambda out: None)


SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}


@pytest.mark.parametrize(("kind", "is_cut"), [("qwen3", True), ("olmo2", False)])
def test_what_is_between_projections(kind: str, is_cut: bool, seed: int) -> None:
    """Norms of one head are each rank's; those of all heads keep attention whole."""
    own = {"head_dim": 32} if kind == "qwen3" else {}
    model = quantized(model_of(kind, seed % 2**31, **SIZES, **own, intermediate_size=128))
    with torch.inference_mode():
        for name, part in model.named_parameters():
            if "norm" in name:
                part.uniform_(0.5, 2)
    tokens, plain = torch.arange(20)[None] * 7 % VOCABULARY, dense(model)
    with torch.inference_mode():
        in_float32, exact = plain(tokens).logits, copy.deepcopy(plain).double()(tokens).logits
    first, second = Ranks(2).logits(model, tokens)
    assert torch.equal(first, second)
    assert noise_ratio(first, in_float32, exact) <= NOISE
    layer = cut_blocks(model, 0, 2, lambda out: None).get_submodule("model.layers.0")
    assert layer.self_attn.q_proj.out_features == (64 if is_cut else 128)
    assert layer.mlp.down_proj.in_features == 64


@pytest.mark.parametrize(("kind", "world_size"), [("bitnet", 2), ("olmoe", 5), ("gpt_oss", 5)])
def test_models_that_stay_whole_are_refused(kind: str, world_size: int, seed: int) -> None:
    """Norms of all heads or of all intermediate channels, and a number for each head; few channels, and experts."""
    model = quantized(model_of(kind, seed % 2**31, num_experts=4, num_local_experts=4, head_dim=32))
    for rank in range(world_size):
        for axis in get_args(Axis):
            with pytest.raises(ValueError, match=rf"cut into {world_size} parts.*normalises all of its heads together"):
                cut_blocks(model, rank, world_size, lambda out: None, axis)
    with pytest.raises(ValueError, match="experts: expected 'intermediate' or 'experts', got 'in'"):
        cut_blocks(model, 0, 2, lambda out: None, "in")  # type: ignore[arg-type]


MIXTURES: list[tuple[str, str, Axis, list[int]]] = [
    ("qwen2_moe", "awq", "intermediate", [32, 32]),  # shared experts have a gate
    ("qwen2_moe", "awq", "experts", [1, 1, 2]),
    ("deepseek_v3", "fp8", "intermediate", [16, 16, 16]),  # in blocks of 32, which are cut through
    ("mixtral", "act_order", "intermediate", [16, 16, 32]),
    ("olmoe", "gptq", "experts", [2, 2]),
]
"""Kind, form of the checkpoint, what each rank has a part of, and the channels or experts of each."""


@pytest.mark.parametrize(("kind", "form", "axis", "sizes"), MIXTURES)
def test_logits_of_mixtures(kind: str, form: str, axis: Axis, sizes: list[int], tmp_path: Path) -> None:
    """Experts are parts of each rank, shared ones, too; routers see all of the sums and send tokens alike."""
    mixture = MixtureCut(tmp_path, kind)
    cut = getattr(mixture, form)()
    model, tokens, ranks = load(cut.folder, direct=True), torch.arange(24)[None] * 7 % VOCABULARY, Ranks(len(sizes))
    exact, in_float32 = (logits(mixture.dense(cut, dtype), tokens) for dtype in (torch.float64, torch.float32))
    found = ranks.logits(model, tokens, axis)
    assert all(torch.equal(each, found[0]) for each in found)
    assert noise_ratio(found[0], in_float32, exact) <= NOISE
    for rank, size in enumerate(sizes):
        part = cut_blocks(copy.deepcopy(model), rank, ranks.count, lambda out: None, axis)
        for experts in experts_of(part).values():
            assert (experts.down.experts if axis == "experts" else experts.down.in_features) == size
            assert experts.num_experts == EXPERTS
        if kind == "qwen2_moe":  # 64 channels are no multiple of 3 ranks
            shared = part.get_submodule("model.layers.0.mlp.shared_expert.down_proj")
            assert shared.in_features == (32 if ranks.count == 2 else 64)
        assert noise_ratio(logits(part, tokens), in_float32, exact) > 10 * NOISE


def test_logits_of_gpt_oss(seed: int) -> None:
    """Attention has sinks and stays whole; experts have biases, and a router that is no layer."""
    model = quantized(model_of("gpt_oss", seed % 2**31, num_local_experts=EXPERTS, head_dim=32))
    tokens = torch.arange(24)[None] * 7 % VOCABULARY
    whole = logits(model, tokens)

    def error(found: Tensor) -> float:
        return float((found - whole).abs().max() / whole.abs().max())

    for axis in get_args(Axis):
        first, second = Ranks(2).logits(model, tokens, axis)
        assert torch.equal(first, second)
        assert error(first) < 1e-5
        assert error(logits(cut_blocks(copy.deepcopy(model), 0, 2, lambda out: None, axis), tokens)) > 1e-2


def test_processes_must_be_there() -> None:
    with pytest.raises(RuntimeError, match="start the script with torchrun"):
        parallelise(nn.Linear(1, 1))


def test_transformers_does_not_cut_packed_layers(random_cut: RandomCut, tmp_path: Path) -> None:
    """What `tp_plan="auto"` makes of a configuration, in two processes."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    qcutlass.models.convert(random_cut.awq().folder, tmp_path / "converted")
    config = AutoConfig.from_pretrained(tmp_path / "converted")
    config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(qcutlass.UnsupportedError, match=r"tp_size = 2: .*call qcutlass\.models\.parallelise\(model\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "converted", config=config)


def run_script(repository: Path, folder: Path, where: Path, environment: dict[str, str]) -> Tensor:
    """Logits of the last of three tokens from the manual's script (docs/models.md), in two processes."""
    script = run_by(repository / "docs/models.md", "tests/python/models/test_parallel.py")
    (where / "parallel.py").write_text(script.text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "parallel.py"]
    run = subprocess.run(
        [*command, str(folder), "3", "5", "7"],
        capture_output=True,
        text=True,
        cwd=where,
        check=False,
        env=os.environ | environment | {"PYTHONFAULTHANDLER": "1"},  # a crash tells where
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return torch.tensor(json.loads(run.stdout.strip().splitlines()[-1]))


TOKENS = torch.tensor([[3, 5, 7]])


def test_the_script_of_the_manual(repository: Path, tmp_path: Path) -> None:
    """Two processes, which gloo connects, give the logits of one; attention, a shared MLP and experts are cut."""
    qcutlass.models.convert(MixtureCut(tmp_path / "mixture", "qwen2_moe").awq().folder, tmp_path / "converted")
    found = run_script(repository, tmp_path / "converted", tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    with torch.inference_mode():
        whole = load(tmp_path / "converted")(TOKENS).logits[0, -1]
    error = (found - whole).abs().max() / whole.abs().max()
    assert 0 < error < 1e-5  # sums in another order; 0 were that nothing was cut


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["llama", "qwen2_moe"])
def test_two_gpus_give_the_logits_of_one(kind: str, repository: Path, random_cut: RandomCut, tmp_path: Path) -> None:
    """Two processes with a GPU each, which NCCL connects."""
    cut = random_cut if kind == "llama" else MixtureCut(tmp_path / "mixture", kind)
    qcutlass.models.convert(cut.awq().folder, tmp_path / "converted")
    found = run_script(repository, tmp_path / "converted", tmp_path, {})
    with torch.inference_mode():
        exact = load(tmp_path / "converted")(TOKENS).logits[0, -1]
        one = load(tmp_path / "converted", dtype=torch.float16).cuda()(TOKENS.cuda()).logits[0, -1].cpu()
    assert noise_ratio(found, one, exact) <= NOISE
