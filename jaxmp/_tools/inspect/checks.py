"""Compares a report with the expectations of a test."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxmp._numerics.dtypes import parse_dtype
from jaxmp._numerics.precision import meaning_of, parse_precision
from jaxmp._tools.inspect.decoded import FLOAT8, are_among
from jaxmp._tools.inspect.offenders import (
    by_line,
    compiled_float8_errors,
    operands_and_result,
    reason_text,
)


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
) -> None:
    """Implements `AuditReport.check`."""
    given = (products, upcasts, residual_bytes, kept, precision)
    if all(each is None for each in given):
        hint = " share goes with products" if share is not None else ""
        raise ValueError(
            "nothing to check: give products, precision, upcasts, residual_bytes or kept." + hint
        )
    problems: list[str] = []
    allowed = _checked_allowed(allow_unseen)
    if products is not None:
        names, least = _dtype_names(products), _checked_share(share)
        problems += _product_errors(report, names, least)
        problems += _loops(report, names, least, allowed)
        if any(name.startswith(FLOAT8) for name in names):
            fusions = allowed is _ALL or "fusion" in allowed
            problems += compiled_float8_errors(report, fusions)
    elif share is not None:
        raise ValueError("share is about products: give products='bfloat16' too")
    if precision is not None:
        problems += _precision_errors(report, _checked_precision(precision))
    if upcasts is not None:
        problems += _upcast_errors(report, _checked_limit(upcasts, "upcasts"))
    if residual_bytes is not None:
        problems += _residual_errors(report, _checked_limit(residual_bytes, "residual_bytes"))
    if kept is not None:
        problems += _kept(report, _checked_kept(kept))
    if any(each is not None for each in (products, upcasts, precision)):
        problems += _unseen_errors(report, allowed)
    if problems:
        raise AuditError("the audit failed.\n" + "\n".join(problems))


def any_dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype, floating or not, given by name or as a dtype.

    >>> any_dtype_name("bf16"), any_dtype_name("int8"), any_dtype_name(np.float32)
    ('bfloat16', 'int8', 'float32')
    """
    try:
        return str(parse_dtype(dtype).name)
    except ValueError:
        try:
            other = np.dtype(dtype)
        except TypeError:
            other = None
        if other is None or other.kind not in "biuc":
            raise
        return other.name


def product_dtype(dtype: Any) -> str:
    """Returns the name of a dtype of products; `"float8"` stands for each of its formats.

    >>> product_dtype("bf16"), product_dtype("float8")
    ('bfloat16', 'float8')
    """
    return FLOAT8 if isinstance(dtype, str) and dtype == FLOAT8 else any_dtype_name(dtype)


def _dtype_names(dtypes: Any) -> list[str]:
    given = dtypes if isinstance(dtypes, (tuple, list, set, frozenset)) else (dtypes,)
    if not given:
        raise ValueError("products must name at least one dtype, such as 'bfloat16'")
    return [product_dtype(dtype) for dtype in given]


def _checked_share(share: float | None) -> float:
    if share is None:
        return 1.0
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"share must be a number above 0 and up to 1, got {share!r}")
    return share


def _checked_limit(limit: Any, name: str) -> int:
    if isinstance(limit, bool) or not isinstance(limit, (int, np.integer)) or limit < 0:
        raise ValueError(f"{name} is the largest number allowed, an int from 0 up, got {limit!r}")
    return int(limit)


def _product_errors(report: Any, names: list[str], share: float) -> list[str]:
    allowed = " or ".join(names)
    if not report.flops:
        return [f"products: the program has none, so none in {allowed}."]
    found = report.share(*names)
    others = [row for row in report.product_lines if not are_among(row.operands, names)]
    # 1e-9 allows for the rounding of the quotient.
    if not others or (found >= share - 1e-9 and share < 1):
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
    return [
        f"products: {_percent(found)} of their FLOPs have operands in {allowed}{where}, wanted "
        f"at least {100 * share:.1f} %. The others:",
        *by_line(offenders),
    ]


def _checked_precision(precision: Any) -> str:
    name = parse_precision(precision)
    if name not in ("high", "highest"):
        raise ValueError(
            f"precision is the least that float32 products may ask for, 'high' or 'highest', got "
            f"{precision!r}"
        )
    return name


