"""Draws a report as tables for a terminal."""

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table

_SHOWN = 12
_PLACE = "line, module, pass"
_DEVICES = "on TPU / GPU"


def as_text(renderable: Any) -> str:
    """Returns what rich would draw, as plain text."""
    text = io.StringIO()
    Console(file=text, width=120, color_system=None).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).rstrip()


def tables(report: Any) -> Group:
    """Returns all tables of a report, except empty ones.

    Args:
      report: an `AuditReport`.

    Returns:
      A renderable for rich.
    """
    parts = [
        _products_table(report),
        _wide_products(report),
        _left_out(report),
        _upcasts_table(report),
        _converts(report),
        _residuals_table(report),
        _recomputed_table(report),
        _collectives(report),
        *(_of_compiled(report.compiled) if report.compiled is not None else ()),
        _arrays_table(report),
    ]
    drawn: list[Any] = [part for part in parts if part is not None]
    if report.residuals is None:
        drawn.append(f"No residuals of a backward pass: {report.no_residuals}.")
    compiled = report.compiled.unseen if report.compiled is not None else ()
    return Group(*drawn, "Not seen:", _bullets((*report.unseen, *compiled)))


def compiled_tables(report: Any) -> Group:
    """Returns the tables of the collectives of a compiled program.

    Args:
      report: `Collectives`.

    Returns:
      A renderable for rich.
    """
    drawn = [part for part in _of_compiled(report) if part is not None]
    if not report.rows:
        drawn.append(f"No collectives in the {report.origin}.")
    if report.rows and report.no_mesh:
        drawn.append(f"No mesh axes: {report.no_mesh}.")
    return Group(*drawn, "Not seen:", _bullets(report.unseen))


