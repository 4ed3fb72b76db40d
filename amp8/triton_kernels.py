"""The Triton kernels that kernels.py launches. Each names the function that says what it computes. Triton gives their
arguments types of its own."""

import torch
import triton
import triton.language as tl

from . import scaling

NAMED = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    scaling.E4M3: tl.float8e4nv,
}  # fmt: skip


@triton.jit
def _bits(x):
    """The bits of |x|, x fp32, as int32: they sort as the magnitudes do, and NaN comes last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rounded(x, noise, TOP: tl.constexpr, SMALLEST: tl.constexpr, EPS: tl.constexpr, NOISY: tl.constexpr):
    """scaling.quantize, or rounding.round_stochastically, of fp32, as fp32 on the grid of the dtype whose largest
    value is TOP."""
    # No min or max that hands on NaN: beside one ptxas 12.9 writes garbage into the second layout (triton#11111).
    x = tl.where(x > TOP, TOP, tl.where(x < -TOP, -TOP, x))
    unit = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.maximum(unit, SMALLEST)
    if NOISY:
        x = x + noise * (EPS * 2.0**-32 * (1 - 2 * 2.0**-23 / EPS)) * unit
    magic = unit * (1.5 * 2.0**23 * EPS)
    return (x + magic) - magic


@triton.jit
def _power_of_two(amax, CARRY: tl.constexpr, EXPONENT: tl.constexpr):
    """scaling.power_of_two_scale of a finite amax above 0, given by its bits."""
    exponent = EXPONENT - ((amax + CARRY) >> 23)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _places(rows, columns, TILE: tl.constexpr):
    """(rows [TILE], columns [TILE], their places in the matrix [TILE, TILE], and in its transpose) of a program."""
    first_row, first_column = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    i = tl.arange(0, TILE)
    at = first_row.to(tl.int64) * columns + first_column + (i[:, None] * columns + i[None, :])
    turned_at = first_column.to(tl.int64) * rows + first_row + (i[:, None] * rows + i[None, :])
    return first_row + i, first_column + i, at, turned_at


@triton.jit
def _in_time(state, slot, window):
    """Whether the scale is in-time yet. state: see scaling.parts, of two slots."""
    return tl.load(state + 2 + slot).to(tl.int32, bitcast=True) < window


@triton.jit
def _raise(at, value):
    """Writes a positive number where programs write it, or NaN, which is larger, in any order."""
    tl.atomic_max(at.to(tl.pointer_type(tl.int32), bitcast=True), value.to(tl.int32, bitcast=True))


@triton.jit
def _most(x, n, program, programs, BLOCK: tl.constexpr):
    """The bits of the amax of what is one program's of n elements."""
    most = tl.zeros([BLOCK], tl.int32)
    first = program.to(tl.int64) * BLOCK
    while first < n:
        at = first + tl.arange(0, BLOCK)
        most = tl.maximum(most, _bits(tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)))
        first += programs * BLOCK
    return tl.max(most, 0)


@triton.jit
def _amax_of(found, PROGRAMS: tl.constexpr):
    """The bits of the amax of which each program of `amax` has found a part."""
    return tl.max(_bits(tl.load(found + tl.arange(0, PROGRAMS))), 0)


@triton.jit
def amax(x, found, scale, reciprocal, state, slot, window, n, ADDRESS: tl.constexpr, BLOCK: tl.constexpr):
    """Writes each program's part of the amax of x, if it is needed, and that there is no scale yet."""
    if ADDRESS:
        state = tl.load(state).to(tl.pointer_type(tl.float32))
    if tl.program_id(0) == 0:
        tl.store(scale, 0.0)
        tl.store(reciprocal, 0.0)
    if _in_time(state, slot, window):
        most = _most(x, n, tl.program_id(0), tl.num_programs(0), BLOCK)
        tl.store(found + tl.program_id(0), most.to(tl.float32, bitcast=True))


