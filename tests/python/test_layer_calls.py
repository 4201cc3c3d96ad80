"""Layers that were called before are run by the extension at once; nothing that matters may change unseen meanwhile."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from tests.python.eight_bit import needs_instructions
from tests.python.modules import randn
from tests.python.running import captured, in_threads
from torch import Tensor, nn

import qcutlass
from qcutlass import _C, FP8, W4A8, W8A8, Blockwise, QuantLinear, WeightOnly, testing, tuning
from qcutlass.layers import Int8Linear, base
from qcutlass.products import invariance, launching
from qcutlass.products.extension import backend
from qcutlass.products.layer_calls import CALLS
from qcutlass.products.quantizer_operators import QuantizeCall
from qcutlass.schemes import Scheme

N, K = 48, 128
SCHEMES: Final[dict[str, Scheme]] = {
    "w4": WeightOnly(4, 32),
    "w8": WeightOnly(8, None, symmetric=True),
    "w8a8": W8A8(),
    "w8a8-zeros": W8A8(symmetric=False),
    "fp8": FP8(),
    "w4a8-fp8": W4A8(32),
    "w4a8-int8": W4A8(32, "int8"),
    "blockwise": Blockwise(32),
    "blockwise-fp8": Blockwise(64, "fp8"),
}
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
gpu = pytest.mark.gpu


class Own(Tensor):
    """Whose operators tell their type."""


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    launching.forget()
    yield
    launching.forget()


def layer_of(scheme: Scheme, seed: int, device: str = "cpu") -> Any:
    linear = nn.Linear(K, N)
    with torch.no_grad():
        linear.weight.copy_(randn(N, K, seed=seed))
    return QuantLinear.from_linear(linear, scheme).to(device)


def static_layer(seed: int) -> Int8Linear:
    """With everything that a layer of 8-bit activations may have."""
    w_q, w_scale = qcutlass.quantize_weights_int8(randn(N, K, seed=seed))
    return Int8Linear(
        w_q,
        w_scale,
        bias=randn(N, seed=seed + 1),
        a_scale=torch.tensor([0.03]),
        azp=torch.tensor([5], dtype=torch.int32),
        smooth=randn(K, seed=seed + 2).abs() + 0.5,
        activation="silu",
    )


def remembered(layer: Any) -> int:
    """How many calls of a layer are."""
    calls = vars(layer).get(CALLS)
    return 0 if calls is None else len(calls)


def fresh(layer: Any, a: Tensor) -> Tensor:
    """The output of a layer that was not called before."""
    twin = copy.deepcopy(layer)
    assert remembered(twin) == 0
    out: Tensor = twin(a)
    return out


def on_gpu(scheme: Scheme) -> None:
    needs_instructions(torch.float8_e4m3fn if "fp8" in str(scheme).lower() else torch.int8)


@schemes
def test_repeated_calls_read_their_own_input(scheme: Scheme, seed: int) -> None:
    layer = layer_of(scheme, seed)
    for shape in [(1, K), (5, K), (2, 3, K), (K,)]:
        for dtype in (torch.float32, torch.bfloat16):
            for step in range(3):
                a = randn(*shape, seed=seed + step).to(dtype)
                testing.assert_equal(layer(a), fresh(layer, a))
    assert remembered(layer) == 8


@schemes
def test_memory_that_is_not_initialised_is_not_read(scheme: Scheme, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(5, K, seed=seed)
    expected = layer(a)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which has torch fill new tensors with NaN
    try:
        testing.assert_equal(layer(a), expected)
    finally:
        torch.use_deterministic_algorithms(before)


@schemes
def test_inputs_at_any_strides_and_addresses(scheme: Scheme, seed: int) -> None:
    layer, choose = layer_of(scheme, seed), random.Random(seed)
    wide = randn(9, 3 * K + 7, seed=seed)
    for _ in range(60):
        m, begin = choose.randrange(1, 4), choose.randrange(9)
        a = choose.choice([wide[:m], wide[1 : 2 * m : 2], wide[0].expand(m, -1)])
        a = choose.choice([a[:, begin : begin + K], a[:, begin : begin + 2 * K : 2], a[None, :, begin : begin + K]])
        if choose.random() < 0.3:
            a = a.contiguous()
        testing.assert_equal(layer(a), fresh(layer, a))
    assert remembered(layer) > 10


def test_layers_with_everything(seed: int) -> None:
    layer, a = static_layer(seed), randn(3, K, seed=seed)
    for _ in range(3):
        testing.assert_equal(layer(a), fresh(layer, a))
        a = a * 2
    assert remembered(layer) == 1


def test_copies_are_not_made_of_what_is_not_remembered(seed: int) -> None:
    layer, a = static_layer(seed), randn(3, 2 * K, seed=seed)[:, ::2]
    assert torch.equal(layer(a), layer(a.contiguous()))
    assert remembered(layer) == 1
    assert layer.smooth is not None
    layer.smooth = layer.smooth.half()
    launching.forget()
    for _ in range(2):
        testing.assert_equal(layer(a), fresh(layer, a))
        testing.assert_equal(layer(a.contiguous()), fresh(layer, a))
    assert remembered(layer) == 0


CHANGES: Final[dict[str, Callable[[Any], object]]] = {
    "another tensor": lambda layer: setattr(layer, "bias", layer.bias + 1),
    "another type": lambda layer: setattr(layer, "bias", layer.bias.half() + 1),
    "none": lambda layer: setattr(layer, "bias", None),
    "in place": lambda layer: layer.bias.add_(1),
    "through data": lambda layer: setattr(layer.bias, "data", layer.bias.half() + 1),
    "another dictionary": lambda layer: setattr(layer, "_buffers", layer._buffers | {"bias": layer.bias + 1}),
    "state": lambda layer: layer.load_state_dict({**layer.state_dict(), "bias": layer.bias + 1}),
    "assigned state": lambda layer: layer.load_state_dict({**layer.state_dict(), "bias": layer.bias + 1}, assign=True),
    "activation": lambda layer: setattr(layer, "activation", "relu"),
    "moved": lambda layer: layer._apply(torch.clone),
    "fewer channels": lambda layer: layer.bias.set_(layer.bias[: N // 2].clone()),
    "another type of the same memory": lambda layer: setattr(layer.bias, "data", layer.bias.view(torch.bfloat16)[:N]),
    "fewer channels of the same memory": lambda layer: setattr(layer.bias, "data", layer.bias[: N // 2]),
    "one channel for all": lambda layer: setattr(layer.bias, "data", layer.bias[:1].expand(N)),
    "resized": lambda layer: layer.bias.resize_(N // 2),
    "swapped": lambda layer: torch.utils.swap_tensors(layer.bias, layer.bias + 1),
    "in features": lambda layer: setattr(layer, "in_features", K // 2),
    "out features": lambda layer: setattr(layer, "out_features", N - 1),
    "bits": lambda layer: setattr(layer, "bits", 3),
    "group size": lambda layer: setattr(layer, "group_size", 2 * layer.group_size + 1),
    "type of weights": lambda layer: setattr(layer, "weight_dtype", "e2m1"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@schemes
def test_changes_of_a_layer_are_seen(scheme: Scheme, change: Callable[[Any], object], seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    with torch.no_grad():
        for _ in range(2):
            layer(a)
            assert remembered(layer) == 1
        change(layer)
        for _ in range(2):
            try:
                expected = fresh(layer, a)
            except (TypeError, ValueError) as error:
                with pytest.raises(type(error), match=re.escape(error.args[0])):
                    layer(a)
            else:
                testing.assert_equal(layer(a), expected)


DURING: Final[dict[str, Callable[[Any], object]]] = {
    "bias": lambda layer: layer._buffers.update(bias=torch.full((N,), 1000.0)),
    "no bias": lambda layer: layer._buffers.update(bias=None),
    "data": lambda layer: setattr(layer.bias, "data", torch.full((N,), 1000.0)),
    "setting": lambda layer: setattr(layer, "symmetric", False),
    "activation": lambda layer: setattr(layer, "activation", "relu"),
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("change", DURING.values(), ids=DURING)
def test_changes_during_a_first_call_are_seen(
    change: Callable[[Any], object], has_bias: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another thread makes them, while the product runs without Python's lock."""
    layer, a = layer_of(W8A8(), seed), randn(3, K, seed=seed)
    if not has_bias:
        layer.bias = None
        change = DURING["bias"] if change is DURING["data"] else change
    fresh(layer, a)

    def interrupted(*arguments: Any) -> Tensor:
        out = compute(*arguments)
        change(layer)
        return out

    compute = base.compute
    with monkeypatch.context() as patch:
        patch.setattr(base, "compute", interrupted)
        layer(a)
    for _ in range(2):
        testing.assert_equal(layer(a), fresh(layer, a))
    assert remembered(layer) == 1


