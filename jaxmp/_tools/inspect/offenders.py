"""Writes the lines of a failed check: the fault, its place, and why it is not in 8 bits."""

from collections.abc import Iterable
from typing import Any

from jaxmp._numerics.dtypes import code_kind

# A failed test is read in a terminal; the report has all rows.
_MOST_LINES = 10


def by_line(problem: str, offenders: Iterable[tuple[Any, str, str]]) -> list[str]:
    """Formats a problem and its offenders as error lines; nothing if there are none.

    Each offender has its row, the amount and a description.
    """
    rows = list(offenders)
    lines = []
    for row, amount, description in rows[:_MOST_LINES]:
        # Rows of compiled programs have no branches.
        places = [row.line, *(getattr(row, name, "") for name in ("path", "direction", "branch"))]
        lines.append(f"  {amount}  {description}  at {', '.join(filter(None, places))}")
    more = len(rows) - len(lines)
    return [problem, *lines, *[f"  and {more} more"] * bool(more)] if rows else []


def reason_text(row: Any, names: list[str]) -> str:
    """Returns why a product is not in 8 bits, in parentheses, if a check is about 8 bits."""
    if not any(code_kind(name) for name in names):
        return ""
    reason = row.not_float8 or (
        "no operand is a param under a policy in 8 bits, or the program itself has both in 16 bits"
    )
    if row.rounded_to:
        reason = f"rounded to {' x '.join(row.rounded_to)}, and widened before the product"
    return f" ({reason})"


def compiled_code_errors(report: Any, fusions: bool) -> list[str]:
    """Returns error lines about products of the compiled program that are not in 8 bits.

    With `fusions`, fusions pass, whose kernels may widen their operands.
    """
    if report.compiled is None:
        return []
    rows = report.compiled.float8_products
    # Without 8-bit operands there is nothing to widen: the compiler dropped the rounding as well.
    if not rows:
        return [f"products: the {report.compiled.origin} has none with 8-bit operands."]
    widened = [row for row in rows if row.ran.startswith("widened")]
    hidden = [row for row in rows if row.ran == "not known" and not fusions]
    return by_line(
        "products: the compiler widened 8-bit operands of these:",
        ((row, row.ran, operands_and_result(row)) for row in widened),
    ) + by_line(
        "unseen: whether the kernels of these fusions multiply 8 bits is not known. If that is "
        "fine: allow_unseen='fusion'. On an NVIDIA GPU, compile with "
        "xla_gpu_enable_triton_gemm=False to have calls of cuBLAS, which say it.",
        ((row, str(row.count), operands_and_result(row)) for row in hidden),
    )


def operands_and_result(row: Any) -> str:
    return f"{' x '.join(row.operands)} -> {row.result}"
