"""The results of a run as JSON and as a page of Markdown."""

import json
import pathlib
from typing import Any

from tables import Row, markdown_table, slug

from on_device import claims
from on_device.parts import PARTS

# Around what `device.py --fill-docs` writes into a page of the site.
BEGIN, END = "<!-- device: begin -->", "<!-- device: end -->"
_NONE = (
    "No result of `make device` on a GPU is in "
    "[`benchmarks/results`](../benchmarks/results) yet: what the site says of GPUs is read from "
    "compiled programs. [Run it](CONTRIBUTING.md#on-a-gpu) on yours."
)


def write(
    folder: pathlib.Path,
    context: dict[str, Any],
    rows: list[Row],
    before: pathlib.Path | None = None,
) -> pathlib.Path:
    """Writes both files; returns the path of the page.

    Args:
      folder: where to.
      context: what a reader needs in order to judge the rows: machine, versions, date, parts.
      rows: of all parts so far.
      before: the page of the parts before, which this one replaces.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = ["device", slug(context["machine"]), context["date"], f"jax{context['versions']['jax']}"]
    path = folder / ("_".join(name) + ".md")
    if before is not None and before != path:  # the device was not known yet
        before.unlink()
        before.with_suffix(".json").unlink()
    by_part = claims.as_rows(rows)
    content = context | {"claims": claims.verdicts(context, by_part), "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    path.write_text("\n".join(_page(context, by_part)) + "\n")
    return path


def _page(context: dict[str, Any], rows: claims.Rows) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in context["versions"].items())
    lines = [
        f"# {context['machine']}: is it right, fast and small?",
        "",
        f"- Device: {context['machine']}, driver {context['driver'] or 'unknown'}",
        f"- Versions: {versions}",
        f"- Date: {context['date']}",
        f"- Command: `{context['command']}`, {context['seconds']:.0f} s",
    ]
    if context["small"]:
        lines.append("- **A dry run at toy sizes: it measures nothing.**")
    lines += ["", "## Claims", "", *verdict_table(context, rows)]
    for part in PARTS:
        report = context["parts"].get(part.name)
        if report:
            lines += ["", f"## {part.title}", "", f"{report['status']}, {report['seconds']:.0f} s"]
            part_rows = rows.get(part.name, {}).values()
            lines += ["", *markdown_table(part.columns, part_rows)] if part_rows else []
            lines += ["", *(f"- {note}" for note in part.notes)] if part.notes else []
            if report["log"]:
                lines += ["", "```", *report["log"].splitlines(), "```"]
    return lines


def verdict_table(context: dict[str, Any], rows: claims.Rows) -> list[str]:
    """The lines of the table of claims."""
    return markdown_table(claims.COLUMNS, claims.verdicts(context, rows))


def newest_results(folder: pathlib.Path) -> dict[str, Any] | None:
    """The newest results that are of an accelerator and of full size; None if there are none."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("device_*.json"))]
    real = [x for x in results if x["platform"] not in (None, "cpu") and not x["small"]]
    return max(real, key=lambda x: x["date"], default=None)


def section(folder: pathlib.Path) -> str:
    """What the site says of the newest results."""
    results = newest_results(folder)
    if results is None:
        return _NONE
    rows = claims.as_rows(results["rows"])
    counts = [row["verdict"] for row in claims.verdicts(results, rows)]
    versions = results["versions"]
    lines = [
        f"Measured on one {results['machine']} on {results['date']}, with jax {versions['jax']}"
        + (f" and PyTorch {versions['torch']}" if versions.get("torch") else "")
        + f". {len(counts)} claims: {counts.count(claims.HOLDS)} hold, "
        f"{counts.count(claims.REFUTED)} refuted, {counts.count(claims.NOT_MEASURED)} not "
        "measured. All numbers are in "
        "[`benchmarks/results`](../benchmarks/results).",
        "",
        *verdict_table(results, rows),
    ]
    return "\n".join(lines)


def filled(text: str, folder: pathlib.Path) -> str:
    """A page of the site with its section of results as the folder has them.

    Raises:
      ValueError: if the page has no such section.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{section(folder)}\n\n{END}{after}"
