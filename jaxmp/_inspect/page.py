"""Writes a report as one HTML page that stands alone: it loads nothing, and works offline."""

import dataclasses
import importlib.resources
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmp._inspect.markup import Markup, joined_markup, tag
from jaxmp._inspect.module_tree import ModuleNode, flops_by_dtype, module_tree
from jaxmp._inspect.sections import (
    left_out_section,
    product_section,
    residual_section,
    sections,
    unseen_by,
    upcast_section,
)
from jaxmp._inspect.tables import Section, bytes_text, flops_text

# Modules are open down to this depth at first.
_OPEN = 2


def page(report: Any, title: str) -> str:
    """Returns an audit as a page: totals, the tree of modules, and all tables with all rows.

    Args:
      report: an `AuditReport`.
      title: the heading.

    Returns:
      The HTML. It has its style and its script inside, and loads nothing.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", _file("page.css")),
    )
    body = tag(
        "body",
        tag("h1", title),
        _totals(report),
        _tree(report),
        *(_table(section) for section in sections(report)),
        _not_seen(report),
        tag("script", _file("page.js")),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _file(name: str) -> Markup:
    return Markup(importlib.resources.files(__package__).joinpath(name).read_text("utf-8"))


def _totals(report: Any) -> Markup:
    """Returns the numbers that one looks for first."""
    harmful = [row for row in report.upcasts if row.flops]
    cards = [_card("Products", f"{flops_text(report.flops)}FLOP", _mix(report))]
    cards.append(
        _card(
            "Upcasts that make products wide",
            str(len(harmful)),
            f"of {_how_many(len(report.upcasts), 'upcast')}, by line",
            "bad" if harmful else "good",
        )
    )
    if report.residuals is None:
        cards.append(_card("Kept for the backward pass", "not known", report.no_residuals))
    else:
        kept = _kept_by_dtype(report)
        bar = joined_markup(_bar(kept, sum(kept.values())), _legend(kept, bytes_text))
        cards.append(_card("Kept for the backward pass", bytes_text(report.residual_bytes), bar))
    if report.left_out:
        share = sum(row.share for row in report.left_out)
        text = f"of the product FLOPs, in {_how_many(len(report.left_out), 'line')}"
        cards.append(_card("Left out of float8", f"{100 * share:.1f} %", text))
    if report.unseen_lines:
        names = ", ".join(sorted({row.name for row in report.unseen_lines}))
        cards.append(_card("Unseen", _how_many(len(report.unseen_lines), "line"), names, "bad"))
    return tag("section", *cards, class_="cards")


def _card(title: str, number: str, below: str, kind: str = "") -> Markup:
    return tag(
        "div",
        tag("h2", title),
        tag("p", number.strip(), class_=f"number {kind}".strip()),
        tag("div", below, class_="below"),
        class_="card",
    )


def _how_many(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _mix(report: Any) -> Markup:
    flops = flops_by_dtype(report.products)
    total = sum(flops.values())
    return joined_markup(
        _bar(flops, total), _legend(flops, lambda number: f"{100 * number / total:.1f} %")
    )


def _kept_by_dtype(report: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in report.residuals:
        found[row.dtype] = found.get(row.dtype, 0) + row.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


_FAMILIES = (
    ("float8", "f8"),
    ("float4", "f8"),
    ("bfloat16", "bf16"),
    ("float16", "f16"),
    ("float32", "f32"),
    ("float64", "f64"),
    ("complex", "f64"),
)
_DTYPE = re.compile(r"\b(?:b?float\d+(?:_\w+)?|complex\d+|u?int\d+|bool)\b")


def _colour(dtypes: str) -> str:
    """Returns the class of dtypes for their colour: that of the widest, which decides the speed."""
    found = [name for start, name in _FAMILIES if re.search(rf"\b{start}", dtypes)]
    return found[-1] if found else "other"


def _bar(amounts: Mapping[str, int], whole: int) -> Markup:
    """Returns a bar whose whole length stands for `whole`, split by dtypes."""
    if not whole:
        return Markup("")
    parts = [
        tag("i", class_=_colour(name), style=f"width:{100 * amount / whole:.4g}%", title=name)
        for name, amount in amounts.items()
        if amount
    ]
    said = ", ".join(f"{name} {100 * n / whole:.1f} %" for name, n in amounts.items())
    return tag("span", *parts, class_="bar", role="img", aria_label=said)


def _legend(amounts: Mapping[str, int], text: Any) -> Markup:
    entries = [tag("li", _chip(name), " ", text(amount)) for name, amount in amounts.items()]
    return tag("ul", *entries, class_="legend")


def _chip(dtypes: str) -> Markup:
    return tag("span", dtypes, class_=f"dtype {_colour(dtypes)}")


def _tree(report: Any) -> Markup:
    root = module_tree(report)
    if not root.inside:
        return Markup("")
    whole = sum(root.flops.values())
    notes = []
    if whole > report.flops:
        notes.append(
            "Branches that exclude each other are added up here: the bars are shares of "
            f"{flops_text(whole)}FLOP."
        )
    buttons = tag(
        "p",
        tag("button", "open all", type="button", data_open="yes"),
        " ",
        tag("button", "close all", type="button", data_open="no"),
        class_="buttons",
    )
    return tag(
        "section",
        tag("h2", "Modules"),
        tag("p", "A bar is the share of the product FLOPs of the program, by dtype."),
        *(tag("p", note) for note in notes),
        buttons,
        *(_node(node, whole, 0) for node in root.ordered()),
        class_="tree",
    )


def _node(node: ModuleNode, whole: int, depth: int) -> Markup:
    flops = node.flops
    total = sum(flops.values())
    numbers = f"{flops_text(total)}FLOP, {100 * total / whole:.1f} %" if total else ""
    harmful, kept = node.harmful_upcasts, node.kept_bytes
    notes = [tag("b", _how_many(harmful, "upcast"), class_="bad")] if harmful else []
    if kept:
        notes.append(tag("span", f"keeps {bytes_text(kept)}"))
    summary = tag(
        "summary",
        tag("span", node.name, class_="name"),
        _bar(flops, whole) if total else tag("span"),
        tag("span", numbers, class_="flops"),
        tag("span", *notes, class_="notes"),
    )
    inside = [_node(each, whole, depth + 1) for each in node.ordered()]
    return tag(
        "details",
        summary,
        tag("div", *inside, _own_lines(node), class_="inside"),
        open=depth < _OPEN and bool(node.inside),
    )


def _own_lines(node: ModuleNode) -> Markup:
    """Returns the tables of a module's own lines; folded if there are modules inside of it."""
    tables = [joined_markup(tag("h3", each.title), _grid(each)) for each in _own_sections(node)]
    if not (node.inside and tables):
        return joined_markup(*tables)
    return tag("details", tag("summary", "its own lines"), *tables, class_="own")


