"""The plug-in in vLLM's own layers, on the CPU: vLLM's sources are needed, no kernel of its and no GPU.

`PYTHONPATH` leads to vLLM and the packages that it imports. No process group is made: each rank is asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.python.formats.stored import Stored, Tensors, as_awq, as_compressed, as_gptq, stored
from torch import Tensor, nn

import qcutlass
from qcutlass.products import invariance
from qcutlass.vllm import register
from qcutlass.vllm.obstacles import obstacle

try:
    from qcutlass.vllm import config as configuration
    from qcutlass.vllm import kernel
except ImportError as error:
    pytest.skip(f"needs vLLM's sources: {error}", allow_module_level=True)

K, HEAD, HEADS, KV_HEADS = 256, 16, 4, 2


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()
    register()


def exact(n: int, k: int, group_size: int, *, seed: int = 0, **options: Any) -> Stored:
    """A layer whose scales are powers of two, so that sums of whole activations are exact.

    Layers of as many columns have one order of columns, as those that read the same input do.
    """
    layer = stored(n, k, group_size, seed=seed, **options)
    scales = np.exp2(np.random.default_rng(seed).integers(-3, 1, layer.scales.shape)).astype(np.float16)
    group_of = np.sort(layer.group_of)
    if options.get("act_order"):
        group_of = np.random.default_rng(k).permutation(group_of)
    return Stored(layer.codes, layer.zeros, scales, group_of, layer.bits, layer.group_size)


def as_packed(layer: Stored) -> Tensors:
    """As a converted folder holds it."""
    perm = None
    group_of = torch.from_numpy(layer.group_of)
    if not bool((group_of.diff() >= 0).all()):
        perm = group_of.argsort(stable=True).to(torch.int32)
    codes = torch.from_numpy(layer.codes.astype(np.uint8))
    codes = codes if perm is None else codes[:, perm.long()]
    zeros = torch.from_numpy(layer.zeros.astype(np.uint8))
    scales = torch.from_numpy(layer.scales)
    quantized = qcutlass.QuantizedTensor(codes, scales, zeros, layer.bits, layer.group_size)
    made = qcutlass.QuantLinear.from_quantized(quantized, perm=perm)
    return {**made.state_dict(), "weight": torch.zeros(1, dtype=torch.uint8)}


FORMATS: Mapping[str, tuple[dict[str, Any], Callable[[Stored], Tensors], dict[str, Any]]] = {
    "gptq": ({"quant_method": "gptq", "checkpoint_format": "gptq"}, as_gptq, {}),
    "gptq v2, act-order": (
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "desc_act": True},
        lambda layer: as_gptq(layer, 2),
        {"act_order": True},
    ),
    "gptq, 8 bits, symmetric": ({"quant_method": "gptq", "sym": True}, as_gptq, {"bits": 8, "symmetric": True}),
    "awq": ({"quant_method": "awq"}, as_awq, {}),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 64}}},
        },
        as_compressed,
        {},
    ),
    "converted": ({"quant_method": "qcutlass"}, as_packed, {"act_order": True}),
}


def load(layer: nn.Module, tensors: Tensors, *shard: Any) -> None:
    parameters: dict[str, Any] = dict(layer.named_parameters())
    for suffix, tensor in tensors.items():
        parameters[suffix].weight_loader(parameters[suffix], tensor, *shard)


def activations(k: int = K) -> Tensor:
    return torch.randint(-3, 4, (5, k)).float()


@pytest.fixture(params=FORMATS)
def checkpoint(request: pytest.FixtureRequest) -> tuple[Any, Callable[[Stored], Tensors], dict[str, Any]]:
    config, write, options = FORMATS[request.param]
    assert obstacle(config | {"bits": 4}) is None
    return configuration.QCutlassConfig(config), write, options


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fused_projections(checkpoint: Any, as_rank: Any, world_size: int) -> None:
    """Column parallel: outputs of all ranks are the rows of the whole product; heads of keys repeat."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    config, write, options = checkpoint
    parts = {
        name: exact(n * HEAD, K, 64, seed=1, **options)
        for name, n in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
    }
    a, bias = activations(), torch.arange(8.0).repeat((HEADS + 2 * KV_HEADS) * HEAD // 8)
    for rank in range(world_size):
        as_rank(rank, world_size)
        layer = QKVParallelLinear(
            K, HEAD, HEADS, KV_HEADS, bias=False, quant_config=config, prefix="qkv", params_dtype=torch.float32
        )
        for name, part in parts.items():
            load(layer, write(part), name)
        layer.quant_method.process_weights_after_loading(layer)
        heads, kv = HEADS // world_size, max(1, KV_HEADS // world_size)
        first = {"q": rank * heads, "k": rank * KV_HEADS // world_size, "v": rank * KV_HEADS // world_size}
        weights = [
            part.weight[first[name] * HEAD : (first[name] + (heads if name == "q" else kv)) * HEAD]
            for name, part in parts.items()
        ]
        expected = a @ torch.cat(weights).T
        assert len(layer.products.products) == 1
        out, _ = layer(a)
        assert torch.equal(out, expected)
        added = layer.quant_method.apply(layer, a, bias[: out.shape[1]])
        assert torch.equal(added, expected + bias[: out.shape[1]])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("k", [K, 352], ids=["whole groups", "groups are cut"])
def test_row_parallel(checkpoint: Any, as_rank: Any, world_size: int, k: int) -> None:
    """The sum of all ranks' outputs is the whole product."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    config, write, options = checkpoint
    stored_layer = exact(32, k, 32 if k % 64 else 64, seed=2, **options)
    a = activations(k)
    total = torch.zeros(5, 32)
    for rank in range(world_size):
        as_rank(rank, world_size)
        layer = RowParallelLinear(
            k, 32, bias=False, quant_config=_with_group(config, stored_layer), params_dtype=torch.float32,
            reduce_results=False,
        )  # fmt: skip
        load(layer, write(stored_layer))
        layer.quant_method.process_weights_after_loading(layer)
        size = k // world_size
        total += layer(a[:, rank * size : (rank + 1) * size])[0]
    assert torch.equal(total, a @ stored_layer.weight.T)


def _with_group(config: Any, layer: Stored) -> Any:
    values = dict(config.values)
    if "config_groups" in values:
        weights = {"num_bits": 4, "type": "int", "group_size": layer.group_size}
        values["config_groups"] = {"group_0": {"weights": weights}}
    return configuration.QCutlassConfig(values)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parts_that_are_fused_in_the_file(as_rank: Any, world_size: int) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    config = configuration.QCutlassConfig({"quant_method": "gptq", "checkpoint_format": "gptq"})
    stored_layer, a = exact(96, K, 64), activations()
    parts = stored_layer.weight.split([64, 32])
    for rank in range(world_size):
        as_rank(rank, world_size)
        layer = MergedColumnParallelLinear(K, [64, 32], bias=False, quant_config=config, params_dtype=torch.float32)
        load(layer, as_gptq(stored_layer))
        layer.quant_method.process_weights_after_loading(layer)
        rows = torch.cat([part.chunk(world_size)[rank] for part in parts])
        assert torch.equal(layer(a)[0], a @ rows.T)


def test_parts_of_different_schemes(as_rank: Any) -> None:
    """One part in 4 bits, one in floats."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    config = configuration.QCutlassConfig({"quant_method": "gptq", "checkpoint_format": "gptq"})
    gate, up, a = exact(64, K, 64), torch.randint(-4, 5, (32, K)).float(), activations()
    layer = MergedColumnParallelLinear(K, [64, 32], bias=False, quant_config=config, params_dtype=torch.float32)
    load(layer, as_gptq(gate), 0)
    load(layer, {"weight": up}, 1)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer(a)[0], a @ torch.cat([gate.weight, up]).T)
    bias = torch.arange(96.0)
    assert torch.equal(layer.quant_method.apply(layer, a, bias), a @ torch.cat([gate.weight, up]).T + bias)


def test_int8_activations(as_rank: Any) -> None:
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    values = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True},
            }
        },
    }
    assert obstacle(values) is None
    codes, scales = torch.randint(-127, 128, (32, K), dtype=torch.int8), torch.rand(32, 1)
    layer = ColumnParallelLinear(
        K, 32, bias=False, quant_config=configuration.QCutlassConfig(values), params_dtype=torch.float32
    )
    load(layer, {"weight": codes, "weight_scale": scales})
    layer.quant_method.process_weights_after_loading(layer)
    a = torch.randn(5, K)
    expected = qcutlass.layers.Int8Linear(codes, scales.view(-1))(a)
    assert torch.equal(layer(a)[0], expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_quantised_output_head(as_rank: Any, world_size: int) -> None:
    """The vocabulary is padded: what lies past it has weights 0."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    config = configuration.QCutlassConfig({"quant_method": "gptq", "checkpoint_format": "gptq", "lm_head": True})
    stored_layer, a = exact(104, K, 64), activations()
    logits = []
    for rank in range(world_size):
        as_rank(rank, world_size)
        head = ParallelLMHead(104, K, params_dtype=torch.float32, quant_config=config, prefix="lm_head")
        load(head, as_gptq(stored_layer))
        head.quant_method.process_weights_after_loading(head)
        logits.append(head.quant_method.apply(head, a))
    found = torch.cat(logits, dim=1)
    assert torch.equal(found[:, :104], a @ stored_layer.weight.T)
    assert not found[:, 104:].any()


def test_a_tied_output_head(as_rank: Any) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    config = configuration.QCutlassConfig({"quant_method": "gptq"})
    embedding = VocabParallelEmbedding(64, K, params_dtype=torch.float32, quant_config=config)
    head = ParallelLMHead(64, K, params_dtype=torch.float32, quant_config=config, prefix="lm_head")
    tied = head.tie_weights(embedding)
    assert tied.weight is embedding.weight
    assert [name for name, _ in tied.named_parameters()] == ["qweight", "weight"]


def test_what_is_left_for_lora(as_rank: Any) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    config = configuration.QCutlassConfig({"quant_method": "gptq"})
    layer = ReplicatedLinear(K, 32, bias=False, quant_config=config, params_dtype=torch.float32)
    load(layer, as_gptq(exact(32, K, 64)))
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert [name for name, _ in layer.named_parameters(recurse=False)] == ["qweight"]
    with pytest.raises(qcutlass.UnsupportedError, match="after loading"):
        layer.qweight.weight_loader(layer.qweight, torch.zeros(1))


def test_a_layer_without_tensors_is_named(as_rank: Any) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    config = configuration.QCutlassConfig({"quant_method": "gptq"})
    layer = MergedColumnParallelLinear(K, [64, 32], bias=False, quant_config=config, prefix="model.up")
    load(layer, as_gptq(exact(64, K, 64)), 0)
    with pytest.raises(qcutlass.CheckpointError, match=r"model\.up.*no tensors"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("config", "user", "taken"),
    [
        ({"quant_method": "gptq", "bits": 4}, None, "qcutlass"),
        ({"quant_method": "gptq", "bits": 4}, "qcutlass", "qcutlass"),
        ({"quant_method": "gptq", "bits": 4}, "gptq_marlin", None),
        ({"quant_method": "gptq", "bits": 3}, None, None),
        ({"quant_method": "awq", "bits": 4}, None, "qcutlass"),
        ({"quant_method": "fp8"}, None, "qcutlass"),
        ({"quant_method": "fp8"}, "fp8", None),
        ({"quant_method": "qcutlass"}, None, "qcutlass"),
    ],
)
def test_which_models_are_taken(config: dict[str, Any], user: str | None, taken: str | None) -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    found = get_quantization_config("qcutlass")
    assert found is configuration.QCutlassConfig
    assert found.override_quantization_method(config, user) == taken


def test_a_device_with_products_of_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 activations are left to vLLM, unless it is asked for qcutlass by name; weights alone are taken."""
    from qcutlass.vllm import interface

    monkeypatch.setattr(interface, "native_floats", lambda: (8,))
    take, config = configuration.QCutlassConfig.override_quantization_method, {"quant_method": "fp8"}
    assert take(config, None) is None
    assert take(config, "qcutlass") == "qcutlass"


@pytest.mark.parametrize(("capability", "bits"), [(80, ()), (89, (8,)), (90, (8,)), (100, (8, 4)), (120, (8, 4))])
def test_bits_of_floats_that_gpus_multiply(
    capability: int, bits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qcutlass.vllm import interface

    class Gpu:
        is_cpu = staticmethod(lambda: False)
        has_device_capability = staticmethod(lambda least: capability >= least)

    assert interface.native_floats() == ()
    monkeypatch.setattr(interface, "_platform", Gpu)
    assert interface.native_floats() == bits


def test_a_folder_of_another_version_is_refused() -> None:
    with pytest.raises(qcutlass.CheckpointError, match="convert the model again"):
        configuration.QCutlassConfig.from_config({"quant_method": "qcutlass", "version": 99})


def test_every_tensor_of_a_checkpoint_is_handed_over() -> None:
    name = "model.layers.0.mlp.down_proj.g_idx"
    assert configuration.QCutlassConfig.get_checkpoint_weight_mapper().apply_list([name]) == [name]


class TestKernel:
    """The linear kernel, in vLLM's own GPTQ and compressed-tensors layers."""

    def config(self, **values: Any) -> Any:
        from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
        from vllm.scalar_type import scalar_types

        chosen = {
            "full_weight_shape": (K, 64), "partition_weight_shape": (K, 64), "weight_type": scalar_types.uint4b8,
            "act_type": torch.float16, "group_size": 64, "zero_points": False,
        }  # fmt: skip
        if "has_g_idx" in MPLinearLayerConfig.__dataclass_fields__:
            chosen["has_g_idx"] = False
        return MPLinearLayerConfig(**{**chosen, **values})

    def test_it_is_asked_first_and_once(self) -> None:
        from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
        from vllm.platforms import PlatformEnum

        kernels = _POSSIBLE_KERNELS[PlatformEnum.CUDA]
        assert kernels[0] is kernel.QCutlassLinearKernel
        assert kernels.count(kernel.QCutlassLinearKernel) == 1

    def test_what_it_takes(self) -> None:
        from vllm.scalar_type import scalar_types

        able = kernel.QCutlassLinearKernel.can_implement
        assert able(self.config()) == (True, None)
        assert able(self.config(weight_type=scalar_types.uint8b128))[0]
        assert able(self.config(weight_type=scalar_types.uint4, zero_points=True))[0]
        assert not able(self.config(weight_type=scalar_types.uint4))[0]
        assert not able(self.config(weight_type=scalar_types.int4))[0]
        assert not able(self.config(weight_type=scalar_types.float4_e2m1f))[0]
        assert not able(self.config(act_type=torch.float8_e4m3fn))[0]
        assert not able(self.config(group_size=24))[0]
        assert not able(self.config(partition_weight_shape=(K, 60)))[0]

    @pytest.mark.parametrize("asymmetric", [False, True])
    def test_its_products(self, as_rank: Any, asymmetric: bool) -> None:
        from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
        from vllm.scalar_type import scalar_types

        weights = exact(64, K, 64, symmetric=not asymmetric)
        tensors = as_compressed(weights)

        def no_loader(*_: Any) -> None: ...

        layer = nn.Module()
        options: dict[str, Any] = {"weight_loader": no_loader}
        layer.w = PackedvLLMParameter(
            data=tensors["weight_packed"], input_dim=1, output_dim=0, packed_dim=1, packed_factor=8, **options
        )
        layer.s = GroupQuantScaleParameter(data=tensors["weight_scale"], input_dim=1, output_dim=0, **options)
        names = ["w", "s"]
        values: dict[str, Any] = {}
        if asymmetric:
            layer.z = PackedvLLMParameter(
                data=tensors["weight_zero_point"], input_dim=1, output_dim=0, packed_dim=0, packed_factor=8, **options
            )
            names.append("z")
            values = {"weight_type": scalar_types.uint4, "zero_points": True}
        made = kernel.QCutlassLinearKernel(self.config(**values), *names)
        made.process_weights_after_loading(layer)
        a, bias = activations(), torch.arange(64.0)
        assert torch.equal(made.apply_weights(layer, a, bias), a @ weights.weight.T + bias)
        assert [parameter.numel() for parameter in layer.parameters(recurse=False)] == [1] * len(names)


@pytest.mark.parametrize("asked", ["0", "1"])
def test_batch_invariance_is_that_of_vllm(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", asked)
    try:
        register()
        assert invariance.is_on() == (asked == "1")
    finally:
        invariance.switch(None)


def test_rules_are_known_by_the_names_of_vllm() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    config = configuration.QCutlassConfig({"quant_method": "gptq", "dynamic": {r"+:model\.up": {"bits": 8}}})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert list(config.values["dynamic"]) == [r"+:model\.up", "+:language_model.model.up"]
