"""Which values of a program are written to memory, and which are computed where they are read.

Five rules stand for what compilers do when they fuse:

1. Cheap operations (elementwise ones, casts, masks) are fused into what reads them, and write
   nothing. Products, loops and other dear operations write their results, and so do reductions.
2. Dear operations read operands from memory, so that cheap ones are written for them. TPUs compute
   operands of products while they read them; and they fuse a product with the cheap operations
   that alone read its result. Gathers send what is in memory; on TPUs casts are fused with them.
3. A cheap value is written where many read it: where that moves fewer bytes than each of them
   reading what it is made of. On GPUs also where it takes more time to compute than to read.
4. Cheap operations of one shape that wait for the same products are one kernel, which may write
   several results: those that read one value count as one reader.
5. On GPUs, what was cast from float32 within a fusion is kept in float32 for cheap operations.
"""

import dataclasses
from typing import Any

from jaxmp._jaxpr.op_classes import (
    ARITHMETIC,
    CASTS,
    CONTRACTIONS,
    EXTREMES,
    REPEATS,
    TRANSCENDENTAL,
)
from jaxmp._planning.flat_program import FlatOp
from jaxmp._planning.value_sizes import SizedProgram, is_cheap, is_dear, is_view

# As many bytes are moved in the time that a transcendental function takes for one number. The only
# number here that was fitted: XLA for an H100 writes the tanh of a gelu in bfloat16, where two
# kernels read it, and makes the float32 exponentials of a softmax again for each of four.
_BYTES_OF_WORK = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fusion:
    """How a compiler fuses, and lays arrays into memory.

    Attributes:
      into_products: whether products compute operands while they read them, and are fused with the
        operations that alone read their results.
      keeps_work: whether what takes long to compute is written, if several operations read it.
      excess_precision: whether casts down are left out between fused operations.
      pads_to_tiles: whether arrays fill whole tiles in memory.
      frees_early: whether what frees at least as much as it writes runs at once, and not where it
        was traced. If not, expensive operations wait on several devices.
      shares_results: whether other arrays lie where results will, before these are written.
    """

    into_products: bool
    keeps_work: bool
    excess_precision: bool
    pads_to_tiles: bool
    frees_early: bool
    shares_results: bool


FUSIONS = {
    "gpu": Fusion(
        into_products=False,
        keeps_work=True,
        excess_precision=True,
        pads_to_tiles=False,
        frees_early=False,
        shares_results=True,
    ),
    "tpu": Fusion(
        into_products=True,
        keeps_work=False,
        excess_precision=False,
        pads_to_tiles=True,
        frees_early=True,
        shares_results=False,
    ),
}


def buffer_sizes(sized: SizedProgram, fusion: Fusion) -> dict[int, int]:
    """Returns the bytes of each value that is written to memory, without the arguments.

    Args:
      sized: the program.
      fusion: how the compiler fuses.
    """
    written = _written(sized, fusion)
    if fusion.into_products:
        _move_to_readers(sized, written)
    written -= set(sized.program.inputs)
    size_of = sized.tiled_bytes_of if fusion.pads_to_tiles else sized.bytes_of
    sizes = {v: size_of(v) for v in written}
    if fusion.excess_precision:
        for v in _written_in_float32(sized, written):
            sizes[v] *= 2
    return sizes


def _written(sized: SizedProgram, fusion: Fusion) -> set[int]:
    """Returns what is written to memory, from the last operation to the first."""
    written = {sized.root(v) for v in sized.program.outputs if v is not None}
    # The kernels that read a value, directly or through operations that are fused.
    readers: dict[int, set[Any]] = {}
    casts = {v for op in sized.program.ops if op.name in CASTS for v in op.outputs}
    reading, kernels = _bytes_to_read(sized), _kernel_of_each(sized)
    for number, op in reversed(list(enumerate(sized.program.ops))):
        if not sized.starts_anew(op):
            continue
        through = {kernels[number]}
        if not is_cheap(op) and not is_view(op):
            written.update(v for v in op.outputs if v in readers)
        elif op.outputs[0] not in written:
            found = readers.get(op.outputs[0], set())
            if is_cheap(op) and _pays(sized, op, len(found), reading, fusion):
                written.add(op.outputs[0])
            else:
                through = found
        for v in sized.operands(op):
            readers.setdefault(v, set()).update(through)
        if is_dear(op) and not (fusion.into_products and op.name in CONTRACTIONS):
            written.update(sized.operands(op))
        elif sized.is_gather(op):
            written.update(
                v for v in sized.operands(op) if not (fusion.into_products and v in casts)
            )
    return written