def _precision_errors(report: Any, least: str) -> list[str]:
    """Reports float32 products that are less than float32, or than HIGH, on some device."""
    wide = [row for row in report.product_lines if row.precision]
    if not wide:
        return [f"precision: the program has no float32 product, so none that asks for {least}."]
    rank = meaning_of(least).rank
    less = [row for row in wide if meaning_of(row.precision).rank < rank]
    if not less:
        return []
    offenders = [
        (
            row,
            f"{100 * row.share:.1f} %",
            " x ".join(row.operands) + f", {row.precision}: {row.tpu} on a TPU, {row.gpu} on a GPU",
        )
        for row in less
    ]
    return [
        f"precision: float32 products should ask for {least}, these ask for less. A float32 policy "
        f"or rule, jaxmp.full_precision around them, or precision={least!r} in them does it:",
        *by_line(offenders),
    ]


def _percent(share: float) -> str:
    """Formats a share that is too small; never rounds it up to 100 %."""
    return f"{min(100 * share, 99.9):.1f} %"


def _upcast_errors(report: Any, limit: int) -> list[str]:
    found = [row for row in report.upcasts if row.flops]
    if len(found) <= limit:
        return []
    offenders = [
        (row, f"{100 * row.share:.1f} % of the FLOPs", f"{row.source} -> {row.target}")
        for row in found
    ]
    return [
        f"upcasts: {len(found)} make products wide, allowed are {limit}:",
        *by_line(offenders),
    ]


def _residual_errors(report: Any, limit: int) -> list[str]:
    found = report.residual_bytes
    if found <= limit:
        return []
    offenders = [
        (row, f"{row.bytes:,} bytes", row.dtype + (" params" if row.kind == "params" else ""))
        for row in report.residuals
    ]
    copied = report.param_copy_bytes
    which = f", {copied:,} of them copies of params" if copied else ""
    return [
        f"residual_bytes: {found:,} are kept for the backward pass{which}, allowed are {limit:,}:",
        *by_line(offenders),
    ]


def _checked_kept(kept: Any) -> dict[str, int]:
    if not isinstance(kept, Mapping):
        raise ValueError(
            f"kept is a number of bytes for each dtype, such as {{'bfloat16': 2**20}}, got {kept!r}"
        )
    return {
        any_dtype_name(dtype): _checked_limit(limit, f"kept[{any_dtype_name(dtype)!r}]")
        for dtype, limit in kept.items()
    }


def _kept(report: Any, limits: dict[str, int]) -> list[str]:
    problems: list[str] = []
    for dtype, found in report.kept.items():
        if found > (limit := limits.get(dtype, 0)):
            rows = [
                (row, f"{row.bytes:,} bytes", row.dtype)
                for row in report.residuals
                if (row.dtype, row.kind) == (dtype, "activations")
            ]
            problems += [
                f"kept: {found:,} bytes of {dtype} are kept for the backward pass, allowed are "
                f"{limit:,}:",
                *by_line(rows),
            ]
    return problems


_ALL = frozenset({"all"})


def _checked_allowed(allowed: Any) -> Collection[str]:
    """Returns the names that `allow_unseen` allows."""
    if isinstance(allowed, bool):
        return _ALL if allowed else ()
    names = (allowed,) if isinstance(allowed, str) else allowed
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "allow_unseen is True, or names from report.unseen_lines such as 'pallas_call', got "
            f"{allowed!r}"
        )
    return names


def _not_allowed(report: Any, allowed: Collection[str]) -> list[Any]:
    found = report.unseen_lines
    return [row for row in found if allowed is not _ALL and row.name not in allowed]


def _unseen_errors(report: Any, allowed: Collection[str]) -> list[str]:
    """Reports kernels and similar equations, which may multiply anything in any dtype."""
    found = [row for row in _not_allowed(report, allowed) if row.name != "while"]
    if not found:
        return []
    names = tuple(dict.fromkeys(row.name for row in found))
    return [
        "unseen: what these multiply is not counted, and its dtype is not known. If that is fine, "
        f"name them: allow_unseen={names}.",
        *by_line((row, str(row.count), f"{row.name} of {', '.join(row.dtypes)}") for row in found),
    ]


def _loops(report: Any, names: list[str], share: float, allowed: Collection[str]) -> list[str]:
    """Reports loops of unknown length that the share depends on.

    If the share must be 1, it does not matter how often loops run.
    """
    found = [
        row
        for row in _not_allowed(report, allowed)
        if row.name == "while" and not are_among(row.dtypes, names)
    ]
    if share == 1 or not found:
        return []
    return [
        "unseen: how often these loops run is not known, so the share is not known either. If it "
        "is fine to count each loop once: allow_unseen='while'.",
        *by_line((row, str(row.count), f"while of {', '.join(row.dtypes)}") for row in found),
    ]
