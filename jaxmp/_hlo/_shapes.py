"""The shapes of results: `bf16[8,128]{1,0:T(8,128)(2,1)}`, and tuples of such."""

import math
import re
from typing import Any, NamedTuple

_LAYOUT = re.compile(r"\{[^{}]*\}")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_KINDS = {"f": "float", "s": "int", "u": "uint", "c": "complex", "bf": "bfloat"}


class Array(NamedTuple):
    """An array: its dtype as JAX calls it, and how many numbers it has."""

    dtype: str
    elements: int

    @property
    def bytes(self) -> int:
        """Its size; two numbers of four bits share a byte."""
        return -(-self.elements * bits(self.dtype) // 8)


Shape = Array | list[Any]  # a list of shapes for a tuple


def read_shape(text: str) -> Shape:
    """The shape that a text stands for.

    >>> read_shape("((bf16[8,128]{1,0:T(8,128)(2,1)S(1)}), u32[]{:S(2)})")
    [[Array(dtype='bfloat16', elements=1024)], Array(dtype='uint32', elements=1)]
    """
    stack: list[list[Shape]] = [[]]
    text = _LAYOUT.sub("", text)
    for found in re.finditer(r"\(|\)|" + _ARRAY.pattern, text):
        if found.group() == "(":
            stack.append([])
        elif found.group() == ")":
            if len(stack) > 1:
                inner = stack.pop()
                stack[-1].append(inner)
        else:
            sizes = [int(n) for n in re.findall(r"\d+", found.group(2))]
            stack[-1].append(Array(dtype_name(found.group(1)), math.prod(sizes)))
    return stack[0][0] if stack[0] else []


def arrays_in(shape: Shape) -> list[Array]:
    """All arrays of a shape.

    >>> arrays_in(read_shape("(f32[2], (pred[]))"))
    [Array(dtype='float32', elements=2), Array(dtype='bool', elements=1)]
    """
    if isinstance(shape, Array):
        return [shape]
    return [array for part in shape for array in arrays_in(part)]


def dtype_name(short: str) -> str:
    """What JAX calls a dtype.

    >>> [dtype_name(name) for name in ("bf16", "f8e4m3fn", "s32", "pred", "c64", "token")]
    ['bfloat16', 'float8_e4m3fn', 'int32', 'bool', 'complex64', 'token']
    """
    if short == "pred":
        return "bool"
    found = re.fullmatch(r"(bf|[fsuc])(\d+)(\w*)", short)
    if found is None:
        return short
    kind, size, format_ = found.groups()
    return _KINDS[kind] + size + (f"_{format_}" if format_ else "")


def bits(dtype: str) -> int:
    """How wide a number is.

    >>> bits("float8_e4m3fn"), bits("bool"), bits("int4"), bits("token")
    (8, 8, 4, 0)
    """
    if dtype == "bool":
        return 8
    found = re.match(r"[a-z]+(\d+)", dtype)
    return int(found.group(1)) if found else 0
