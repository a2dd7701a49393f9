"""Compares a report with the expectations of a test."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxmp._numerics.dtypes import any_dtype_name, code_kind
from jaxmp._numerics.precision import meaning_of, parse_precision
from jaxmp._tools.inspect.decoded import FLOAT8, are_among
from jaxmp._tools.inspect.lock import lock_errors
from jaxmp._tools.inspect.offenders import (
    by_line,
    compiled_code_errors,
    operands_and_result,
    reason_text,
)

# Stands for allow_unseen=True; compared by identity, so that no primitive can have its name.
_ALL = frozenset({"all"})


class AuditError(AssertionError):
    """A program failed `AuditReport.check` or `assert_reduced_in`."""


def check_report(
    report: Any,
    *,
    products: Any,
    share: float | None,
    upcasts: int | None,
    residual_bytes: int | None,
    kept: Mapping[Any, int] | None,
    precision: Any,
    allow_unseen: Any,
    lock: Any,
) -> None:
    """Implements `AuditReport.check`."""
    expectations = (products, upcasts, residual_bytes, kept, precision, lock)
    # A check that passes without checking anything would hide a typo in a test.
    if all(expectation is None for expectation in expectations):
        hint = " share goes with products" if share is not None else ""
        raise ValueError(
            "nothing to check: give products, precision, upcasts, residual_bytes, kept or lock."
            + hint
        )
    problems: list[str] = []
    allowed: Any = (allow_unseen,) if isinstance(allow_unseen, str) else allow_unseen
    if isinstance(allow_unseen, bool):
        allowed = _ALL if allow_unseen else ()
    if not isinstance(allowed, Collection) or not all(isinstance(name, str) for name in allowed):
        raise ValueError(
            "allow_unseen is True, or names from report.unseen_lines such as 'pallas_call', got "
            f"{allow_unseen!r}"
        )
    if products is not None:
        problems += _product_errors(report, products, share, allowed)
    elif share is not None:
        raise ValueError("share is about products: give products='bfloat16' too")
    if precision is not None:
        problems += _precision_errors(report, precision)
    if upcasts is not None:
        problems += _upcast_errors(report, _checked_limit(upcasts, "upcasts"))
    if residual_bytes is not None:
        problems += _residual_errors(report, _checked_limit(residual_bytes, "residual_bytes"))
    if kept is not None:
        problems += _activation_errors(report, kept)
    if lock is not None:
        problems += lock_errors(report, lock)
    # Residuals of kernels are in the program, what kernels multiply is not.
    if any(expectation is not None for expectation in (products, upcasts, precision)):
        problems += _unseen_errors(report, allowed)
    if problems:
        raise AuditError("the audit failed.\n" + "\n".join(problems))


def product_dtype(dtype: Any) -> str:
    """Returns the name of a dtype of products; `"float8"` stands for each of its formats.

    >>> product_dtype("bf16"), product_dtype("float8")
    ('bfloat16', 'float8')
    """
    return FLOAT8 if isinstance(dtype, str) and dtype == FLOAT8 else any_dtype_name(dtype)


def _checked_limit(limit: Any, name: str) -> int:
    if isinstance(limit, bool) or not isinstance(limit, (int, np.integer)) or limit < 0:
        raise ValueError(f"{name} is the largest number allowed, an int from 0 up, got {limit!r}")
    return int(limit)


def _product_errors(
    report: Any, dtypes: Any, share: float | None, allowed: Collection[str]
) -> list[str]:
    dtypes = dtypes if isinstance(dtypes, (tuple, list, set, frozenset)) else (dtypes,)
    if not dtypes:
        raise ValueError("products must name at least one dtype, such as 'bfloat16'")
    names, least = [product_dtype(dtype) for dtype in dtypes], 1.0 if share is None else share
    if isinstance(least, bool) or not isinstance(least, (int, float)) or not 0 < least <= 1:
        raise ValueError(f"share must be a number above 0 and up to 1, got {share!r}")
    problems = _share_errors(report, names, least)
    # The traced program is half of the answer: loops may run any number of times, and compilers
    # may widen codes.
    problems += _loop_errors(report, names, least, allowed)
    if any(map(code_kind, names)):
        fusions = allowed is _ALL or "fusion" in allowed
        problems += compiled_code_errors(report, fusions)
    return problems


def _share_errors(report: Any, names: list[str], least: float) -> list[str]:
    choices = " or ".join(names)
    if not report.flops:
        return [f"products: the program has none, so none in {choices}."]
    share = report.share(*names)
    others = [row for row in report.product_lines if not are_among(row.operands, names)]
    # A share of 1 means every product: one in a huge program would be rounded away. Below 1, 1e-9
    # allows for the rounding of the quotient.
    if not others or (share >= least - 1e-9 and least < 1):
        return []
    offenders = [
        (
            row,
            f"{100 * row.share:.1f} %",
            operands_and_result(row) + reason_text(row, names),
        )
        for row in others
    ]
    where = " where these branches run" if any(row.branch for row in others) else ""
    # The share is too small, so it is never printed as 100 %.
    return by_line(
        f"products: {min(100 * share, 99.9):.1f} % of their FLOPs have operands in {choices}"
        f"{where}, wanted at least {100 * least:.1f} %. The others:",
        offenders,
    )


def _precision_errors(report: Any, precision: Any) -> list[str]:
    """Reports float32 products that are less than float32, or than HIGH, on some device."""
    least = parse_precision(precision)
    if least not in ("high", "highest"):
        raise ValueError(
            f"precision is the least that float32 products may ask for, 'high' or 'highest', got "
            f"{precision!r}"
        )
    products = [row for row in report.product_lines if row.precision]
    # As for `products`: a check of nothing must not pass.
    if not products:
        return [f"precision: the program has no float32 product, so none that asks for {least}."]
    rank = meaning_of(least).rank
    offenders = [
        (
            row,
            f"{100 * row.share:.1f} %",
            " x ".join(row.operands) + f", {row.precision}: {row.tpu} on a TPU, {row.gpu} on a GPU",
        )
        for row in products
        if meaning_of(row.precision).rank < rank
    ]
    return by_line(
        f"precision: float32 products should ask for {least}, these ask for less. A float32 policy "
        f"or rule, jaxmp.full_precision around them, or precision={least!r} in them does it:",
        offenders,
    )


def _upcast_errors(report: Any, limit: int) -> list[str]:
    # Other upcasts are harmless: a loss and a norm are summed in float32 on purpose.
    upcasts = [row for row in report.upcasts if row.flops]
    if len(upcasts) <= limit:
        return []
    offenders = [
        (row, f"{100 * row.share:.1f} % of the FLOPs", f"{row.source} -> {row.target}")
        for row in upcasts
    ]
    return by_line(f"upcasts: {len(upcasts)} make products wide, allowed are {limit}:", offenders)


def _residual_errors(report: Any, limit: int) -> list[str]:
    total = report.residual_bytes
    if total <= limit:
        return []
    offenders = [
        (row, f"{row.bytes:,} bytes", row.dtype + (" params" if row.kind == "params" else ""))
        for row in report.residuals
    ]
    copies = report.param_copy_bytes
    which = f", {copies:,} of them copies of params" if copies else ""
    return by_line(
        f"residual_bytes: {total:,} are kept for the backward pass{which}, allowed are {limit:,}:",
        offenders,
    )


def _activation_errors(report: Any, limits: Any) -> list[str]:
    if not isinstance(limits, Mapping):
        raise ValueError(
            "kept is a number of bytes for each dtype, such as {'bfloat16': 2**20}, got "
            f"{limits!r}"
        )
    limits = {
        any_dtype_name(dtype): _checked_limit(limit, f"kept[{any_dtype_name(dtype)!r}]")
        for dtype, limit in limits.items()
    }
    problems: list[str] = []
    for dtype, size in report.kept.items():
        if size > (limit := limits.get(dtype, 0)):
            rows = [
                (row, f"{row.bytes:,} bytes", row.dtype)
                for row in report.residuals
                if (row.dtype, row.kind) == (dtype, "activations")
            ]
            problems += by_line(
                f"kept: {size:,} bytes of {dtype} are kept for the backward pass, allowed are "
                f"{limit:,}:",
                rows,
            )
    return problems


def _not_allowed(report: Any, allowed: Collection[str]) -> list[Any]:
    rows = report.unseen_lines
    return [row for row in rows if allowed is not _ALL and row.name not in allowed]


def _unseen_errors(report: Any, allowed: Collection[str]) -> list[str]:
    """Reports kernels and similar equations, which may multiply anything in any dtype."""
    # A check that passes says that every product has the dtype, and here it does not know.
    # The products of loops are seen; only how often they run is not. See `_loop_errors`.
    rows = [row for row in _not_allowed(report, allowed) if row.name != "while"]
    names = tuple(dict.fromkeys(row.name for row in rows))
    return by_line(
        "unseen: what these multiply is not counted, and its dtype is not known. If that is fine, "
        f"name them: allow_unseen={names}.",
        ((row, str(row.count), f"{row.name} of {', '.join(row.dtypes)}") for row in rows),
    )


def _loop_errors(
    report: Any, names: list[str], least: float, allowed: Collection[str]
) -> list[str]:
    """Reports loops of unknown length that the share depends on."""
    # If the share must be 1, it does not matter how often loops run.
    loops = [
        (row, str(row.count), f"while of {', '.join(row.dtypes)}")
        for row in _not_allowed(report, allowed)
        if least < 1 and row.name == "while" and not are_among(row.dtypes, names)
    ]
    return by_line(
        "unseen: how often these loops run is not known, so the share is not known either. If it "
        "is fine to count each loop once: allow_unseen='while'.",
        loops,
    )
