"""The records of a report: one small dataclass for each row of its tables."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, TypeVar

from jaxmp._numerics.precision import meaning_of
from jaxmp._tools.inspect.branches import Choice

# `""` outside of a gradient: a program that differentiates nothing has no passes.
Direction = Literal["forward", "backward", "recomputed", ""]

_Key = TypeVar("_Key", bound=Hashable)


def grouped(items: Iterable[Any], key: Callable[[Any], _Key]) -> dict[_Key, list[Any]]:
    """Returns the items of each row of a table, by what they have in common."""
    groups: dict[_Key, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# Rows are frozen and hold plain values: tests compare reports, and `as_dict` writes them as JSON.


@dataclasses.dataclass(frozen=True)
class Product:
    """The matrix products and convolutions of the same dtypes and precision.

    Of branches that exclude each other, `flops` counts those with the most FLOPs. So the shares of
    two rows can add up to more than 1.

    Attributes:
      operands: the dtypes of the two operands.
      result: the dtype of the result. The compiler chooses the dtype of the sums inside.
      count: how many equations there are.
      runs: how often they run: a scan repeats its body.
      flops: the FLOPs of all runs, two for each multiply-add.
      share: the share of the FLOPs of the program, from 0 to 1.
      precision: what a product with a float32 operand asks for, as the program was traced, by the
        names of `Policy.precision`: `"default"` if nothing. `""` for all other products.
      rounded_to: the dtypes of the two operands before they were widened, if one was rounded to
        8 bits and then decoded, as in recipes that emulate them; `()` for all other products.
    """

    operands: tuple[str, str]
    result: str
    count: int
    runs: int
    flops: int
    share: float
    precision: str
    rounded_to: tuple[str, ...]

    @property
    def tpu(self) -> str:
        """How a TPU multiplies float32 here, from one pass of bfloat16, `"bf16 x 1"`, to six."""
        return meaning_of(self.precision).tpu if self.precision else ""

    @property
    def gpu(self) -> str:
        """How a GPU since Ampere multiplies float32 here: `"TF32"`, `"float32"`, ..."""
        return meaning_of(self.precision).gpu if self.precision else ""


@dataclasses.dataclass(frozen=True)
class ProductLine(Product):
    """The products of the same dtypes and precision in one line of the user's code.

    Attributes:
      line: `"file.py:12 (function)"`, the innermost line outside of JAX, Flax and optax.
      path: the module, if the name stack has it, as in linen: `"LM/Block_0/q"`.
      direction: `"forward"`, `"backward"`, `"recomputed"` (by a checkpoint), or `""` if nothing
        is differentiated.
      branch: the enclosing branch of a `cond` or a `switch`, by index, or several. Branch 0 of a
        `cond` runs if the predicate is False. `""` outside of all branches.
      not_float8: why a policy in 8 bits left the product out: `"heads"`, `"N = 40 is no
        multiple of 16"`, ... `""` for all other products.
    """

    line: str
    path: str
    direction: Direction
    branch: str
    not_float8: str


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """The products of one line that a policy in 8 bits left out, for one reason.

    Attributes:
      reason: the reason, as in `ProductLine.not_float8`.
      line: the line of the user's code.
      path: the module, if the name stack has it.
      count: how many equations there are, in all passes.
      runs: how often they run.
      flops: the FLOPs of all runs.
      share: the share of the FLOPs of the program.
      branch: as in `ProductLine`.
    """

    reason: str
    line: str
    path: str
    count: int
    runs: int
    flops: int
    share: float
    branch: str


@dataclasses.dataclass(frozen=True)
class Upcast:
    """The casts in one line from a float of fewer than 32 bits to a wider one.

    Attributes:
      line: the line of the user's code.
      path: the module, if the name stack has it.
      direction: as in `ProductLine`.
      kind: `"cast"`; or `"product"` for a product that widens an operand itself, or whose result
        is wider than its operands and feeds wide products.
      source: the dtype before.
      target: the dtype after.
      count: how many equations there are.
      runs: how often they run.
      bytes: the size of all their results.
      flops: the FLOPs of the products that the upcast makes wide: an operand has 32 bits or more
        and was computed from the result of the upcast, with no narrower value in between. Several
        upcasts may share a product.
      share: the share of the FLOPs of the program.
      branch: as in `ProductLine`.
    """

    line: str
    path: str
    direction: Direction
    kind: Literal["cast", "product"]
    source: str
    target: str
    count: int
    runs: int
    bytes: int
    flops: int
    share: float
    branch: str


@dataclasses.dataclass(frozen=True)
class Convert:
    """All casts from one dtype to another.

    Attributes:
      source: the dtype before.
      target: the dtype after.
      count: how many equations there are.
      runs: how often they run.
      bytes: the size of all their results.
      amax_bytes: the bytes that casts to 8 bits read before, for the largest magnitude of their
        operand; 0 for other casts.
    """

    source: str
    target: str
    count: int
    runs: int
    bytes: int
    amax_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Residual:
    """The arrays of one dtype that one line keeps in memory for the backward pass.

    Attributes:
      dtype: the dtype of the arrays.
      line: the line that computed the arrays.
      path: the module, if the name stack has it.
      count: how many arrays there are.
      bytes: their size.
      branch: as in `ProductLine`.
      kind: `"params"` for copies of params, cast or moved, such as the 16-bit weights of products;
        `"activations"` for everything else.
    """

    dtype: str
    line: str
    path: str
    count: int
    bytes: int
    branch: str
    kind: Literal["activations", "params"]


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """The equations of one line that checkpoints compute again for the backward pass.

    Attributes:
      line: the line of the user's code.
      path: the module, if the name stack has it.
      count: how many equations there are.
      runs: how often they run.
      operations: the operations of all runs. Products count their FLOPs, other operations one for
        each number of their result, reductions one for each number of their operand, and moves
        of numbers nothing.
      branch: as in `ProductLine`.
    """

    line: str
    path: str
    count: int
    runs: int
    operations: int
    branch: str


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of one dtype in an argument or a result, or in one field of it.

    Attributes:
      role: `"argument"` or `"result"`.
      name: the name of the argument or field, such as `"state.opt_state.inner"`.
      dtype: the dtype.
      leaves: the number of arrays.
      elements: the number of elements.
      bytes: the size.
    """

    role: Literal["argument", "result"]
    name: str
    dtype: str
    leaves: int
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that the program itself asks for, as in `shard_map`.

    Attributes:
      name: the name of the primitive: `"psum"`, `"all_gather"`, `"reduce_scatter"`, ...
      axes: the mesh axes.
      dtype: the dtype of its operands.
      line: the line of the user's code.
      path: the module, if the name stack has it.
      direction: as in `ProductLine`.
      count: how many equations there are.
      runs: how often they run.
      bytes: the size of the operands on each device, in all runs.
      branch: as in `ProductLine`.
    """

    name: str
    axes: tuple[str, ...]
    dtype: str
    line: str
    path: str
    direction: Direction
    count: int
    runs: int
    bytes: int
    branch: str

    @property
    def sums(self) -> bool:
        """Whether it adds values of several devices, so that its dtype decides the rounding."""
        return "psum" in self.name or "reduce_scatter" in self.name


@dataclasses.dataclass(frozen=True)
class Equations:
    """The equations of one primitive.

    Attributes:
      primitive: the name of the primitive.
      count: how many equations there are in the program.
      runs: how often they run.
    """

    primitive: str
    count: int
    runs: int


@dataclasses.dataclass(frozen=True)
class Unseen:
    """The equations of one line that may hide products.

    Attributes:
      name: the primitive: `"pallas_call"`, `"cholesky"`; or `"while"` for a loop of unknown
        length with products.
      dtypes: the dtypes of the operands; for a while loop, of the operands of its products.
      line: the line of the user's code.
      path: the module, if the name stack has it.
      direction: as in `ProductLine`.
      count: how many equations there are.
      branch: as in `ProductLine`.
    """

    name: str
    dtypes: tuple[str, ...]
    line: str
    path: str
    direction: Direction
    count: int
    branch: str


@dataclasses.dataclass(frozen=True)
class Work:
    """The product FLOPs of the same dtypes in one branch, or outside of all branches.

    Attributes:
      operands: the dtypes of the two operands.
      flops: the FLOPs of all runs, if the branch is taken.
      branches: the enclosing branches, from the outermost to the innermost.
    """

    operands: tuple[str, str]
    flops: int
    branches: tuple[Choice, ...]


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The operations of one module with the same dtypes, as a lock file has them.

    Attributes:
      path: the module; `"(program)"` for arguments and results.
      direction: as in `ProductLine`.
      kind: `"products"`, `"sums"`, `"collectives"`, `"arithmetic"`, `"arguments"` or `"results"`.
      operation: its name, and the dtypes of operands and results.
      count: how many equations there are.
      line: the line of the first.
    """

    path: str
    direction: Direction
    kind: str
    operation: str
    count: int
    line: str
