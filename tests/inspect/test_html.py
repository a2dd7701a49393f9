"""The HTML page of an audit: it stands alone, has all rows, and cannot be broken by names."""

import dataclasses
import html
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmp._tools.inspect.api import AuditReport, audit
from jaxmp._tools.inspect.tables import bytes_text, flops_text


@pytest.fixture
def report() -> AuditReport:
    """Of a loss that keeps more arrays for its backward pass than a terminal shows."""
    square = audit(lambda w, x: jnp.sum(jnp.tanh(x @ w)), *[jnp.ones((8, 8))] * 2)
    (row,) = square.residuals or ()
    rows = tuple(dataclasses.replace(row, line=f"net.py:{i} (loss)") for i in range(20))
    return dataclasses.replace(square, residuals=rows)


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_the_page_has_all_rows_and_loads_nothing(report: AuditReport) -> None:
    page = report.to_html(title="a chain")
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<link", page)
    text = text_of(page)
    assert "a chain" in text
    assert "more rows" in str(report)
    assert "more rows" not in text
    for words in (bytes_text(report.residual_bytes), flops_text(report.flops), *report.unseen):
        assert " ".join(words.split()) in " ".join(text.split())
    assert all(f"net.py:{i} (loss)" in text for i in range(20))


def test_no_name_can_break_the_page() -> None:
    hostile = "<script>alert(1)</script>&"

    def f(x: Any) -> Any:
        with jax.named_scope("<td onclick='x'>"):
            return jnp.sum((x @ x).astype(jnp.float32) @ x.astype(jnp.float32))

    page = audit(f, jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)).to_html(title=hostile)
    assert "<script" not in page
    assert "<td onclick" not in page
    assert hostile in text_of(page)


def test_the_page_is_written_as_utf_8(tmp_path: pathlib.Path) -> None:
    report = audit(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))
    text = report.to_html(tmp_path / "audit.html", title="é")
    assert (tmp_path / "audit.html").read_text("utf-8") == text
    assert "é" in text
