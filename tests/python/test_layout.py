"""The packed layout, judged by a model written from its description and by bytes worked out by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qcutlass
from qcutlass import _C

PACKINGS = [_C.Packing.W4A16, _C.Packing.W8A16, _C.Packing.W8A8]
BITS = {_C.Packing.W4A16: 4, _C.Packing.W8A16: 8, _C.Packing.W8A8: 8}


@functools.cache
def byte_order(packing: _C.Packing) -> tuple[tuple[int, int], ...]:
    """(row, k) of every code of a tile in the order of its bytes, low nibble first."""
    order: list[tuple[int, int]] = []
    if packing == _C.Packing.W8A8:  # rows of two halves, which are swapped in every other four rows
        for row in range(16):
            for first in (16, 0) if row // 4 % 2 else (0, 16):
                order += [(row, first + i) for i in range(16)]
        return tuple(order)
    for lane in range(32):  # the instruction's A fragments
        g, t = divmod(lane, 4)
        for step in range(4 if packing == _C.Packing.W4A16 else 2):  # m16n8k16: four registers, a pair of k each
            k = 16 * step + 2 * t
            pairs = [(g, k), (g + 8, k), (g, k + 8), (g + 8, k + 8)]
            if packing == _C.Packing.W4A16:  # pair p in nibbles p and p + 4
                order += [(row, k) for row, k in pairs] + [(row, k + 1) for row, k in pairs]
            else:
                order += [(row, k + i) for row, k in pairs for i in (0, 1)]
    return tuple(order)


def model_pack(packing: _C.Packing, codes: Tensor) -> Tensor:
    """The packed tensor of codes [N, K], from the description alone."""
    n, k = codes.shape
    width = 512 * 8 // BITS[packing] // 16
    tiles_n, tiles_k = -(-n // 16), -(-k // width)
    padded = torch.zeros(16 * tiles_n, width * tiles_k, dtype=torch.uint8)
    padded[:n, :k] = codes
    tiles = padded.reshape(tiles_n, 16, tiles_k, width).transpose(1, 2)
    rows, columns = torch.tensor(byte_order(packing)).T
    flat = tiles[:, :, rows, columns]
    if BITS[packing] == 4:
        flat = flat[..., 0::2] | flat[..., 1::2] << 4
    return flat.reshape(tiles_n, tiles_k, 32, 16)


def extension_pack(packing: _C.Packing, codes: Tensor) -> Tensor:
    """The packed tensor by the extension, into a buffer of 0xff."""
    n, k = codes.shape
    packed = torch.full((-(-n // 16), -(-k // _C.tile_k(packing)), 32, 16), 255, dtype=torch.uint8)
    _C.pack(packing, n, k, codes.data_ptr(), codes.stride(0), packed.data_ptr(), threads=2)
    return packed


def random_codes(bits: int, n: int, k: int, seed: int) -> Tensor:
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def golden_codes(packing: _C.Packing) -> Tensor:
    """One tile whose codes tell rows, halves of the tile and k16 steps apart."""
    row, k = torch.meshgrid(torch.arange(16), torch.arange(_C.tile_k(packing)), indexing="ij")
    if BITS[packing] == 4:
        return ((row + 2 * (row // 8) + k + 3 * (k // 16)) % 16).to(torch.uint8)
    return ((16 * row + k + 5 * (k // 16)) % 256).to(torch.uint8)


# Worked out by hand from the description of the layout: version 2, some lanes' 16 bytes of golden_codes' tile.
GOLDEN_BYTES = {
    (_C.Packing.W4A16, 0): "a028b139 d35be46c 068e179f 39b14ac2",
    (_C.Packing.W4A16, 5): "d35be46c 068e179f 39b14ac2 6ce47df5",
    (_C.Packing.W4A16, 31): "7df58e06 a028b139 d35be46c 068e179f",
    (_C.Packing.W8A16, 0): "00018081 08098889 15169596 1d1e9d9e",
    (_C.Packing.W8A16, 5): "12139293 1a1b9a9b 2728a7a8 2f30afb0",
    (_C.Packing.W8A16, 31): "7677f6f7 7e7ffeff 8b8c0b0c 93941314",
    (_C.Packing.W8A8, 0): "00010203 04050607 08090a0b 0c0d0e0f",  # row 0, columns 0 to 15
    (_C.Packing.W8A8, 7): "45464748 494a4b4c 4d4e4f50 51525354",  # row 3, columns 16 to 31
    (_C.Packing.W8A8, 8): "55565758 595a5b5c 5d5e5f60 61626364",  # row 4, columns 16 to 31
    (_C.Packing.W8A8, 17): "95969798 999a9b9c 9d9e9fa0 a1a2a3a4",  # row 8, columns 16 to 31
    (_C.Packing.W8A8, 31): "f0f1f2f3 f4f5f6f7 f8f9fafb fcfdfeff",  # row 15, columns 0 to 15
}


@pytest.mark.parametrize(("packing", "lane"), GOLDEN_BYTES)
def test_golden_bytes(packing: _C.Packing, lane: int) -> None:
    assert _C.LAYOUT_VERSION == 2
    packed = extension_pack(packing, golden_codes(packing))
    assert bytes(packed[0, 0, lane].tolist()) == bytes.fromhex(GOLDEN_BYTES[packing, lane])


@pytest.mark.parametrize("packing", PACKINGS)
def test_position_follows_the_description_and_is_a_bijection(packing: _C.Packing) -> None:
    width, bits = _C.tile_k(packing), BITS[packing]
    n, k = 40, 2 * width + 3
    places = {(row, column): _C.position(packing, k, row, column) for row in range(n) for column in range(k)}
    assert len(set(places.values())) == n * k
    per_byte = 8 // bits
    index_in_tile = {place: i for i, place in enumerate(byte_order(packing))}
    for (row, column), (byte, bit) in places.items():
        index = index_in_tile[row % 16, column % width]
        tile = row // 16 * 3 + column // width
        assert (byte, bit) == (512 * tile + index // per_byte, index % per_byte * bits), (row, column)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(packing=st.sampled_from(PACKINGS), n=st.integers(1, 70), k=st.integers(1, 200), seed=st.integers(0, 999))
def test_pack_follows_the_description(packing: _C.Packing, n: int, k: int, seed: int) -> None:
    codes = random_codes(BITS[packing], n, k, seed)
    assert torch.equal(extension_pack(packing, codes), model_pack(packing, codes))  # the padding, zero, included


@settings(derandomize=True, max_examples=80, deadline=None)
@given(bits=st.sampled_from([4, 8]), n=st.integers(1, 70), k=st.integers(1, 200), seed=st.integers(0, 999))
def test_round_trip(bits: int, n: int, k: int, seed: int) -> None:
    codes = random_codes(bits, n, k, seed)
    packed = qcutlass.preprocess_weights(codes, bits=bits)
    assert packed.shape == (-(-n // 16), -(-k // (256 // bits)), 32, 16)
    assert packed.dtype == torch.uint8
    assert torch.equal(qcutlass.unpack_weights(packed, bits=bits, shape=(n, k)), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_round_trip_of_a_large_matrix_on_many_threads(bits: int) -> None:
    codes = random_codes(bits, 1111, 2222, seed=1)
    packed = qcutlass.preprocess_weights(codes, bits=bits)
    assert torch.equal(packed, model_pack(_C.Packing.W4A16 if bits == 4 else _C.Packing.W8A16, codes))
    assert torch.equal(qcutlass.unpack_weights(packed, bits=bits, shape=(1111, 2222)), codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("view", ["columns", "transposed", "every second row", "offset"])
def test_views_of_codes(bits: int, view: str) -> None:
    base = random_codes(bits, 90, 90, seed=2)
    codes = {
        "columns": base[:, 7:72],
        "transposed": base.T,
        "every second row": base[::2],
        "offset": base.flatten()[3 : 3 + 33 * 65].reshape(33, 65),
    }[view]
    packed = qcutlass.preprocess_weights(codes, bits=bits)
    assert torch.equal(packed, qcutlass.preprocess_weights(codes.contiguous().clone(), bits=bits))
    assert torch.equal(qcutlass.unpack_weights(packed, bits=bits, shape=tuple(codes.shape)), codes)


def test_codes_of_int8_weights_keep_their_bytes() -> None:
    codes = torch.randint(-128, 128, (17, 40), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    packed = qcutlass.preprocess_weights(codes, bits=8, activations="int8")
    assert packed.dtype == torch.int8
    assert torch.equal(packed.view(torch.uint8), extension_pack(_C.Packing.W8A8, codes.view(torch.uint8)))
    assert torch.equal(qcutlass.unpack_weights(packed, bits=8, shape=(17, 40)), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_channels(bits: int) -> None:
    packed = qcutlass.preprocess_weights(torch.empty(0, 100, dtype=torch.uint8), bits=bits)
    assert packed.shape == (0, -(-100 // (256 // bits)), 32, 16)
    assert qcutlass.unpack_weights(packed, bits=bits, shape=(0, 100)).shape == (0, 100)


CODES = {
    "16bit": lambda n, k, bits: torch.randint(1, 2**bits, (n, k), dtype=torch.uint8),
    "int8": lambda n, k, bits: torch.full((n, k), -128, dtype=torch.int8),
    "fp8": lambda n, k, bits: torch.full((n, k), -1.0).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize(("bits", "activations"), [(4, "16bit"), (8, "16bit"), (8, "int8"), (8, "fp8")])
@pytest.mark.parametrize(("k", "wrong"), [(128, 127), (128, 97), (100, 98), (20, 1)])
def test_a_k_that_leaves_codes_out_is_refused(bits: int, activations: str, k: int, wrong: int) -> None:
    packed = qcutlass.preprocess_weights(CODES[activations](40, k, bits), bits, activations)
    assert qcutlass.unpack_weights(packed, bits, (40, k)).shape == (40, k)
    message = rf"shape\[1\]: K = {wrong}, but w_packed holds codes in column {wrong}: .* pass the K of that matrix"
    with pytest.raises(ValueError, match=message):
        qcutlass.unpack_weights(packed, bits, (40, wrong))


def test_zeros_at_the_end_of_a_row_cannot_be_told_from_padding() -> None:
    codes = torch.ones(16, 64, dtype=torch.uint8)
    codes[:, 60:] = 0
    packed = qcutlass.preprocess_weights(codes, bits=4)
    assert bool((qcutlass.unpack_weights(packed, 4, (16, 60)) == 1).all())
    with pytest.raises(ValueError, match=r"shape\[1\]: K = 59, but w_packed holds codes in column 59"):
        qcutlass.unpack_weights(packed, 4, (16, 59))