@schemes
def test_layers_can_be_loaded_by_swapping(scheme: Scheme, seed: int) -> None:
    layer, other, a = layer_of(scheme, seed), layer_of(scheme, seed + 1), randn(3, K, seed=seed)
    layer(a)
    assert remembered(layer) == 1
    for part, new in zip(layer.buffers(), other.buffers(), strict=True):
        torch.utils.swap_tensors(part, new.clone())
    testing.assert_equal(layer(a), other(a))
    layer = layer_of(scheme, seed)
    layer(a)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(other.state_dict())
        layer._apply(torch.clone)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    testing.assert_equal(layer(a), other(a))


@pytest.mark.parametrize("extra", [torch.eye(3).to_sparse(), "text", torch.empty(0), torch.ones(2).as_subclass(Own)])
@pytest.mark.filterwarnings("ignore:Sparse")
@schemes
def test_buffers_that_are_not_the_layer_s_own(scheme: Scheme, extra: Any, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    expected = layer(a)
    layer._buffers["extra"] = extra
    for _ in range(3):
        testing.assert_equal(layer(a), expected)
    del layer._buffers["extra"]
    testing.assert_equal(layer(a), expected)
    assert remembered(layer) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@schemes
def test_nested_inputs_are_refused(scheme: Scheme, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([a, a[:2]], layout=layout)
        for _ in range(2):
            with pytest.raises(qcutlass.UnsupportedError, match="a: expected a dense tensor, got a nested one"):
                layer(nested)
            layer(a)
    assert remembered(layer) == 1


@schemes
def test_another_activation_than_the_layer_s_own(scheme: Scheme, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    plain = layer(a)
    layer.activation = "relu"
    for _ in range(2):
        testing.assert_equal(layer(a), plain.relu())
        testing.assert_equal(layer.multiply(a, None), plain)
    assert remembered(layer) == 2


def test_settings_are_part_of_a_call(seed: int) -> None:
    a = randn(3, K, seed=seed)
    for layer, name, values in (
        (layer_of(SCHEMES["w8a8-zeros"], seed), "symmetric", [False, True]),
        (layer_of(WeightOnly(4, 32), seed), "activations", [None, "int8"]),
    ):
        outputs = []
        for value in values * 2:
            setattr(layer, name, value)
            outputs.append(layer(a))
            testing.assert_equal(outputs[-1], fresh(layer, a))
        assert not torch.equal(outputs[0], outputs[1])
        assert remembered(layer) == 2


def test_gates_are_part_of_a_call(seed: int) -> None:
    layer, a = layer_of(W8A8(), seed), randn(3, K, seed=seed)
    with pytest.raises(ValueError, match="'silu_mul' takes gate and up"):
        layer.multiply(a, "silu_mul")
    wide = QuantLinear.from_linear(nn.Linear(K, 64), W8A8())
    for _ in range(2):
        assert wide(a).shape == (3, 64)
        assert wide.multiply(a, "silu_mul").shape == (3, 32)
    assert remembered(wide) == 2


@schemes
def test_wrong_inputs_are_refused_behind_right_ones(scheme: Scheme, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    layer(a)
    with pytest.raises(ValueError, match=r"input: expected shape \[..., in_features\] = \[..., 128\], got \[3, 127\]"):
        layer(a[:, 1:])
    with pytest.raises(TypeError, match="expected a tensor of float16, bfloat16, float32"):
        layer(a.double())
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor, got list"):
        layer(a.tolist())
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor, got NoneType"):
        layer(None)
    with pytest.raises(RuntimeError, match="requires grad"):
        layer(a.clone().requires_grad_())
    with torch.no_grad():
        testing.assert_equal(layer(a.clone().requires_grad_()), layer(a))
    with torch.inference_mode():
        assert layer(a).is_inference()


@schemes
def test_buffers_that_need_gradients_or_have_no_memory_are_refused(scheme: Scheme, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    expected = layer(a)
    layer.bias.requires_grad_()
    with pytest.raises(RuntimeError, match="bias requires grad"):
        layer(a)
    with torch.no_grad():
        testing.assert_equal(layer(a), expected)
    layer.bias.requires_grad_(False).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="bias: its 48 elements have no storage"):
        layer(a)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@schemes
def test_what_watches_calls_sees_operators(scheme: Scheme, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(4, K, seed=seed)
    expected = layer(a)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch() as watch:
        testing.assert_equal(layer(a), expected)
    assert any("qcutlass.gemm" in name or "qcutlass.blockwise_gemm" in name for name in watch.seen)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = layer(mode.from_tensor(a))
        assert (type(out).__name__, out.shape) == ("FakeTensor", expected.shape)
    testing.assert_equal(torch.func.vmap(layer)(a[:, None]), torch.stack([layer(row) for row in a[:, None]]))
    with torch.no_grad():
        traced = torch.jit.trace(layer, (a,), check_trace=False)
        testing.assert_equal(traced(a * 2), layer(a * 2))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="tangent"):
        layer(torch.autograd.forward_ad.make_dual(a, a))

    assert type(layer(a.as_subclass(Own))) is Own


@pytest.mark.parametrize("name", ["w4", "w8a8", "blockwise"])
def test_compiled_layers_behind_eager_calls(name: str, seed: int) -> None:
    layer, a = layer_of(SCHEMES[name], seed), randn(4, K, seed=seed)
    expected = layer(a)
    torch.compiler.reset()
    testing.assert_equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(a), expected)
    testing.assert_equal(torch.export.export(layer, (a,)).module()(a), expected)
    testing.assert_equal(layer(a), expected)


@schemes
def test_copies_and_pickles_remember_nothing(scheme: Scheme, seed: int) -> None:
    layer, a = layer_of(scheme, seed), randn(3, K, seed=seed)
    expected, file = layer(a), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))
    for twin in (*copies, torch.load(file, weights_only=False)):
        assert remembered(twin) == 0
        testing.assert_equal(twin(a), expected)
    assert remembered(layer) == 1


def test_buffers_are_not_kept(seed: int) -> None:
    layer, a = static_layer(seed), randn(3, K, seed=seed)
    layer(a)
    assert remembered(layer) == 1
    references = [weakref.ref(part) for part in layer._buffers.values()]
    layer._apply(torch.clone)
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    testing.assert_equal(layer(a), fresh(layer, a))


def test_what_is_remembered_is_bounded_and_forgotten(seed: int) -> None:
    layer = layer_of(W8A8(), seed)
    for m in range(1, 140):
        layer(randn(m, K, seed=seed))
        assert 1 <= remembered(layer) <= 64
    for forget in (tuning.forget, launching.forget, lambda: invariance.switch(None)):
        layer(randn(3, K, seed=seed))
        forget()
        assert remembered(layer) == 0


def test_threads_share_a_layer(seed: int) -> None:
    layer = layer_of(W8A8(), seed)
    inputs = [randn(m, K, seed=seed + m) for m in (1, 1, 4, 5)]
    expected = [fresh(layer, a) for a in inputs]

    def loop(index: int) -> None:
        for step in range(300):
            if step % 100 == index * 10:
                launching.forget()
            if step % 50 == index:
                layer._buffers["bias"] = layer._buffers["bias"].clone()
            testing.assert_equal(layer(inputs[index]), expected[index])

    in_threads(loop, [(index,) for index in range(len(inputs))])


@gpu
@schemes
def test_graphs_replay_a_remembered_call(scheme: Scheme, seed: int) -> None:
    on_gpu(scheme)
    layer, a = layer_of(scheme, seed, "cuda"), randn(3, K, seed=seed).half().cuda()
    layer(a)
    assert remembered(layer) == 1
    inputs = [randn(3, K, seed=seed + step).half().cuda() for step in range(3)]
    expected = [layer(one) for one in inputs]
    out, replay = captured(lambda: layer(a))
    others = [torch.full((4096,), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(20)]
    for one, wanted in zip(inputs, expected, strict=True):
        a.copy_(one)
        replay()
        testing.assert_equal(out, wanted)
    assert all(bool((other == 0xA5).all()) for other in others)


@gpu
@schemes
def test_remembered_calls_wait_for_their_stream(scheme: Scheme, seed: int) -> None:
    """Inputs arrive late in a stream that is not the default one, and memory is handed out again at once."""
    on_gpu(scheme)
    layer = layer_of(scheme, seed, "cuda")
    inputs = [randn(3, K, seed=seed + step).half().cuda() for step in range(20)]
    expected = [fresh(layer, a) for a in inputs]
    layer(inputs[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        outputs = [layer(a.clone()) for a in inputs]
        torch.cuda.current_stream().synchronize()
    for out, wanted in zip(outputs, expected, strict=True):
        testing.assert_equal(out, wanted)


@gpu
@schemes
def test_weights_written_just_before_a_remembered_call(scheme: Scheme, seed: int) -> None:
    on_gpu(scheme)
    layer, a = layer_of(scheme, seed, "cuda"), randn(3, K, seed=seed).half().cuda()
    states = [layer_of(scheme, seed + step, "cuda").state_dict() for step in range(2)]
    expected = [layer_of(scheme, seed + step, "cuda")(a) for step in range(2)]
    layer(a)
    for step in range(20):
        layer.load_state_dict(states[step % 2])
        testing.assert_equal(layer(a), expected[step % 2])


def overwrite(layer: Any, packed: Tensor) -> None:
    """Has a quantiser of ours, behind which kernels may start early, write a layer's weights."""
    codes, scale = layer.w_packed, torch.ones(1, device=packed.device)
    out = torch.empty_like(scale)
    arguments, _alive = QuantizeCall(packed, codes.dtype, scale=scale).fill(codes, out, None)
    _C.quantize(arguments, **backend(codes))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_weights_that_a_quantiser_of_ours_wrote_just_before(device: str, seed: int) -> None:
    """The product may read its weights while the kernels before it run, but none that these write."""
    n, k = (2048, 4096) if device == "cuda" else (64, 128)
    layers: list[Any] = [
        Int8Linear(*qcutlass.quantize_weights_int8(randn(n, k, seed=seed + step))).to(device) for step in range(3)
    ]
    layer, *others = layers
    packed = [other.w_packed.float().view(-1, 512) for other in others]
    for other in others:
        other.w_scale.copy_(layer.w_scale)
    a = randn(3, k, seed=seed).half().to(device)
    expected = [other(a) for other in others]
    layer(a)
    for step in range(40):
        overwrite(layer, packed[step % 2])
        testing.assert_equal(layer(a), expected[step % 2])
    assert remembered(layer) == 1


@gpu
@schemes
def test_a_remembered_call_of_the_second_device(scheme: Scheme, seed: int) -> None:
    on_gpu(scheme)
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    layer, a = layer_of(scheme, seed, "cuda:1"), randn(3, K, seed=seed).half().to("cuda:1")
    expected = fresh(layer, a)
    for _ in range(3):
        out = layer(a)
        assert (out.device, torch.cuda.current_device()) == (torch.device("cuda:1"), 0)
        testing.assert_equal(out, expected)
    with pytest.raises(ValueError, match=r"(?s)cuda:0.*cuda:1|cuda:1.*cuda:0"):
        layer(a.to("cuda:0"))


@gpu
@schemes
def test_remembered_calls_keep_no_memory(scheme: Scheme, seed: int) -> None:
    on_gpu(scheme)
    layer, a = layer_of(scheme, seed, "cuda"), randn(300, K, seed=seed).half().cuda()
    layer(a)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        layer(a)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    layer.cpu()
    assert torch.cuda.memory_allocated() < before