def _own_sections(node: ModuleNode) -> list[Section]:
    """Returns the tables of a module's own lines, without its path in each of them."""
    found = [
        product_section("Products", _without_path(node.products)),
        upcast_section(_without_path(node.upcasts))._replace(title="Upcasts"),
        left_out_section(_without_path(node.left_out)),
        residual_section("Kept for the backward pass", _without_path(node.residuals)),
    ]
    return [
        section._replace(columns=["line, pass", *section.columns[1:]])
        for section in found
        if section.rows
    ]


def _without_path(rows: Iterable[Any]) -> list[Any]:
    return [dataclasses.replace(row, path="") for row in rows]


def _table(section: Section) -> Markup:
    return tag(
        "section",
        tag("details", tag("summary", tag("h2", section.title)), _grid(section), open=True),
    )


def _grid(section: Section) -> Markup:
    compact = section.without_empty_columns()
    kinds = ["number" if column.startswith(">") else "" for column in compact.columns]
    head = [
        tag("th", column.lstrip(">"), class_=kind, scope="col")
        for column, kind in zip(compact.columns, kinds, strict=True)
    ]
    rows = [
        tag(
            "tr",
            *(tag("td", _cell(text), class_=kind) for text, kind in zip(row, kinds, strict=True)),
        )
        for row in compact.rows
    ]
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
    return tag("div", table, class_="scroll", tabindex="0")


def _cell(text: str) -> Markup:
    """Returns a text with its dtypes in their colours, and what is below its first line, small."""
    first, _, below = text.partition("\n")
    return joined_markup(_coloured(first), tag("small", below) if below else Markup(""))


def _coloured(text: str) -> Markup:
    parts: list[str] = []
    end = 0
    for found in _DTYPE.finditer(text):
        parts += [text[end : found.start()], _chip(found.group())]
        end = found.end()
    return joined_markup(*parts, text[end:])


def _not_seen(report: Any) -> Markup:
    lines = [
        f"{row.name} at {row.line}" + (f", {row.path}" if row.path else "")
        for row in report.unseen_lines
        if row.line
    ]
    notes = [f"No residuals of a backward pass: {report.no_residuals}."]
    said = (notes if report.residuals is None else []) + [*unseen_by(report), *lines]
    return tag("section", tag("h2", "Not seen"), tag("ul", *(tag("li", each) for each in said)))