def _kernel_of_each(sized: SizedProgram) -> list[Any]:
    """Returns for each operation what tells its kernel apart from others with the same operand.

    Cheap operations of one shape are one kernel, which may write several results, if no path from
    one to the other leaves it: if as many other operations come before both.
    """
    before: dict[int, int] = {}
    found: list[Any] = []
    for number, op in enumerate(sized.program.ops):
        depth = max((before.get(v, 0) for v in sized.operands(op)), default=0)
        fused = is_cheap(op)
        found.append((depth, sized.program.avals[op.outputs[0]].shape) if fused else number)
        for v in op.outputs:
            before[sized.root(v)] = depth + (not (fused or is_view(op)))
    return found


def _bytes_to_read(sized: SizedProgram) -> dict[int, int]:
    """Returns the bytes read for each value: of a cast or a repeated array, its operand's."""
    reading: dict[int, int] = {v: sized.bytes_of(v) for v in sized.program.inputs}
    for op in sized.program.ops:
        operands = sum(reading.get(v, sized.bytes_of(v)) for v in sized.operands(op))
        passes = op.name in CASTS or op.name in REPEATS or is_view(op)
        for v in op.outputs:
            size = sized.bytes_of(v)
            reading[v] = min(size, operands) if passes or v in sized.plain else size
    return reading


def _pays(
    sized: SizedProgram, op: FlatOp, readers: int, reading: dict[int, int], fusion: Fusion
) -> bool:
    """Whether it costs less to write a cheap value than to compute it for each reader (rule 3)."""
    (out,) = op.outputs[:1]
    size, operands = sized.bytes_of(out), sum(reading[v] for v in sized.operands(op))
    if readers * operands > operands + size + readers * size:
        return True
    dtype = sized.program.avals[out].dtype
    work = _BYTES_OF_WORK * size // dtype.itemsize if op.name in TRANSCENDENTAL else 0
    return fusion.keeps_work and (readers - 1) * work > readers * size


def _move_to_readers(sized: SizedProgram, written: set[int]) -> None:
    """Writes, in place of the result of a product, what is fused with it (rule 2)."""
    readers: dict[int, list[FlatOp]] = {}
    for op in sized.program.ops:
        if sized.starts_anew(op):
            for v in sized.operands(op):
                readers.setdefault(v, []).append(op)
    results = {sized.root(v) for v in sized.program.outputs if v is not None}
    avals = sized.program.avals
    for op in sized.program.ops:
        if op.name not in CONTRACTIONS:
            continue
        v = last = op.outputs[0]
        while v not in results and len(readers.get(v, ())) == 1 and is_cheap(readers[v][0]):
            (reader,) = readers[v]
            if avals[reader.outputs[0]].shape != avals[v].shape:
                break
            v = reader.outputs[0]
            # A cast at the end is left to those who read it: it may be to more bytes.
            if reader.name not in CASTS or v in written:
                last = v
            if v in written:
                break
        if last != op.outputs[0]:
            written.discard(op.outputs[0])
            written.add(last)


def _written_in_float32(sized: SizedProgram, written: set[int]) -> set[int]:
    """Returns the values of 16 bits that are written in float32 for arithmetic that reads them."""
    avals, arguments = sized.program.avals, set(sized.program.inputs)
    # Values that are computed in float32, and rounded in the same fusion; what arithmetic reads.
    wide, read = set[int](), set[int]()
    for op in sized.program.ops:
        operands, is_arithmetic = sized.operands(op), op.name in ARITHMETIC | EXTREMES
        if is_arithmetic or (op.name in CASTS and op.outputs[0] not in written):
            read.update(operands)
        if not is_cheap(op) or avals[op.outputs[0]].dtype.itemsize != 2:
            continue
        if op.name in CASTS:
            fused = set(operands) - written - arguments
            is_wide = any(avals[v].dtype.itemsize == 4 for v in fused)
        else:
            is_wide = is_arithmetic and bool(wide.intersection(operands))
        if is_wide:
            wide.add(op.outputs[0])
    return wide & written & read
