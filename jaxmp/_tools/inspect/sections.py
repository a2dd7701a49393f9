"""Says what the tables of a report hold, as texts."""

from typing import Any

from rich.console import Group

from jaxmp._tools.inspect.tables import Section, bullets, bytes_text, drawn, flops_text

_PLACE = "line, module, pass"
_DEVICES = "on TPU / GPU"


def _sections(report: Any) -> list[Section]:
    """Returns the tables of an `AuditReport` that have rows."""
    found = [
        _products_table(report),
        *([] if _all_wide(report) else [_wide_table(report)]),
        _left_out_table(report),
        _upcasts_table(report),
        _converts(report),
        _residuals_table(report),
        _recomputed_table(report),
        _collectives(report),
        *(compiled_sections(report.compiled) if report.compiled is not None else ()),
        _arrays_table(report),
    ]
    return [section for section in found if section.rows]


def tables(report: Any, with_all_rows: bool = False) -> Group:
    """Returns all tables of a report, except empty ones.

    Args:
      report: an `AuditReport`.
      with_all_rows: whether tables have all rows, and not only the first.

    Returns:
      A renderable for rich.
    """
    parts: list[Any] = [
        drawn(section._replace(shown=len(section.rows)) if with_all_rows else section)
        for section in _sections(report)
    ]
    if report.residuals is None:
        parts.append(f"No residuals of a backward pass: {report.no_residuals}.")
    unseen = (*report.unseen, *(report.compiled.unseen if report.compiled is not None else ()))
    return Group(*parts, "Not seen:", bullets(unseen))


def compiled_tables(report: Any) -> Group:
    """Returns the tables of the collectives of a compiled program for a terminal.

    Args:
      report: `Collectives`.

    Returns:
      A renderable for rich.
    """
    parts: list[Any] = [drawn(section) for section in compiled_sections(report) if section.rows]
    if not report.rows:
        parts.append(f"No collectives in the {report.origin}.")
    if report.rows and report.no_mesh:
        parts.append(f"No mesh axes: {report.no_mesh}.")
    return Group(*parts, "Not seen:", bullets(report.unseen))


def compiled_sections(report: Any) -> tuple[Section, ...]:
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
            place_text(row),
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
        Section(title, columns, rows, 40),
        Section("Sums over devices in fewer than 32 bits", places, lines),
    )


def _compiled_products(report: Any) -> Section:
    rows = [
        (
            place_text(row),
            " x ".join(row.operands),
            row.result,
            row.ran,
            str(row.count),
            str(row.runs),
        )
        for row in report.float8_products
    ]
    columns = [_PLACE, "operands", "result", "runs in", ">count", ">runs"]
    return Section(f"Products of float8 operands of the {report.origin}", columns, rows)


def _kind(row: Any) -> str:
    return f"{row.kind} between slices" if row.between_slices else row.kind


def _products_table(report: Any) -> Section:
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
    return Section(title, columns, rows)


def _wide_lines(report: Any) -> list[Any]:
    return [row for row in report.product_lines if any(map(_is_wide, row.operands))]


def _all_wide(report: Any) -> bool:
    return len(_wide_lines(report)) == len(report.product_lines)


def _wide_table(report: Any) -> Section:
    rows = [
        (
            place_text(row),
            " x ".join(row.operands),
            row.result,
            _on_devices(row),
            f"{100 * row.share:.1f} %",
            str(row.count),
            str(row.runs),
        )
        for row in _wide_lines(report)
    ]
    columns = [_PLACE, "operands", "result", _DEVICES, ">share", ">count", ">runs"]
    return Section("Products with an operand of 32 bits or more", columns, rows)


def _left_out_table(report: Any) -> Section:
    rows = [
        (
            place_text(row),
            row.reason,
            flops_text(row.flops),
            f"{100 * row.share:.1f} %",
            str(row.count),
            str(row.runs),
        )
        for row in report.left_out
    ]
    columns = ["line, module", "reason", ">FLOP", ">share", ">count", ">runs"]
    return Section("Left out of float8", columns, rows)


def _on_devices(row: Any) -> str:
    """Formats what a float32 product is on a TPU and on a GPU; empty for other products."""
    return f"{row.tpu} / {row.gpu}" if row.precision else ""


def _is_wide(dtype: str) -> bool:
    return dtype.startswith(("float32", "float64", "complex"))


def _upcasts_table(report: Any) -> Section:
    rows = [
        (
            place_text(row),
            f"{row.source} -> {row.target}" + ("\nin a product" if row.kind == "product" else ""),
            f"{100 * row.share:.1f} %" if row.flops else "",
            bytes_text(row.bytes),
            str(row.count),
            str(row.runs),
        )
        for row in report.upcasts
    ]
    columns = [_PLACE, "cast", ">makes wide", ">bytes", ">count", ">runs"]
    return Section("Upcasts, first those that make products wide", columns, rows)


def _converts(report: Any) -> Section:
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
    return Section("Casts", columns, rows)


def _residuals_table(report: Any) -> Section:
    if report.residuals is None:
        return Section("", (), ())
    title = f"Kept for the backward pass: {bytes_text(report.residual_bytes)}"
    if copied := report.param_copy_bytes:
        title += f", of which {bytes_text(copied)} copies of params"
    rows = [
        (
            place_text(row),
            row.dtype,
            "params" if row.kind == "params" else "",
            bytes_text(row.bytes),
            str(row.count),
        )
        for row in report.residuals
    ]
    return Section(title, [_PLACE, "dtype", "copies of", ">bytes", ">arrays"], rows)


def _recomputed_table(report: Any) -> Section:
    rows = [
        (place_text(row), flops_text(row.operations), str(row.count), str(row.runs))
        for row in report.recomputed
    ]
    total = flops_text(sum(row.operations for row in report.recomputed)).strip()
    title = f"Computed again for the backward pass: {total} operations"
    return Section(title, [_PLACE, ">operations", ">count", ">runs"], rows)


def _collectives(report: Any) -> Section:
    rows = [
        (
            row.name,
            ", ".join(row.axes),
            row.dtype,
            place_text(row),
            bytes_text(row.bytes),
            str(row.runs),
        )
        for row in report.collectives
    ]
    columns = ["collective", "axes", "dtype", _PLACE, ">bytes", ">runs"]
    return Section("Collectives in the program, per device", columns, rows)


def _arrays_table(report: Any) -> Section:
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
    return Section("Arguments and results", columns, rows, 40)


def place_text(row: Any) -> str:
    """Formats the line, and below it the module, the pass and the branch, if known."""
    texts = (getattr(row, name, "") for name in ("path", "direction", "branch"))
    below = ", ".join(text for text in texts if text)
    return f"{row.line}\n{below}" if below else row.line
