"""The compiled extension: the C++ library's functions over raw pointers. Use the package's functions instead.
Pointers are integers (``Tensor.data_ptr()``), strides count elements, enumerations are the C++ ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Never

class _pybind11_type(type): ...

class _Enumeration(metaclass=_pybind11_type):
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class DType(_Enumeration):
    NONE: ClassVar[DType]
    FLOAT16: ClassVar[DType]
    BFLOAT16: ClassVar[DType]
    FLOAT32: ClassVar[DType]
    UINT8: ClassVar[DType]
    INT8: ClassVar[DType]
    INT32: ClassVar[DType]
    FLOAT8_E4M3: ClassVar[DType]
    FLOAT8_E5M2: ClassVar[DType]
    FLOAT8_E8M0: ClassVar[DType]
    __members__: ClassVar[dict[str, DType]]

class Activation(_Enumeration):
    NONE: ClassVar[Activation]
    RELU: ClassVar[Activation]
    GELU: ClassVar[Activation]
    GELU_TANH: ClassVar[Activation]
    SILU: ClassVar[Activation]
    __members__: ClassVar[dict[str, Activation]]

class Gate(_Enumeration):
    NONE: ClassVar[Gate]
    INTERLEAVED: ClassVar[Gate]
    HALVES: ClassVar[Gate]
    __members__: ClassVar[dict[str, Gate]]

class Packing(_Enumeration):
    W4A16: ClassVar[Packing]
    W8A16: ClassVar[Packing]
    W8A8: ClassVar[Packing]
    E2M1A16: ClassVar[Packing]
    E4M3A16: ClassVar[Packing]
    __members__: ClassVar[dict[str, Packing]]

class Operand(_Enumeration):
    A: ClassVar[Operand]
    WEIGHTS: ClassVar[Operand]
    SCALES: ClassVar[Operand]
    ZEROS: ClassVar[Operand]
    GLOBAL_SCALE: ClassVar[Operand]
    MINIMUMS: ClassVar[Operand]
    SUPER_SCALES: ClassVar[Operand]
    SUPER_MINIMUMS: ClassVar[Operand]
    BIAS: ClassVar[Operand]
    ACT_SCALE: ClassVar[Operand]
    PERM: ClassVar[Operand]
    A_SCALE: ClassVar[Operand]
    W_SCALE: ClassVar[Operand]
    AZP: ClassVar[Operand]
    W_SUMS: ClassVar[Operand]
    BLOCK_A: ClassVar[Operand]
    BLOCK_W: ClassVar[Operand]
    OUT_SCALES: ClassVar[Operand]
    EXPERT_OFFSETS: ClassVar[Operand]
    EXPERT_ROWS: ClassVar[Operand]
    ROW_SCALE: ClassVar[Operand]
    RESIDUAL: ClassVar[Operand]
    __members__: ClassVar[dict[str, Operand]]

class UnsupportedError(NotImplementedError): ...

class WeightArguments(metaclass=_pybind11_type):
    def __init__(self) -> None: ...
    packing: Packing
    n: int
    k: int
    group_size: int
    packed: int
    scale_type: DType
    scales: int
    scale_stride: int
    zero_type: DType
    zeros: int
    zero_stride: int
    global_scale: int
    minimum_type: DType
    minimums: int
    minimum_stride: int
    super_groups: int
    super_scales: int
    super_minimums: int
    super_scale_stride: int
    super_minimum_stride: int
    by_strip: bool

class SumScales(metaclass=_pybind11_type):
    def __init__(self) -> None: ...
    a_scale: int
    a_scale_stride: int
    w_scale: int
    w_scale_stride: int
    azp: int
    azp_stride: int
    channel_sums: int

class BlockScales(metaclass=_pybind11_type):
    def __init__(self) -> None: ...
    size: int
    a: int
    a_stride: int
    w: int
    w_stride: int
    up_offset: int

class QuantizedOutput(metaclass=_pybind11_type):
    def __init__(self) -> None: ...
    size: int
    scales: int
    stride: int

class ExpertRows(metaclass=_pybind11_type):
    def __init__(self) -> None: ...
    count: int
    offsets: int
    rows: int
    row_scale: int
    a_rows: int

class GemmArguments(metaclass=_pybind11_type):
    def __init__(self) -> None: ...
    m: int
    weights: WeightArguments
    a_type: DType
    out_type: DType
    sums: SumScales
    blocks: BlockScales
    quantized: QuantizedOutput
    int8_activations: bool
    batch_invariant: bool
    experts: ExpertRows
    a: int
    a_stride: int
    out: int
    out_stride: int
    bias_type: DType
    bias: int
    act_scale_type: DType
    act_scale: int
    perm: int
    activation: Activation
    gate: Gate
    residual: int
    residual_stride: int
    workspace: int
    workspace_bytes: int

# a product of operands elsewhere in memory, in the order of `operands`; an address of 0: there is none
class QuantizeArguments(metaclass=_pybind11_type):
    def __init__(self) -> None: ...
    rows: int
    columns: int
    a_type: DType
    a: int
    a_stride: int
    smooth: int
    per_tensor: bool
    block: int
    square: bool
    powers_of_two: bool
    gated: bool
    asymmetric: bool
    given_scale: int
    given_azp: int
    code_type: DType
    codes: int
    scale: int
    azp: int
    workspace: int

class Rebinding(metaclass=_pybind11_type):
    def __init__(self, product: GemmArguments, operands: Sequence[Operand]) -> None: ...
    @property
    def addresses(self) -> list[int]: ...
    def __call__(self, addresses: list[int], out: int) -> GemmArguments: ...

class Plan(metaclass=_pybind11_type):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def tactic(self) -> str: ...
    @property
    def split_k(self) -> int: ...
    @property
    def cluster(self) -> bool: ...
    @property
    def shared_channel(self) -> int: ...
    @property
    def shared_token(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def rounds_weights(self) -> bool: ...
    @property
    def dense(self) -> bool: ...
    @property
    def slice(self) -> int: ...

# how a kernel meets an operand; READ_EARLY: maybe while the one before ends; READ_AGAIN: so, if a product has read it
class Access(_Enumeration):
    READ: ClassVar[Access]
    READ_EARLY: ClassVar[Access]
    READ_AGAIN: ClassVar[Access]
    WRITTEN: ClassVar[Access]
    __members__: ClassVar[dict[str, Access]]

# what the next kernel in a stream may run beside; `waits`: whether a kernel waits before it lets its successor start
class LastOutputs(metaclass=_pybind11_type):
    def __init__(self) -> None: ...
    def add(self, begin: int, end: int, waits: bool) -> None: ...
    def begin_experts(self, offsets: tuple[int, int], rows: tuple[int, int]) -> None: ...
    def end_experts(self) -> None: ...
    def read(self, begin: int, end: int) -> None: ...

# a checked and planned product, which runs wherever its operands lie; `extents`: bytes, that of the output last
class Launch(metaclass=_pybind11_type):
    def __init__(
        self,
        product: GemmArguments,
        operands: Sequence[Operand],
        accesses: Sequence[Access],
        extents: Sequence[int],
        element_size: int,
        plan: Plan | None,
        device: int,
        host_rows: int,
        new_out: Callable[[], Tensor],
        new_workspace: Callable[[], Tensor],
        run_dense: Callable[[GemmArguments, Plan, Tensor, Tensor], None],
        dense_is_ready: Callable[[int], bool],
    ) -> None: ...
    @property
    def addresses(self) -> list[int]: ...
    def is_settled(self, addresses: list[int], last: LastOutputs) -> bool: ...
    def run(self, addresses: list[int], a: Tensor, out: Tensor | None) -> Tensor: ...

# launches of a kind of product by their calls' signatures; the arguments are places in a call
class Launches(metaclass=_pybind11_type):
    def __init__(self, operands: list[int], options: list[int], most: int) -> None: ...
    def repeat(self, call: Iterable[Any], out: Tensor | None) -> Tensor | None: ...
    def remember(
        self, call: Iterable[Any], out: Tensor | None, launch: Launch, generation: int, written: int
    ) -> None: ...
    def signature(self, call: Iterable[Any], out: Tensor | None) -> tuple[tuple[int, ...], list[int]] | None: ...
    def __len__(self) -> int: ...

# eager calls of one layer, by the signature of its input; `layer`: its attributes, `settings` are some of their names
class LayerState(metaclass=_pybind11_type):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...

class LayerCalls(metaclass=_pybind11_type):
    def __init__(self, settings: Sequence[str], most: int) -> None: ...
    def repeat(self, a: Tensor, layer: dict[str, Any], activation: str | None) -> Tensor | None: ...
    def begin(self, a: Tensor, layer: dict[str, Any], activation: str | None) -> LayerState | None: ...
    def remember(
        self, begin: LayerState, launches: Launches, call: Any, quantizer: QuantizeArguments | None, new_scratch: Any
    ) -> None: ...
    def __len__(self) -> int: ...

def forget_launches() -> None: ...
def launch_generation() -> int: ...

class Cost(metaclass=_pybind11_type):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def load(self) -> float: ...
    @property
    def compute(self) -> float: ...
    @property
    def fixed(self) -> float: ...
    @property
    def total(self) -> float: ...

class Candidate(metaclass=_pybind11_type):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def cost(self) -> Cost: ...

class DeviceTraits(metaclass=_pybind11_type):
    def __init__(
        self, compute_capability: int, sm_count: int, shared_memory_per_block: int, wgmma: bool = False
    ) -> None: ...
    @property
    def compute_capability(self) -> int: ...
    @property
    def code_capability(self) -> int: ...
    @property
    def sm_count(self) -> int: ...
    @property
    def shared_memory_per_block(self) -> int: ...
    @property
    def wgmma(self) -> bool: ...

class TacticTraits(metaclass=_pybind11_type):
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def channels(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def shared_memory(self) -> int: ...
    @property
    def max_registers(self) -> int: ...
    @property
    def superseded(self) -> bool: ...
    @property
    def wgmma(self) -> bool: ...

LAYOUT_VERSION: int
SUPER_BLOCK_STEP: int

def tile_k(packing: Packing) -> int: ...
def position(packing: Packing, k_extent: int, n: int, k: int) -> tuple[int, int]: ...

# packing; device < 0: the host (threads), otherwise that GPU's stream, which must be of the current device
def pack(
    packing: Packing,
    n: int,
    k: int,
    codes: int,
    codes_stride: int,
    packed: int,
    *,
    device: int = -1,
    stream: int = 0,
    threads: int = 1,
) -> None: ...
def unpack(
    packing: Packing,
    n: int,
    k: int,
    codes: int,
    codes_stride: int,
    packed: int,
    *,
    device: int = -1,
    stream: int = 0,
    threads: int = 1,
) -> None: ...
def dequantize(
    weights: WeightArguments,
    row_begin: int,
    row_end: int,
    out_type: DType,
    out: int,
    out_stride: int,
    *,
    device: int = -1,
    stream: int = 0,
    threads: int = 1,
) -> None: ...

# between products of a decoder block; by position the members in decoder.h, threads, a device, -1: the host, its stream
def add_rms_norm(*arguments: int | float | DType) -> None: ...
def add_rms_norm_quantized(*arguments: int | float | DType) -> None: ...
def gate(*arguments: int | DType | Activation) -> None: ...
def rotate(*arguments: int | float | DType | _Heads | None) -> None: ...

_Heads = tuple[int, int, int, int, int, int, int, int, int, int]
_Norm = tuple[int, DType, float]
_CachedHeads = tuple[int, int, int, int]

class DecoderBlock(metaclass=_pybind11_type):
    def __init__(
        self,
        *,
        type: DType,
        heads: int,
        kv_heads: int,
        size: int,
        activation: Activation,
        qkv: Sequence[GemmArguments],
        output: GemmArguments,
        gate_up: Sequence[GemmArguments],
        down: GemmArguments,
        query_norm: _Norm,
        key_norm: _Norm,
        mlp_norm: _Norm,
        next_norm: _Norm,
    ) -> None: ...

class PlacedBlocks(metaclass=_pybind11_type):
    def __init__(
        self,
        blocks: Sequence[DecoderBlock],
        places: Sequence[tuple[_CachedHeads, _CachedHeads, float]],  # keys, values, scaling
        /,
    ) -> None: ...
    # length, rows, x, residual, cos, sin, shared_angles, sum, out, threads
    def run(self, /, *arguments: int) -> None: ...

class Held(metaclass=_pybind11_type):
    # dictionary, name, value, None: there is none; class, forward, __call__; tensor, do changes in place count, where
    def __init__(
        self,
        entries: Sequence[tuple[dict[str, Any], str, object]],
        objects: Sequence[object],
        ways: Sequence[tuple[type, Any, Any]],
        empty: Sequence[dict[Any, Any]],
        tensors: Sequence[tuple[Tensor, bool, int, int]],
    ) -> None: ...
    def is_unchanged(self) -> bool: ...

# the steps of a mixture of experts around its products; by position the members in moe.h, device as above
MOST_EXPERTS: int

def moe_route(*arguments: int, device: int = -1, stream: int = 0, threads: int = 1) -> None: ...
def moe_gate(*arguments: float | DType | Activation, device: int = -1, stream: int = 0, threads: int = 1) -> None: ...
def moe_sum(*arguments: int | DType, device: int = -1, stream: int = 0, threads: int = 1) -> None: ...

# quantising to 8 bits; device as above
QUANTIZE_WORKSPACE_BYTES: int

def quantize(arguments: QuantizeArguments, *, device: int = -1, stream: int = 0, threads: int = 1) -> None: ...
def dequantize_blocks(
    rows: int,
    columns: int,
    size: int,
    code_type: DType,
    codes: int,
    codes_stride: int,
    scales: int,
    out_type: DType,
    out: int,
    *,
    square: bool = False,
    device: int = -1,
    stream: int = 0,
    threads: int = 1,
) -> None: ...
def gelu_blocks(
    rows: int,
    columns: int,
    size: int,
    codes: int,
    codes_stride: int,
    scales: int,
    out: int,
    out_scales: int,
    *,
    device: int = -1,
    stream: int = 0,
    threads: int = 1,
) -> None: ...

# products
def gemm_host(arguments: GemmArguments, threads: int) -> None: ...
def gemm_cuda(arguments: GemmArguments, plan: Plan, stream: int) -> None: ...
def prepare_activations(arguments: GemmArguments, a_out: int, a_out_stride: int, stream: int) -> None: ...
def finish(arguments: GemmArguments, sums: int, sums_stride: int, begin: int, end: int, stream: int) -> None: ...
def select(
    arguments: GemmArguments, device: DeviceTraits, tactic: str = "", split_k: int = 0, dense: bool = False
) -> Plan: ...
def candidates(
    arguments: GemmArguments, device: DeviceTraits, tactic: str = "", split_k: int = 0, dense: bool = False
) -> list[Candidate]: ...
def dense_tactic(arguments: GemmArguments) -> str: ...

# the cost model: its constants by name, rates as "gpu.dram"; a GPU's row of these: compute capability, SMs, if fitted
def cost_class(arguments: GemmArguments) -> str: ...
def costs(cost_class: str) -> dict[str, float]: ...
def gpu_class(device: DeviceTraits) -> tuple[int, int, bool]: ...
def predict(arguments: GemmArguments, device: DeviceTraits, plan: Plan, costs: Mapping[str, float]) -> Cost: ...
def kernel_set_hash() -> str: ...
def tactics(arguments: GemmArguments) -> list[TacticTraits]: ...

# what was built
def cuda_is_built() -> bool: ...
def cuda_architectures() -> Sequence[str]: ...
def device_traits(device: int) -> DeviceTraits: ...
def build_info() -> dict[str, str]: ...
