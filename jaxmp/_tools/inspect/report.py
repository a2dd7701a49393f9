"""The report of an audit: records to inspect, tables to print, and a check for tests."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxmp._tools.inspect.branches import BranchPart, least_share, most
from jaxmp._tools.inspect.checks import check_report, product_dtype
from jaxmp._tools.inspect.collective_report import Collectives
from jaxmp._tools.inspect.decoded import are_among
from jaxmp._tools.inspect.lock import write_lock_file
from jaxmp._tools.inspect.rows import (
    Arrays,
    Collective,
    Convert,
    Equations,
    LeftOut,
    Numerics,
    Product,
    ProductLine,
    Recomputed,
    Residual,
    Unseen,
    Upcast,
    Work,
)
from jaxmp._tools.inspect.table_report import TableReport


@dataclasses.dataclass(frozen=True)
class AuditReport(TableReport):
    """The report of an audit. It prints as tables.

    It includes all branches of `cond`, `switch` and `platform_dependent`. Only one of them runs,
    so FLOPs are those of the branches that have the most.

    Attributes:
      products: matrix products and convolutions by dtype, most FLOPs first. Those of float32 say
        what they are on a TPU and on a GPU.
      product_lines: the same by line of the user's code.
      left_out: products that a policy in 8 bits left out, by line, with the reason.
      upcasts: casts from floats of fewer than 32 bits to wider ones, by line. Upcasts that make
        products wide come first, by the FLOPs of these products; then the rest by size. If several
        upcasts feed a product, the first in the program counts as the cause.
      converts: all casts by dtypes.
      residuals: the arrays kept for the backward pass, by dtype and line; None if the function is
        not a loss.
      no_residuals: why there are no residuals.
      recomputed: the operations that checkpoints, including `jaxmp.recompute`, compute again, by
        line; for a loss, in its gradient. Outside of loops and without barriers, a compiler may
        merge them with the first computation.
      arrays: dtypes of arguments and results.
      collectives: the collectives that the program itself asks for.
      equations: the number of equations of each primitive.
      unseen: the parts of the program that this report does not show.
      unseen_lines: equations, by line, that a check cannot see into.
      work: the product FLOPs by dtypes and branches.
      numerics: the operations on floats by module, pass and dtypes, as `write_lock` writes them.
      compiled: the collectives and 8-bit products of the compiled program; None without
        `compiled=`.
    """

    products: tuple[Product, ...]
    product_lines: tuple[ProductLine, ...]
    left_out: tuple[LeftOut, ...]
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
    numerics: tuple[Numerics, ...]
    compiled: Collectives | None = None

    @property
    def flops(self) -> int:
        """The FLOPs of all products, for the branches that have the most."""
        return most(BranchPart(row.branches, 0, row.flops) for row in self.work)

    @property
    def residual_bytes(self) -> int:
        """The bytes kept for the backward pass: activations and copies of params.

        Raises:
          ValueError: if the function is not a loss.
        """
        return sum(row.bytes for row in self._rows())

    # Of a function that is not a loss 0 bytes would be a wrong answer, and pass a check.
    def _rows(self) -> tuple[Residual, ...]:
        if self.residuals is None:
            raise ValueError(f"the audit has no residuals: {self.no_residuals}")
        return self.residuals

    @property
    def kept(self) -> dict[str, int]:
        """The bytes of activations kept for the backward pass, by dtype.

        Raises:
          ValueError: if the function is not a loss.
        """
        sizes: dict[str, int] = {}
        for row in self._rows():
            if row.kind == "activations":
                sizes[row.dtype] = sizes.get(row.dtype, 0) + row.bytes
        return sizes

    @property
    def param_copy_bytes(self) -> int:
        """The part of `residual_bytes` that is copies of params, such as weights cast to 16 bits.

        It does not depend on the batch size. The rest is activations.

        Raises:
          ValueError: if the function is not a loss.
        """
        return sum(row.bytes for row in self._rows() if row.kind == "params")

    def share(self, *dtypes: Any) -> float:
        """Returns the share of the product FLOPs whose operands both have one of these dtypes.

        If the share depends on which branches run, returns the smallest.

        Args:
          *dtypes: names such as `"bfloat16"`, or dtypes; `"float8"` stands for each of its formats.

        Returns:
          A number from 0 to 1; 0 if there are no products.

        Raises:
          ValueError: for an unknown dtype.
        """
        names = {product_dtype(dtype) for dtype in dtypes}
        # `products` has no branches: which of its FLOPs exclude each other only `work` knows.
        return least_share(
            BranchPart(row.branches, row.flops * are_among(row.operands, names), row.flops)
            for row in self.work
        )

    def count(self, primitive: str, *, runs: bool = False) -> int:
        """Returns the number of equations of a primitive.

        Args:
          primitive: its name: `"convert_element_type"`, `"dot_general"`.
          runs: whether to count runs: an equation in a scan of length 12 then counts 12 times.

        Returns:
          The number.
        """
        rows = [row for row in self.equations if row.primitive == primitive]
        return sum(row.runs if runs else row.count for row in rows)

    def check(
        self,
        *,
        products: Any = None,
        share: float | None = None,
        upcasts: int | None = None,
        residual_bytes: int | None = None,
        kept: Mapping[Any, int] | None = None,
        precision: Any = None,
        allow_unseen: Any = (),
        lock: str | os.PathLike[str] | None = None,
    ) -> "AuditReport":
        """Raises if the program does not meet the given expectations. Use it in your tests.

        `jaxmp.assert_reduced_in` checks the dtypes of sums over devices.

        It checks each branch of a conditional, but cannot see into kernels, foreign calls,
        callbacks and linear algebra. If the program has such parts, a check of `products`,
        `precision` or `upcasts` fails unless `allow_unseen` names them.

        Args:
          products: the dtype, or a tuple of dtypes, that both operands of products should have.
            `"float8"` stands for each of its formats: give a share with it, as attention and heads
            have 16 bits. Failures then say of each product why it is not in 8 bits. If the report
            has the compiled program, none of its products may widen 8-bit operands either.
          share: the share of the product FLOPs for which this must hold; 1.0 by default.
          upcasts: the largest number of `report.upcasts` that may make products wide, which means
            that their `flops` are not 0.
          residual_bytes: the most bytes that may be kept for the backward pass.
          kept: the most bytes of activations that may be kept, by dtype, such as
            `{"bfloat16": 2**20, "float32": 4096}`; other dtypes may keep none.
          precision: the least that every product of float32 operands must ask for: `"highest"`,
            which is float32 on every device, or `"high"`. Other products do not matter.
          allow_unseen: a name from `report.unseen_lines`, such as `"pallas_call"`, or a tuple of
            names, that may stay unseen; True for all. `"fusion"` is for fusions of a compiled
            program that may or may not multiply 8 bits. `"while"` matters if `share` is below 1 and
            depends on how often a loop runs.
          lock: a file of `write_lock`. Fails if the program computes something else or in another
            dtype, and says what. It needs no `allow_unseen`: kernels are compared by their dtypes.

        Returns:
          The report itself.

        Raises:
          AuditError: with all failures, by line. It is an AssertionError.
          ValueError: for an invalid argument, or for `residual_bytes` or `kept` if the function is
            not a loss; if `lock` is no lock file, or unlike the report in having `compiled`.
          FileNotFoundError: if there is no file `lock`.
        """
        check_report(
            self,
            products=products,
            share=share,
            upcasts=upcasts,
            residual_bytes=residual_bytes,
            kept=kept,
            precision=precision,
            allow_unseen=allow_unseen,
            lock=lock,
        )
        return self

    def write_lock(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that says what is computed in which dtype, for `check(lock=path)`.

        A refactoring should not change the numerics. Keep the file beside your tests: the check
        fails when they change, and the diff of the file shows a reviewer what was meant to change.

        Args:
          path: the file to write, such as `"numerics.json"`.

        >>> import pathlib, tempfile, jax, jaxmp
        >>> def square(dtype):
        ...     return jaxmp.audit(lambda x: x @ x, jax.ShapeDtypeStruct((4, 4), dtype))
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "numerics.json"
        >>> square("bfloat16").write_lock(path)
        >>> _ = square("bfloat16").check(lock=path)
        >>> square("float32").check(lock=path)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jaxmp._tools.inspect.checks.AuditError: the audit failed.
        the numerics changed, compared with ...
        """
        write_lock_file(self, path)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as dictionaries, lists and numbers, as for JSON.

        Returns:
          All attributes by name, and `flops`.
        """
        # Properties are not fields, and this one is the first that a reader of the JSON needs.
        return {"flops": self.flops, **dataclasses.asdict(self)}

    def to_html(self, path: str | os.PathLike[str] | None = None, *, title: str = "Audit") -> str:
        """Returns the report as an HTML page, and writes it to a file if `path` is given.

        The page has the tables with all rows. It loads nothing, so it can be sent, kept with a run,
        and opened without a network.

        Args:
          path: the file to write, such as `"audit.html"`; None for none.
          title: the heading of the page, such as the name of the program.

        Returns:
          The page.

        >>> import jax
        >>> import jaxmp
        >>> report = jaxmp.audit(lambda x: x @ x, jax.ShapeDtypeStruct((4, 4), "bfloat16"))
        >>> page = report.to_html(title="a square")
        >>> "a square" in page
        True
        """
        from jaxmp._tools.inspect.sections import tables
        from jaxmp._tools.inspect.tables import as_html

        text = as_html(tables(self, with_all_rows=True), title)
        if path is not None:
            pathlib.Path(path).write_text(text, encoding="utf-8")
        return text

    def __rich__(self) -> Any:
        from jaxmp._tools.inspect.sections import tables

        return tables(self)
