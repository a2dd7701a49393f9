"""The bytes of every value of a program on one device: how each is split over the mesh."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmp._jaxpr.compat import scan_counts
from jaxmp._jaxpr.mesh_axes import named_axes
from jaxmp._jaxpr.op_classes import (
    CONTRACTIONS,
    COSTS,
    IDENTITIES,
    LAYINGS,
    PICKS,
    PLACINGS,
    REARRANGES,
    REDUCTIONS,
    Cost,
)
from jaxmp._planning.array_splits import WHOLE, Split, joined, pieces_of, read_splits, result_splits
from jaxmp._planning.flat_program import FlatOp, FlatProgram

# Change how an array is seen or laid out, or say what is known of it: a product reads it as it is.
_VIEWS = REARRANGES | IDENTITIES | LAYINGS | {"optimization_barrier"}


def is_view(op: FlatOp) -> bool:
    """Whether the result of an operation is its first operand, seen in another way."""
    return op.name in _VIEWS


def is_sum(op: FlatOp) -> bool:
    """Whether an operation writes a small result, and computes its operands while it reads them."""
    return op.name in REDUCTIONS or op.name in PICKS


def is_cheap(op: FlatOp) -> bool:
    """Whether an operation can be fused into those that read its result."""
    return COSTS.get(op.name) is Cost.CHEAP and not is_view(op) and not is_sum(op)


def is_dear(op: FlatOp) -> bool:
    """Whether an operation is a kernel of its own: a product, a loop, a sort."""
    return not (is_view(op) or is_sum(op) or is_cheap(op))


class SizedProgram:
    """A program, and how its values are split over a mesh.

    Attributes:
      program: the program.
      mesh: the sizes of the mesh axes.
      splits: how each value is split.
      plain: values that are made of no array, such as zeros: they lie where they are read.
      inner: the programs inside of an operation, by its number.
    """

    def __init__(
        self,
        program: FlatProgram,
        given: Sequence[Split],
        mesh: Mapping[str, int],
        plain: Sequence[bool] = (),
    ) -> None:
        """Follows the splits of the arguments through the program.

        Args:
          program: the program.
          given: how each argument is split.
          mesh: the sizes of the mesh axes.
          plain: for each argument, whether it is made of no array.
        """
        self.program = FlatProgram([], program.inputs, program.outputs, dict(program.avals))
        self.mesh = mesh
        self.splits: dict[int, Split] = dict(zip(program.inputs, given, strict=True))
        self.plain = {v for v, is_plain in zip(program.inputs, plain, strict=False) if is_plain}
        self.inner: dict[int, list[SizedProgram]] = {}
        self._roots: dict[int, int] = {}
        for traced in program.ops:
            op = self._with_gathered(traced)
            number = len(self.program.ops)
            self.program.ops.append(op)
            made = self._inside(number, op) if op.bodies else self._results(op)
            self.splits.update(zip(op.outputs, made, strict=True))
            self._lay_plain(op)
            self._see_through(op)

    def bytes_of(self, v: int) -> int:
        """Returns the bytes of a value on one device."""
        return nbytes_on_device(self.program.avals[v], self.splits.get(v, ()), self.mesh)

    def tiled_bytes_of(self, v: int) -> int:
        """Returns the bytes of a value on a device that pads arrays to tiles, as TPUs do."""
        aval, split = self.program.avals[v], self.splits.get(v, ())
        if not split:  # of one number, or no array
            return self.bytes_of(v)
        parts = [pieces_of((axes,), self.mesh) for axes in split]
        shape = [math.ceil(n / of) for n, of in zip(aval.shape, parts, strict=True)]
        return tiled_nbytes(shape, aval.dtype.itemsize)

    def root(self, v: int) -> int:
        """Returns the value that this one is a view of."""
        return self._roots.get(v, v)

    def operands(self, op: FlatOp) -> list[int]:
        """Returns the values that an operation reads, views as what they are views of."""
        return list(dict.fromkeys(self.root(v) for v in op.inputs if v is not None))

    def starts_anew(self, op: FlatOp) -> bool:
        """Whether an operation makes values of its own, and no view of another."""
        return any(self.root(v) == v for v in op.outputs) or not op.outputs

    def is_gather(self, op: FlatOp) -> bool:
        """Whether an operation gathers an array from devices: from memory to memory."""
        given = map(self.bytes_of, self.operands(op))
        return op.name in PLACINGS and self.bytes_of(op.outputs[0]) > max(given, default=0)

    @property
    def results(self) -> list[Split]:
        """How each result is split."""
        return [self.splits.get(v, ()) if v is not None else () for v in self.program.outputs]

    def _given(self, op: FlatOp) -> list[Split]:
        shapes = [getattr(variable.aval, "ndim", 0) for variable in op.equation.invars]
        whole = [(WHOLE,) * ndim for ndim in shapes]
        return [
            each if v is None else self.splits.get(v, each)
            for v, each in zip(op.inputs, whole, strict=True)
        ]

    def _results(self, op: FlatOp) -> list[Split]:
        return result_splits(op.equation, self._given(op), self.mesh)

    def _with_gathered(self, op: FlatOp) -> FlatOp:
        """Puts before a product what gathers its operands, where it reads them so."""
        if op.name not in CONTRACTIONS:
            return op
        given = self._given(op)
        read = read_splits(op.equation, given, self._results(op)[0])
        inputs = list(op.inputs)
        for i, (before, after) in enumerate(zip(given, read, strict=True)):
            v = op.inputs[i]
            if v is None or pieces_of(before, self.mesh) == pieces_of(after, self.mesh):
                continue
            inputs[i] = whole = len(self.program.avals)
            self.program.avals[whole], self.splits[whole] = self.program.avals[v], after
            gather = dataclasses.replace(op, name="reshard", inputs=(v,), outputs=(whole,))
            self.program.ops.append(gather)
        return dataclasses.replace(op, inputs=tuple(inputs))

    def _lay_plain(self, op: FlatOp) -> None:
        """Splits what is made of no array as what is made of it."""
        known = all(v is None or v in self.plain for v in op.inputs)
        if known and not is_dear(op):
            self.plain.update(op.outputs)
            return
        for v in op.inputs:
            for out in op.outputs:
                if v is None or v not in self.plain or any(self.splits[v]):
                    continue
                if self.program.avals[v].shape == getattr(self.program.avals[out], "shape", None):
                    self.splits[v] = self.splits[out]

    def _see_through(self, op: FlatOp) -> None:
        if is_view(op):
            for v, out in zip(op.inputs, op.outputs, strict=False):
                if v is not None and self.bytes_of(v) == self.bytes_of(out):
                    self._roots[out] = self.root(v)

    def _inside(self, number: int, op: FlatOp) -> list[Split]:
        given, plain = self._given(op), [v in self.plain for v in op.inputs]
        if op.name == "scan":
            return self._scan(number, op, given, plain)
        if op.name == "while":
            return self._while(number, op, given)
        if op.name == "cond":
            self.inner[number] = [SizedProgram(body, given[1:], self.mesh) for body in op.bodies]
            results = [body.results for body in self.inner[number]]
            return [_either(each) for each in zip(*results, strict=True)]
        # A `shard_map`: its arrays are those of one device.
        (body,) = op.bodies
        whole = [(WHOLE,) * getattr(body.avals[v], "ndim", 0) for v in body.inputs]
        self.inner[number] = [SizedProgram(body, whole, {})]
        specs = zip(op.equation.params["out_specs"], op.equation.outvars, strict=True)
        return [_split_by(spec, getattr(v.aval, "ndim", 0)) for spec, v in specs]

    def _scan(self, number: int, op: FlatOp, given: list[Split], plain: list[bool]) -> list[Split]:
        begin, count = scan_counts(op.equation.params)
        carry, each = given[begin : begin + count], [split[1:] for split in given[begin + count :]]
        while True:
            body = SizedProgram(op.bodies[0], [*given[:begin], *carry, *each], self.mesh, plain)
            turned = [_either(pair) for pair in zip(carry, body.results, strict=False)]
            if turned == carry:
                break
            carry = turned
        self.inner[number] = [body]
        for v, inside in zip(op.inputs[:begin], body.program.inputs, strict=False):
            if v in self.plain:
                self.splits[v] = body.splits[inside]
        return [*carry, *((WHOLE, *split) for split in body.results[count:])]

    def _while(self, number: int, op: FlatOp, given: list[Split]) -> list[Split]:
        params = op.equation.params
        tested = params["cond_nconsts"]
        begin = tested + params["body_nconsts"]
        carry = given[begin:]
        while True:
            body = SizedProgram(op.bodies[1], [*given[tested:begin], *carry], self.mesh)
            turned = [_either(pair) for pair in zip(carry, body.results, strict=True)]
            if turned == carry:
                break
            carry = turned
        self.inner[number] = [body]
        return carry


def nbytes_on_device(aval: Any, split: Split, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of an array that is split so; 0 for what is no array."""
    if not (hasattr(aval, "shape") and hasattr(aval, "dtype")):
        return 0
    # A key of random numbers has a dtype of its own, of as many bytes as its words.
    return math.ceil(math.prod(aval.shape) * aval.dtype.itemsize / pieces_of(split, mesh))