@triton.jit
def cast(
    x, codes, turned, found, own, reciprocal, state, slot, window, rows, columns,
    TOP: tl.constexpr, SMALLEST: tl.constexpr, EPS: tl.constexpr, CARRY: tl.constexpr, EXPONENT: tl.constexpr,
    RECORDING: tl.constexpr, TRANSPOSED: tl.constexpr, ADDRESS: tl.constexpr, TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    if ADDRESS:  # not in a function, of whose result torch's compiler would think that it is the tensor
        state = tl.load(state).to(tl.pointer_type(tl.float32))
    scale = tl.load(state + slot)
    if _in_time(state, slot, window):
        amax = _amax_of(found, PROGRAMS)
        if (amax > 0) & (amax < 0x7F800000):
            scale = _power_of_two(amax, CARRY, EXPONENT)
    row, column, at, turned_at = _places(rows, columns, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    most = tl.max(tl.max(_bits(value), 1), 0)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    if most >= 0x7F800000:  # the cast saturates, and a finite result would hide it
        _raise(own, scale * float("nan"))
        _raise(reciprocal, scale * float("nan"))
    elif first:
        _raise(own, scale)
        _raise(reciprocal, tl.div_rn(1.0, scale))
    if RECORDING:  # scaling.record_
        _raise(state + 4 + slot, tl.minimum(most, 0x7F800000))
    # Of 16 bits, which hold every code: Triton 3.6 transposes a tile of 8 bits wrongly if it was loaded as fp32.
    code = _rounded(value * scale, value, TOP, SMALLEST, EPS, False).to(tl.bfloat16)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=inside)
    if TRANSPOSED:
        code = tl.trans(code).to(tl.float32).to(turned.dtype.element_ty)
        tl.store(turned + turned_at, code, mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit
def _beside(program, scale, reciprocal, bias, cast_bias, bias_n, FACTOR: tl.constexpr):
    """What is cast beside a weight: the reciprocal of the operand's scale, and the bias, of which each program has 256
    elements at most. A weight has as many programs, as its sizes are multiples of 16."""
    if program == 0:
        tl.store(reciprocal, tl.div_rn(1.0, tl.load(scale) * FACTOR))
    if program * 256 < bias_n:
        at = program * 256 + tl.arange(0, 256)
        tl.store(cast_bias + at, tl.load(bias + at, mask=at < bias_n).to(cast_bias.dtype.element_ty), mask=at < bias_n)


@triton.jit
def scaled(
    x, codes, scale, reciprocal, bias, cast_bias, bias_n, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    _beside(tl.program_id(0), scale, reciprocal, bias, cast_bias, bias_n, FACTOR)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    code = _rounded(value * FACTOR, value, 448.0, 2.0**-6, 2.0**-3, False)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=at < n)


@triton.jit
def turn(
    x, turned, scale, reciprocal, bias, cast_bias, bias_n, rows, columns, FACTOR: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    _beside(program, scale, reciprocal, bias, cast_bias, bias_n, FACTOR)
    row, column, at, turned_at = _places(rows, columns, TILE)
    value = tl.load(x + at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
    if FACTOR != 1.0:
        value = _rounded(value.to(tl.float32) * FACTOR, value, 448.0, 2.0**-6, 2.0**-3, False)
    code = tl.trans(value.to(tl.float16)).to(tl.float32).to(turned.dtype.element_ty)
    tl.store(turned + turned_at, code, mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit
def _mixed(x):
    """rounding.mixed, of uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _noise(hashed, seed, block):
    """rounding.random_noise. hashed: of each place in a block."""
    a = _mixed(seed + block * 0x9E3779B1)
    b = _mixed(a ^ 0x5BD1E995)
    return (hashed * (a | 1) + b).to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def _pointer(table, column: tl.constexpr, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    at = tl.load(table + column).to(tl.pointer_type(DTYPE)) + offset
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def amaxes(table, found, X: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Of a gradient, one of the table's, the amax of what is one program's."""
    table += 4 * tl.program_id(0)
    x, programs = _pointer(table, 0, 0, X, ALIGNED), tl.num_programs(1)
    most = _most(x, tl.load(table + 3), tl.program_id(1), programs, BLOCK)
    tl.store(found + tl.program_id(0) * programs + tl.program_id(1), most.to(tl.float32, bitcast=True))


@triton.jit
def gradients(
    table, found, X: tl.constexpr, CARRY: tl.constexpr, EXPONENT: tl.constexpr, OF_ZEROS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    amax = _amax_of(found + tl.program_id(0) * PROGRAMS, PROGRAMS)
    scale = _power_of_two(amax, CARRY, EXPONENT)
    if amax == 0:
        scale = OF_ZEROS
    if amax >= 0x7F800000:
        scale = float("nan")
    table += 4 * tl.program_id(0)
    if tl.program_id(1) == 0:
        tl.store(_pointer(table, 2, 0, tl.float32, False), scale)
    x, codes = _pointer(table, 0, 0, X, ALIGNED), _pointer(table, 1, 0, tl.float8e4nv, ALIGNED)
    n, first = tl.load(table + 3), tl.program_id(1).to(tl.int64) * BLOCK
    while first < n:
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        code = _rounded(value * scale, value, 448.0, 2.0**-6, 2.0**-3, False)
        tl.store(codes + at, code.to(tl.float8e4nv), mask=at < n)
        first += PROGRAMS * BLOCK


@triton.jit
def _store(at, x, noise, scale, mask, NOISY: tl.constexpr):
    """rounding.store"""
    if at.dtype.element_ty == tl.float16:
        x = _rounded(x * scale, noise, 65504.0, 2.0**-14, 2.0**-10, NOISY)
    elif at.dtype.element_ty == tl.float8e4nv:
        x = _rounded(x * scale, noise, 448.0, 2.0**-6, 2.0**-3, NOISY)
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def squares(table, sums, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Of a tensor of codes, one of the table's, the sum of the squares that are one program's."""
    table += 2 * tl.program_id(0)
    n = tl.load(table + 1)
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    while first < n:
        at = _pointer(table, 0, first, tl.float8e4nv, ALIGNED) + tl.arange(0, BLOCK)
        value = tl.load(at, mask=first + tl.arange(0, BLOCK) < n, other=0.0).to(tl.float32)
        total += value * value
        first += tl.num_programs(1) * BLOCK
    tl.store(sums + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(total, 0))


@triton.jit
def adam(
    table, places, numbers, found, found_inf,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, COPY: tl.constexpr,
    NOISY: tl.constexpr, DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """optimizer.adam_slice. The numbers are in the order of its columns."""
    if found_inf is not None:
        if tl.load(found_inf) != 0:
            return
    tensor = tl.load(places + 2 * tl.program_id(0))
    chunk = tl.load(places + 2 * tl.program_id(0) + 1)
    table += 8 * tensor
    numbers += 16 * tensor
    size, start, seed = tl.load(table + 5), tl.load(table + 6), tl.load(table + 7).to(tl.uint32)
    index = chunk.to(tl.int64) * CHUNK
    offset = index - start  # of the chunk in the tensor
    low, high = tl.maximum(-offset, 0).to(tl.int32), tl.minimum(size - offset, CHUNK).to(tl.int32)
    if ALIGNED:
        low, high = tl.multiple_of(low, 16), tl.multiple_of(high, 16)
    element = tl.arange(0, CHUNK)
    inside = (element >= low) & (element < high)
    w_at = _pointer(table, 0, offset, W, ALIGNED) + element
    g_at = _pointer(table, 1, offset, G, ALIGNED) + element
    m_at = _pointer(table, 2, offset, M, ALIGNED) + element
    v_at = _pointer(table, 3, offset, V, ALIGNED) + element
    w = tl.load(w_at, mask=inside, other=0.0).to(tl.float32) * tl.load(numbers)
    g = tl.load(g_at, mask=inside, other=0.0).to(tl.float32) * tl.load(numbers + 1)
    m = tl.load(m_at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
    if not DECOUPLED:
        g += w * tl.load(numbers + 11)
    m = m * tl.load(numbers + 2) + g * tl.load(numbers + 4)
    v = v * tl.load(numbers + 3) + g * g * tl.load(numbers + 5)
    counted = v
    if V == tl.float16:
        counted = tl.maximum(v, tl.load(numbers + 6))
    step = m / (tl.sqrt(counted) * (1 / tl.load(numbers + 7)) + tl.load(numbers + 8))
    if DECOUPLED:
        w *= tl.load(numbers + 10)
    w -= step * tl.load(numbers + 9)
    noise_of_fp16 = w  # nothing
    if NOISY:
        block = (index >> 16).to(tl.uint32)
        hashed = _mixed((index & 0xFFFF).to(tl.uint32) + element.to(tl.uint32))
        noise_of_fp16 = _noise(hashed, seed + 1, block)
    noise_of_e4m3 = noise_of_fp16
    if NOISY and M == tl.float8e4nv:
        noise_of_e4m3 = _noise(hashed, seed, block)
    _store(w_at, w, noise_of_e4m3 if W == tl.float8e4nv else noise_of_fp16, tl.load(numbers + 12), inside, NOISY)
    _store(m_at, m, noise_of_e4m3 if M == tl.float8e4nv else noise_of_fp16, tl.load(numbers + 13), inside, NOISY)
    _store(v_at, v, noise_of_fp16, tl.load(numbers + 14), inside, NOISY)
    if COPY:
        c_at = _pointer(table, 4, offset, tl.float8e4nv, ALIGNED) + element
        _store(c_at, w, w, tl.load(numbers + 15), inside, False)
    tl.atomic_max(found + 3 * tensor, tl.max(tl.where(inside, _bits(w), 0), 0))
    tl.atomic_max(found + 3 * tensor + 1, tl.max(tl.where(inside, _bits(m), 0), 0))
    tl.atomic_max(found + 3 * tensor + 2, tl.max(tl.where(inside, _bits(v), 0), 0))
