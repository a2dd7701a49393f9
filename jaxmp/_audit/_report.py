"""The report of an audit: records to look into, tables to print, and a check for tests."""

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

from jaxmp._audit._branches import Part, least_share, most
from jaxmp._audit._check import check_report, dtype_name
from jaxmp._audit._collective_report import Collectives
from jaxmp._audit._rows import (
    Arrays,
    Collective,
    Convert,
    Equations,
    Product,
    ProductLine,
    Recomputed,
    Residual,
    Unseen,
    Upcast,
    Work,
)


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What runs in which dtype, and where upcasts come from. It prints as tables.

    All branches of `cond`, `switch` and `platform_dependent` are in it. As only one of them runs,
    a number of FLOPs is that of the branches where it is largest.

    Attributes:
      products: matrix products and convolutions by dtype, the most FLOPs first.
      product_lines: the same by line of the user's code.
      upcasts: casts from floats of fewer than 32 bits to wider ones, by line; first those that
        make products wide, by the FLOPs of these, then the rest by size. Where several feed a
        product, the first in the program counts as the cause.
      converts: all casts by dtypes.
      residuals: what is kept for the backward pass, by dtype and line; None if the function is no
        loss.
      no_residuals: why there are none.
      recomputed: what checkpoints compute again, those of `jaxmp.recompute` too, by line; of a
        loss, in its gradient. Without barriers, outside of loops, a compiler may merge it with the
        first time.
      arrays: dtypes of arguments and results.
      collectives: those that the program itself asks for.
      equations: how many equations there are of each primitive.
      unseen: what this report does not show of this program.
      unseen_lines: by line, what may do something that a check is about and does not see.
      work: the product FLOPs by dtypes and branches.
      compiled: the collectives of the compiled program; None if the audit was not asked for them.
    """

    products: tuple[Product, ...]
    product_lines: tuple[ProductLine, ...]
    upcasts: tuple[Upcast, ...]
    converts: tuple[Convert, ...]
    residuals: tuple[Residual, ...] | None
    no_residuals: str
    recomputed: tuple[Recomputed, ...]
    arrays: tuple[Arrays, ...]
    collectives: tuple[Collective, ...]
    equations: tuple[Equations, ...]
    unseen: tuple[str, ...]
    unseen_lines: tuple[Unseen, ...]
    work: tuple[Work, ...]
    compiled: Collectives | None = None

    @property
    def flops(self) -> int:
        """The FLOPs of all products, of those branches that have most."""
        return most(Part(row.branches, 0, row.flops) for row in self.work)

    @property
    def residual_bytes(self) -> int:
        """The size of what is kept for the backward pass, activations and copies of params.

        Raises:
          ValueError: if the function is no loss.
        """
        return sum(row.bytes for row in self._rows())

    def _rows(self) -> tuple[Residual, ...]:
        if self.residuals is None:
            raise ValueError(f"the audit has no residuals: {self.no_residuals}")
        return self.residuals

    @property
    def kept(self) -> dict[str, int]:
        """The size of the activations that are kept for the backward pass, by dtype.

        Raises:
          ValueError: if the function is no loss.
        """
        found: dict[str, int] = {}
        for row in self._rows():
            if row.kind == "activations":
                found[row.dtype] = found.get(row.dtype, 0) + row.bytes
        return found

    @property
    def param_copy_bytes(self) -> int:
        """The part of `residual_bytes` that is copies of params, such as weights cast to 16 bits.

        It is the same for each batch size; what remains is activations.

        Raises:
          ValueError: if the function is no loss.
        """
        return sum(row.bytes for row in self._rows() if row.kind == "params")

    def share(self, *dtypes: Any) -> float:
        """The share of the product FLOPs whose operands both have one of these dtypes.

        Where it depends on which branches run, it is the smallest that any of them give.

        Args:
          *dtypes: names such as `"bfloat16"`, or dtypes.

        Returns:
          From 0 to 1; 0 if there are no products.

        Raises:
          ValueError: for an unknown dtype.
        """
        names = {dtype_name(dtype) for dtype in dtypes}
        return least_share(
            Part(row.branches, row.flops * names.issuperset(row.operands), row.flops)
            for row in self.work
        )

    def count(self, primitive: str, *, runs: bool = False) -> int:
        """How many equations of a primitive there are.

        Args:
          primitive: its name: `"convert_element_type"`, `"dot_general"`.
          runs: whether to count how often they run: the body of a scan as often as the scan is
            long, rather than once.

        Returns:
          The number.
        """
        found = [row for row in self.equations if row.primitive == primitive]
        return sum(row.runs if runs else row.count for row in found)

    def check(
        self,
        *,
        products: Any = None,
        share: float | None = None,
        upcasts: int | None = None,
        residual_bytes: int | None = None,
        kept: Mapping[Any, int] | None = None,
        reduced_in: Any = None,
        allow_unseen: Any = (),
    ) -> "AuditReport":
        """Raises if the program is not as it should be; for tests of your own.

        It vouches for what it sees: for each branch of a conditional, but not for what kernels,
        foreign calls, callbacks and linear algebra do. Where the program has such parts, a check of
        `products` or `upcasts` fails unless they are named as `allow_unseen`.

        Args:
          products: the dtype, or a tuple of dtypes, that both operands of products should have.
          share: for what share of the product FLOPs that must hold; 1.0 if not given.
          upcasts: how many of `report.upcasts` may make products wide at most, that is have
            `flops`.
          residual_bytes: how many bytes may be kept for the backward pass at most.
          kept: how many bytes of activations may be kept at most in each dtype, such as
            `{"bfloat16": 2**20, "float32": 4096}`; none in a dtype that it does not name.
          reduced_in: the dtype of every sum over devices that carries floats. Sums that the
            partitioner inserts are only seen if the audit was asked for the compiled program;
            then those of that program may be wider, too.
          allow_unseen: what may stay unseen: names from `report.unseen_lines`, such as
            `"pallas_call"`, or a tuple of them; True for all. They are `"while"` where `share` is
            below 1 and depends on how often a loop runs, and `"partitioner"` where `reduced_in` is
            checked without the compiled program and arrays are sharded.

        Returns:
          The report itself.

        Raises:
          AuditError: with all that is wrong, by line. It is an AssertionError.
          ValueError: for an argument that makes no sense, or `residual_bytes` and `kept` for a
            function that is no loss.
        """
        check_report(
            self,
            products=products,
            share=share,
            upcasts=upcasts,
            residual_bytes=residual_bytes,
            kept=kept,
            reduced_in=reduced_in,
            allow_unseen=allow_unseen,
        )
        return self

    def __rich__(self) -> Any:
        from jaxmp._audit._tables import tables

        return tables(self)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).rstrip()