def tiled_nbytes(shape: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of an array in the memory of a TPU, in the layout that pads least.

    Its two minor dimensions fill tiles of 8 x 128 words of 32 bits, or of 1, 2 or 4 x 128 where the
    array has no more rows; shorter numbers lie side by side in a word. Compilers choose which
    dimensions are the minor ones.

    Args:
      shape: the shape of the array on one device.
      itemsize: the bytes of a number.

    >>> tiled_nbytes((56, 56, 64), 4) // (56 * 56 * 64)  # 64 numbers fill half a tile
    8
    >>> tiled_nbytes((1024, 16, 16), 4) // (1024 * 16 * 16)  # the first dimension becomes the minor
    4
    """
    size = math.prod(shape)
    if len(shape) < 2 or not size:
        return size * itemsize
    rows = 8 * max(1, 4 // itemsize)

    def tiled(a: int, b: int) -> int:
        height = min(rows, 2 ** (a - 1).bit_length())
        return size // (a * b) * _rounded_up(a, height) * _rounded_up(b, 128)

    return itemsize * min(tiled(a, b) for a, b in itertools.permutations(shape, 2))


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _either(splits: Sequence[Split]) -> Split:
    """Returns the split of a value that comes from one of several places; () says nothing."""
    known = [split for split in splits if split]
    found = known[0] if known else ()
    for other in known[1:]:
        found = joined(found, other)
    return found


def _split_by(spec: Any, ndim: int) -> Split:
    entries = [frozenset(named_axes(entry)) for entry in spec]
    return (*entries, *[WHOLE] * (ndim - len(entries)))