def _of_compiled(report: Any) -> tuple[Any, ...]:
    """Returns tables: float8 products, all collectives by kind, source lines of narrow sums."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for row in report.rows:
        axes = ", ".join(row.axes) if row.axes is not None else ""
        key = (_kind(row), row.reducer, row.dtype, axes, str(row.group_size))
        groups.setdefault(key, []).append(row)
    rows = [
        (
            *key,
            bytes_text(sum(row.bytes for row in group)),
            str(len(group)),
            str(sum(row.runs for row in group)),
        )
        for key, group in sorted(groups.items(), key=lambda item: -sum(r.bytes for r in item[1]))
    ]
    columns = ["collective", "reducer", "dtype", "axes", ">devices", ">bytes", ">count", ">runs"]
    title = f"Collectives of the {report.origin}, whole arrays"
    narrow = [row for row in report.rows if row.sums and not _is_wide(row.dtype)]
    lines = [
        (
            _line_and_module(row),
            _kind(row),
            row.dtype,
            ", ".join(row.axes or ()),
            bytes_text(row.bytes),
            str(row.runs),
        )
        for row in narrow
    ]
    places = [_PLACE, "collective", "dtype", "axes", ">bytes", ">runs"]
    return (
        _compiled_products(report),
        _table(title, columns, rows, shown=40),
        _table("Sums over devices in fewer than 32 bits", places, lines),
    )


def _compiled_products(report: Any) -> Any:
    rows = [
        (
            _line_and_module(row),
            " x ".join(row.operands),
            row.result,
            row.ran,
            str(row.count),
            str(row.runs),
        )
        for row in report.float8_products
    ]
    columns = [_PLACE, "operands", "result", "runs in", ">count", ">runs"]
    return _table(f"Products of float8 operands of the {report.origin}", columns, rows)


def _kind(row: Any) -> str:
    return f"{row.kind} between slices" if row.between_slices else row.kind


def _products_table(report: Any) -> Any:
    rows = [
        (
            " x ".join(row.operands),
            " x ".join(row.rounded_to),
            row.result,
            _on_devices(row),
            flops_text(row.flops),
            f"{100 * row.share:.1f} %",
            str(row.count),
            str(row.runs),
        )
        for row in report.products
    ]
    title = f"Products: {flops_text(report.flops)}FLOP"
    columns = ["operands", "rounded to", "result", _DEVICES, ">FLOP", ">share", ">count", ">runs"]
    return _table(title, columns, rows)


def _wide_products(report: Any) -> Any:
    """Returns the table of wide products by line; None if all products are wide."""
    wide = [row for row in report.product_lines if any(map(_is_wide, row.operands))]
    if len(wide) == len(report.product_lines):
        return None
    rows = [
        (
            _line_and_module(row),
            " x ".join(row.operands),
            row.result,
            _on_devices(row),
            f"{100 * row.share:.1f} %",
            str(row.count),
            str(row.runs),
        )
        for row in wide
    ]
    columns = [_PLACE, "operands", "result", _DEVICES, ">share", ">count", ">runs"]
    return _table("Products with an operand of 32 bits or more", columns, rows)


def _left_out(report: Any) -> Any:
    rows = [
        (
            _line_and_module(row),
            row.reason,
            flops_text(row.flops),
            f"{100 * row.share:.1f} %",
            str(row.count),
            str(row.runs),
        )
        for row in report.left_out
    ]
    columns = ["line, module", "reason", ">FLOP", ">share", ">count", ">runs"]
    return _table("Left out of float8", columns, rows)


def _on_devices(row: Any) -> str:
    """Formats what a float32 product is on a TPU and on a GPU; empty for other products."""
    return f"{row.tpu} / {row.gpu}" if row.precision else ""


def _is_wide(dtype: str) -> bool:
    return dtype.startswith(("float32", "float64", "complex"))


def _upcasts_table(report: Any) -> Any:
    rows = [
        (
            _line_and_module(row),
            f"{row.source} -> {row.target}" + ("\nin a product" if row.kind == "product" else ""),
            f"{100 * row.share:.1f} %" if row.flops else "",
            bytes_text(row.bytes),
            str(row.count),
            str(row.runs),
        )
        for row in report.upcasts
    ]
    columns = [_PLACE, "cast", ">makes wide", ">bytes", ">count", ">runs"]
    return _table("Upcasts, first those that make products wide", columns, rows)


def _converts(report: Any) -> Any:
    rows = [
        (
            row.source,
            row.target,
            bytes_text(row.bytes),
            bytes_text(row.amax_bytes) if row.amax_bytes else "",
            str(row.count),
            str(row.runs),
        )
        for row in report.converts
    ]
    columns = ["from", "to", ">bytes", ">read before, for amax", ">count", ">runs"]
    return _table("Casts", columns, rows)


def _residuals_table(report: Any) -> Any:
    if report.residuals is None:
        return None
    rows = [
        (
            _line_and_module(row),
            row.dtype,
            "params" if row.kind == "params" else "",
            bytes_text(row.bytes),
            str(row.count),
        )
        for row in report.residuals
    ]
    title = f"Kept for the backward pass: {bytes_text(report.residual_bytes)}"
    if copied := report.param_copy_bytes:
        title += f", of which {bytes_text(copied)} copies of params"
    return _table(title, [_PLACE, "dtype", "copies of", ">bytes", ">arrays"], rows)


def _recomputed_table(report: Any) -> Any:
    rows = [
        (_line_and_module(row), flops_text(row.operations), str(row.count), str(row.runs))
        for row in report.recomputed
    ]
    total = flops_text(sum(row.operations for row in report.recomputed)).strip()
    title = f"Computed again for the backward pass: {total} operations"
    return _table(title, [_PLACE, ">operations", ">count", ">runs"], rows)


def _collectives(report: Any) -> Any:
    rows = [
        (
            row.name,
            ", ".join(row.axes),
            row.dtype,
            _line_and_module(row),
            bytes_text(row.bytes),
            str(row.runs),
        )
        for row in report.collectives
    ]
    columns = ["collective", "axes", "dtype", _PLACE, ">bytes", ">runs"]
    return _table("Collectives in the program, per device", columns, rows)


def _arrays_table(report: Any) -> Any:
    rows = [
        (
            row.role,
            row.name,
            row.dtype,
            f"{row.leaves:,}",
            f"{row.elements:,}",
            bytes_text(row.bytes),
        )
        for row in report.arrays
    ]
    columns = ["", "name", "dtype", ">arrays", ">numbers", ">bytes"]
    return _table("Arguments and results", columns, rows, shown=40)


def _line_and_module(row: Any) -> str:
    """Formats the line, and below it the module, the pass and the branch, if known."""
    texts = (getattr(row, name, "") for name in ("path", "direction", "branch"))
    below = ", ".join(text for text in texts if text)
    return f"{row.line}\n{below}" if below else row.line


def _table(title: str, columns: list[str], rows: Sequence[Any], shown: int = _SHOWN) -> Any:
    """Returns a table without empty columns; None without rows. `>` marks columns of numbers."""
    if not rows:
        return None
    more = len(rows) - shown
    caption = f"and {more} more rows" if more > 0 else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    if columns[-2:] == [">count", ">runs"] and all(row[-2] == row[-1] for row in rows):
        kept.remove(len(columns) - 1)
    for i in kept:
        is_number = columns[i].startswith(">")
        table.add_column(
            columns[i].lstrip(">"),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number,
        )
    for row in rows[:shown]:
        table.add_row(*[row[i] for i in kept])
    return table


def _bullets(sentences: Sequence[str]) -> Any:
    grid = Table.grid(padding=(0, 1))
    for sentence in sentences:
        grid.add_row(" -", sentence)
    return grid


def flops_text(flops: int) -> str:
    """Formats a number of operations with three digits.

    >>> flops_text(1_234_567_890), flops_text(42)
    ('1.23 G', '42 ')
    """
    return _scaled(flops, 1000, ("", "k", "M", "G", "T", "P", "E"))


def bytes_text(size: int) -> str:
    """Formats a size in memory.

    >>> bytes_text(1536), bytes_text(100)
    ('1.50 KiB', '100 B')
    """
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(number: int, base: int, units: Sequence[str]) -> str:
    power, scaled = 0, float(number)
    while scaled >= base and power + 1 < len(units):
        scaled /= base
        power += 1
    if power == 0:
        return f"{number} {units[0]}"
    digits = max(0, 2 - (scaled >= 10) - (scaled >= 100))
    return f"{scaled:.{digits}f} {units[power]}"
