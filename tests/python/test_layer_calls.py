"""Layers that were called before are run by the extension at once; nothing that matters may change unseen meanwhile."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.python.called_layers import SCHEMES, K, Own, fresh, layer_of, remembered, schemes, static_layer
from tests.python.eight_bit import needs_instructions
from tests.python.modules import randn
from tests.python.running import captured, in_threads
from torch import Tensor, nn

import qcutlass
from qcutlass import _C, W8A8, QuantLinear, testing, tuning
from qcutlass.layers import Int8Linear
from qcutlass.products import invariance, launching
from qcutlass.products.extension import backend
from qcutlass.products.quantizer_operators import QuantizeCall
from qcutlass.schemes import Scheme

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    launching.forget()
    yield
    launching.forget()


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
    others = [layer_of(scheme, seed + step, "cuda") for step in range(2)]
    states, expected = [other.state_dict() for other in others], [other(a) for other in others]
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
