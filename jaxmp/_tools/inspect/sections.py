"""Says what the tables of a report hold, as texts."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Group

from jaxmp._tools.inspect.rows import grouped
from jaxmp._tools.inspect.tables import Section, bullets, bytes_text, drawn, flops_text

# A column: its title, in which `>` marks numbers, and the text of its cell in a row.
_Column = tuple[str, Callable[[Any], str]]


def place_text(row: Any) -> str:
    """Formats the line, and below it the module, the pass and the branch, if known."""
    texts = (getattr(row, name, "") for name in ("path", "direction", "branch"))
    below = ", ".join(text for text in texts if text)
    return f"{row.line}\n{below}" if below else row.line


def _kind(row: Any) -> str:
    return f"{row.kind} between slices" if row.between_slices else row.kind


def _is_wide(dtype: str) -> bool:
    return dtype.startswith(("float32", "float64", "complex"))


_PLACE: _Column = ("line, module, pass", place_text)
_OPERANDS: _Column = ("operands", lambda row: " x ".join(row.operands))
_RESULT: _Column = ("result", lambda row: row.result)
# Only products of float32 differ between devices, and only they have a precision.
_DEVICES: _Column = ("on TPU / GPU", lambda row: f"{row.tpu} / {row.gpu}" if row.precision else "")
_DTYPE: _Column = ("dtype", lambda row: row.dtype)
_AXES: _Column = ("axes", lambda row: ", ".join(row.axes or ()))
_FLOP: _Column = (">FLOP", lambda row: flops_text(row.flops))
_SHARE: _Column = (">share", lambda row: f"{100 * row.share:.1f} %")
_BYTES: _Column = (">bytes", lambda row: bytes_text(row.bytes))
_RUNS: _Column = (">runs", lambda row: str(row.runs))
_COUNTS: tuple[_Column, ...] = ((">count", lambda row: str(row.count)), _RUNS)


def _table(title: str, rows: Iterable[Any], *columns: _Column, most: int = 12) -> Section:
    cells = [tuple(cell(row) for _, cell in columns) for row in rows]
    return Section(title, [name for name, _ in columns], cells, most)


def _sections(report: Any) -> Iterator[Section]:
    """Yields the tables of an `AuditReport`; some have no rows."""
    title = f"Products: {flops_text(report.flops)}FLOP"
    rounded: _Column = ("rounded to", lambda row: " x ".join(row.rounded_to))
    columns = (_OPERANDS, rounded, _RESULT, _DEVICES, _FLOP, _SHARE, *_COUNTS)
    yield _table(title, report.products, *columns)
    wide = [row for row in report.product_lines if any(map(_is_wide, row.operands))]
    # Of a program in float32 it would list every product: nothing there was meant to be narrow.
    if len(wide) < len(report.product_lines):
        title = "Products with an operand of 32 bits or more"
        yield _table(title, wide, _PLACE, _OPERANDS, _RESULT, _DEVICES, _SHARE, *_COUNTS)
    columns = (("line, module", place_text), ("reason", lambda row: row.reason), _FLOP, _SHARE)
    yield _table("Left out of 8 bits", report.left_out, *columns, *_COUNTS)
    casts: _Column = (
        "cast",
        lambda row: (
            f"{row.source} -> {row.target}" + ("\nin a product" if row.kind == "product" else "")
        ),
    )
    share: _Column = (">makes wide", lambda row: _SHARE[1](row) if row.flops else "")
    title = "Upcasts, first those that make products wide"
    yield _table(title, report.upcasts, _PLACE, casts, share, _BYTES, *_COUNTS)
    amax: _Column = (
        ">read before, for amax",
        lambda row: bytes_text(row.amax_bytes) if row.amax_bytes else "",
    )
    columns = (("from", lambda row: row.source), ("to", lambda row: row.target), _BYTES, amax)
    yield _table("Casts", report.converts, *columns, *_COUNTS)
    if report.residuals is not None:
        title = f"Kept for the backward pass: {bytes_text(report.residual_bytes)}"
        if copies := report.param_copy_bytes:
            title += f", of which {bytes_text(copies)} copies of params"
        params: _Column = ("copies of", lambda row: "params" if row.kind == "params" else "")
        columns = (_PLACE, _DTYPE, params, _BYTES, (">arrays", lambda row: str(row.count)))
        yield _table(title, report.residuals, *columns)
    total = flops_text(sum(row.operations for row in report.recomputed)).strip()
    title = f"Computed again for the backward pass: {total} operations"
    operations: _Column = (">operations", lambda row: flops_text(row.operations))
    yield _table(title, report.recomputed, _PLACE, operations, *_COUNTS)
    title = "Collectives in the program, per device"
    columns = (("collective", lambda row: row.name), _AXES, _DTYPE, _PLACE, _BYTES, _RUNS)
    yield _table(title, report.collectives, *columns)
    if report.compiled is not None:
        yield from compiled_sections(report.compiled)
    columns = (("", lambda row: row.role), ("name", lambda row: row.name), _DTYPE)
    leaves: _Column = (">arrays", lambda row: f"{row.leaves:,}")
    elements: _Column = (">numbers", lambda row: f"{row.elements:,}")
    yield _table(
        "Arguments and results", report.arrays, *columns, leaves, elements, _BYTES, most=40
    )


def tables(report: Any, with_all_rows: bool = False) -> Group:
    """Returns the tables of an `AuditReport` for rich, except empty ones; a few rows, or all."""
    # A page has room for all rows, a terminal has not.
    parts: list[Any] = [
        drawn(section._replace(most=len(section.rows)) if with_all_rows else section)
        for section in _sections(report)
        if section.rows
    ]
    if report.residuals is None:
        parts.append(f"No residuals of a backward pass: {report.no_residuals}.")
    unseen = (*report.unseen, *(report.compiled.unseen if report.compiled is not None else ()))
    return Group(*parts, "Not seen:", bullets(unseen))


def compiled_tables(report: Any) -> Group:
    """Returns the tables of `Collectives` for rich."""
    parts: list[Any] = [drawn(section) for section in compiled_sections(report) if section.rows]
    if not report.rows:
        parts.append(f"No collectives in the {report.origin}.")
    if report.rows and report.no_mesh:
        parts.append(f"No mesh axes: {report.no_mesh}.")
    return Group(*parts, "Not seen:", bullets(report.unseen))


def compiled_sections(report: Any) -> tuple[Section, ...]:
    """Returns tables: 8-bit products, all collectives by kind, source lines of narrow sums."""
    title = f"Products of 8-bit operands of the {report.origin}"
    columns = (_PLACE, _OPERANDS, _RESULT, ("runs in", lambda row: row.ran), *_COUNTS)
    products = _table(title, report.float8_products, *columns)
    # A model has hundreds of collectives, of a few kinds; by line only the narrow sums matter.
    groups = grouped(
        report.rows,
        lambda row: (_kind(row), row.reducer, row.dtype, _AXES[1](row), str(row.group_size)),
    )
    rows = [
        (
            *key,
            bytes_text(sum(row.bytes for row in group)),
            str(len(group)),
            str(sum(row.runs for row in group)),
        )
        for key, group in sorted(groups.items(), key=lambda item: -sum(r.bytes for r in item[1]))
    ]
    names = ["collective", "reducer", "dtype", "axes", ">devices", ">bytes", ">count", ">runs"]
    collectives = Section(f"Collectives of the {report.origin}, whole arrays", names, rows, 40)
    title = "Sums over devices in fewer than 32 bits"
    narrow = [row for row in report.rows if row.sums and not _is_wide(row.dtype)]
    columns = (_PLACE, ("collective", _kind), _DTYPE, _AXES, _BYTES, _RUNS)
    return products, collectives, _table(title, narrow, *columns)
