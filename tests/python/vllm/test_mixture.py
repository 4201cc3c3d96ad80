"""Experts in vLLM's own blocks, on the CPU; vLLM's sources are needed, as `test_plugin` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.python.formats.stored import Stored, Tensors, as_awq, as_compressed, as_gptq
from tests.python.vllm.expert_parts import computed, of_module
from tests.python.vllm.test_plugin import FORMATS, as_packed, exact
from torch import Tensor

import qcutlass
from qcutlass.vllm import config as configuration
from qcutlass.vllm import interface, register
from qcutlass.vllm.obstacles import obstacle

EXPERTS, HIDDEN, BETWEEN = 4, 64, 128
SHARDS = {"gate": ("w13", "w1"), "up": ("w13", "w3"), "down": ("w2", "w2")}
Expert = dict[str, Stored]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def block(config: Any, rank: int = 0, world_size: int = 1, *, expert_parallel: bool = False, **options: Any) -> Any:
    """One rank's block of vLLM."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    cut = (1, 0) if expert_parallel else (world_size, rank)
    whole = (world_size, rank) if expert_parallel else (1, 0)
    parallel = FusedMoEParallelConfig(
        tp_size=cut[0], tp_rank=cut[1], ep_size=whole[0], ep_rank=whole[1], pcp_size=1, dp_size=1, pcp_rank=0,
        dp_rank=0, sp_size=1, use_ep=expert_parallel, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    manager = ExpertMapManager(
        max_num_batched_tokens=64, top_k=2, global_num_experts=EXPERTS, num_redundant_experts=0, num_expert_group=None,
        moe_parallel_config=parallel, placement_strategy="linear", enable_eplb=False,
    )  # fmt: skip
    described = FusedMoEConfig(
        num_experts=EXPERTS, experts_per_token=2, hidden_dim=HIDDEN, intermediate_size=BETWEEN,
        num_local_experts=manager.local_num_experts, num_logical_experts=EXPERTS, device="cpu",
        activation=MoEActivation.from_str(options.pop("activation", "silu")),
        routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=torch.float32,
    )  # fmt: skip
    return interface.RoutedExperts("mlp.experts", torch.float32, described, config, manager, **options)


def random_experts(**options: Any) -> list[Expert]:
    return [
        {
            part: exact(n, k, 32, seed=3 * index + number, **options)
            for number, (part, n, k) in enumerate(
                [("gate", BETWEEN, HIDDEN), ("up", BETWEEN, HIDDEN), ("down", HIDDEN, BETWEEN)]
            )
        }
        for index in range(EXPERTS)
    ]


def load(layer: Any, experts: list[Expert], write: Callable[[Stored], Tensors]) -> list[bool]:
    """Hands all over, as vLLM's loaders do; which of the experts were taken."""
    taken = []
    for index, expert in enumerate(experts):
        for part, stored in expert.items():
            stack, shard = SHARDS[part]
            for suffix, tensor in write(stored).items():
                name = f"{stack}_{suffix}"
                parameter = getattr(layer, name)
                found = parameter.weight_loader(
                    parameter, tensor, name, shard_id=shard, expert_id=index, return_success=True
                )
        taken.append(bool(found))
    layer.quant_method.process_weights_after_loading(layer)
    return taken


def expected(expert: Expert) -> Tensor:
    return computed(*(expert[part].weight for part in ("gate", "up", "down")))


def routed(slots: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, the router's weights, ids."""
    ids = torch.stack([torch.randperm(EXPERTS)[:slots] for _ in range(7)]).to(torch.int32)
    return torch.randn(7, HIDDEN), torch.rand(7, slots), ids


def values_of(name: str) -> Mapping[str, Any]:
    values = dict(FORMATS[name][0])
    if "config_groups" in values:
        values["config_groups"] = {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
    return values


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_together_compute_each_expert(name: str, world_size: int) -> None:
    values, (_, write, options) = values_of(name), FORMATS[name]
    assert obstacle(values | {"bits": 4}, experts=True) is None
    experts, layers = random_experts(**options), []
    for rank in range(world_size):
        layers.append(block(configuration.QCutlassConfig(values), rank, world_size))
        assert load(layers[-1], experts, write) == [True] * EXPERTS
    for index, expert in enumerate(experts):
        total = sum((of_module(layer.products, index) for layer in layers), torch.zeros(()))
        assert torch.equal(total, expected(expert))


@pytest.mark.parametrize("world_size", [1, 2])
def test_biases_of_experts(world_size: int) -> None:
    """Those between the products are cut, those of outputs are one rank's."""
    experts, layers = random_experts(), []
    biases = {"gate": torch.randn(BETWEEN), "up": torch.randn(BETWEEN), "down": torch.randn(HIDDEN)}

    def write(stored: Stored) -> Tensors:
        part = next(part for expert in experts for part, other in expert.items() if other is stored)
        return {**as_packed(stored), "bias": biases[part]}

    for rank in range(world_size):
        layers.append(block(configuration.QCutlassConfig(values_of("converted")), rank, world_size))
        load(layers[-1], experts, write)
    found = [layer.products.expert(0) for layer in layers]
    for part in ("gate", "up"):
        assert torch.equal(torch.cat([getattr(expert, part).bias for expert in found]), biases[part])
    assert torch.equal(found[0].down.bias, biases["down"])
    assert all(expert.down.bias is None for expert in found[1:])


def test_products_are_those_of_the_module() -> None:
    layer = block(configuration.QCutlassConfig(values_of("awq")))
    load(layer, random_experts(), as_awq)
    x, weights, ids = routed()
    found = layer.quant_method.apply(layer, x, weights, ids, None, None)
    assert torch.equal(found, layer.products(x, ids, weights))
    assert found.shape == x.shape
    assert bool(found.any())
    assert dict(layer.named_parameters()) == {}


@pytest.mark.parametrize("world_size", [2, 4])
def test_expert_parallel_ranks_have_whole_experts(world_size: int) -> None:
    """A token of one expert is computed on its rank, and nothing is added on others; an id of -1 is nobody's."""
    config, experts = configuration.QCutlassConfig(values_of("gptq")), random_experts()
    whole = block(config)
    load(whole, experts, as_gptq)
    x, weights, ids = routed(1)
    ids[0] = -1
    total = torch.zeros_like(x)
    for rank in range(world_size):
        layer = block(config, rank, world_size, expert_parallel=True)
        taken = load(layer, experts, as_gptq)
        assert taken == [index * world_size // EXPERTS == rank for index in range(EXPERTS)]
        total += layer.quant_method.apply(layer, x, weights, ids, None, None)
    assert torch.equal(total, whole.quant_method.apply(whole, x, weights, ids, None, None))
    assert not total[0].any()


@pytest.mark.parametrize("world_size", [1, 2])
def test_floats_are_left_to_vllm(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are handed to its own method, each rank's share."""

    class Floats(interface.FusedMoEMethodBase):  # type: ignore[misc]
        def create_weights(self, layer: Any, num_experts: int, hidden_size: int, **sizes: Any) -> None:
            size = sizes["intermediate_size_per_partition"]
            layer.w13_weight = torch.nn.Parameter(torch.zeros(num_experts, 2 * size, hidden_size))
            layer.w2_weight = torch.nn.Parameter(torch.zeros(num_experts, hidden_size, size))

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.is_ready = True

        def get_fused_moe_quant_config(self, layer: Any) -> None: ...

    monkeypatch.setattr(interface, "UnquantizedFusedMoEMethod", Floats)
    config, experts = configuration.QCutlassConfig(values_of("gptq")), random_experts()
    totals = [torch.zeros(())] * EXPERTS
    for rank in range(world_size):
        layer = block(config, rank, world_size)
        load(layer, experts, lambda stored: {"weight": stored.weight.half()})
        assert layer.is_ready
        assert type(layer.quant_method) is Floats
        gate, up = layer.w13_weight.data.chunk(2, dim=1)
        for index in range(EXPERTS):
            totals[index] = totals[index] + computed(gate[index], up[index], layer.w2_weight.data[index])
    assert all(torch.equal(total, expected(expert)) for total, expert in zip(totals, experts, strict=True))


def test_an_absent_expert_is_named() -> None:
    layer = block(configuration.QCutlassConfig(values_of("gptq")))
    with pytest.raises(qcutlass.CheckpointError, match=r"mlp\.experts: gate of expert 3.*no tensors"):
        load(layer, random_experts()[:3], as_gptq)


def test_no_weights_are_taken_after_loading() -> None:
    layer = block(configuration.QCutlassConfig(values_of("gptq")))
    parameter = layer.w2_qweight
    load(layer, random_experts(), as_gptq)
    layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(qcutlass.UnsupportedError, match="after loading"):
        parameter.weight_loader(parameter, torch.zeros(1), "w2_qweight", shard_id="w2", expert_id=0)


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "gelu"}, {"activation": "relu2"}, {"swiglu_alpha": 1.5},
        {"activation": "swigluoai_uninterleave", "swiglu_beta": 0.5}, {"apply_router_weight_on_input": True},
    ],
)  # fmt: skip
def test_other_functions_of_experts_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(qcutlass.UnsupportedError, match=r"mlp\.experts.*VLLM_PLUGINS"):
        block(configuration.QCutlassConfig(values_of("gptq")), **options)


@pytest.mark.parametrize(
    ("options", "gate"),
    [
        ({}, ("silu", None, None)),
        ({"swiglu_limit": 5.0}, ("silu", 5.0, None)),
        ({"activation": "gelu_tanh"}, ("gelu_tanh", None, None)),
        ({"activation": "swigluoai_uninterleave", "swiglu_limit": 7.0, "swiglu_alpha": 1.5, "swiglu_beta": 1.0},
         ("swigluoai", 7.0, 1.5)),
    ],
)  # fmt: skip
def test_functions_of_experts(options: dict[str, Any], gate: tuple[Any, ...]) -> None:
    layer = block(configuration.QCutlassConfig(values_of("gptq")), **options)
    load(layer, random_experts(), as_gptq)
    assert (layer.products.activation, layer.products.limit, layer.products.alpha) == gate


class Mixture:
    """What vLLM reads of a model's configuration."""

    def __init__(self, **values: Any) -> None:
        self.num_experts, self.hidden_act, self.model_type = 8, "silu", "qwen3_moe"
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, None),
        ({"hidden_act": "gelu_pytorch_tanh"}, None),
        ({"num_experts": 0, "hidden_act": "gelu"}, None),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"model_type": "gpt_oss"}, "gpt_oss"),
        ({"model_type": "deepseek_v4"}, "deepseek_v4"),
        ({"text_config": Mixture(model_type="llama4_text")}, "llama4_text"),
    ],
)
def test_which_mixtures_are_taken(values: dict[str, Any], reason: str | None) -> None:
    take, config = configuration.QCutlassConfig.override_quantization_method, {"quant_method": "gptq", "bits": 4}
    assert take(config, None, Mixture(**values)) == ("qcutlass" if reason is None else None)
    if reason is not None:
        with pytest.raises(qcutlass.UnsupportedError, match=reason):
            take(config, "qcutlass", Mixture(**values))


def test_compressed_tensors_of_8_bits() -> None:
    values = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "group_size": 32}}},
    }
    experts, layer = random_experts(bits=8), block(configuration.QCutlassConfig(values))
    load(layer, experts, as_compressed)
    assert all(torch.equal(of_module(layer.products, i), expected(expert)) for i, expert in enumerate(experts))


def test_rules_have_the_words_of_files_and_numbers_in_the_model() -> None:
    rules = {r"+:.*experts\.[23]\.w2$": {"bits": 8}, r"+:.*experts\.[01]\.w2$": {"bits": 4, "group_size": 64}}
    values = {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 32, "dynamic": rules}
    experts, of_eight_bits = random_experts(), random_experts(bits=8)
    experts = [{**expert, "down": other["down"]} for expert, other in zip(experts, of_eight_bits, strict=True)]
    layer = block(configuration.QCutlassConfig(values), 1, 2, expert_parallel=True)
    load(layer, experts, as_gptq)
    assert all(torch.equal(of_module(layer.products, index), expected(experts[index + 2])) for index in range(2))
