"""The HTML page of an audit: it stands alone, says what the report says, and cannot be broken."""

import html.parser
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from jaxmp._inspect.api import AuditReport, audit
from jaxmp._inspect.markup import Markup, tag
from jaxmp._inspect.module_tree import ModuleNode, module_tree
from jaxmp._inspect.tables import bytes_text, flops_text
from tests.support.audit_lines import line_of

BF16, F32 = jnp.bfloat16, jnp.float32


class Page(html.parser.HTMLParser):
    """The elements of a page; a tag that is not closed in order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all_in(self, *tags: str) -> list[str]:
        return [text for tag, text in self.texts if tag in tags]

    @property
    def said(self) -> str:
        """The text that a reader sees."""
        return "".join(text for tag, text in self.texts if tag not in ("style", "script"))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(16, dtype=BF16, use_bias=False, name="up")(x)
        x = x.astype(F32)  # forgotten
        return nn.Dense(2, use_bias=False, name="down")(x)


@pytest.fixture(scope="module")
def report() -> AuditReport:
    x = jax.ShapeDtypeStruct((4, 8), BF16)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    return audit(lambda params, x: jnp.sum(Net().apply(params, x)), params, x)


@pytest.fixture(scope="module")
def page(report: AuditReport) -> Page:
    return Page(report.to_html(title="net"))


def test_the_page_is_balanced_and_loads_nothing(page: Page, report: AuditReport) -> None:
    loading = {"src", "href", "srcset", "data", "action", "poster"}
    assert not [tag for tag, attributes in page.tags if loading & attributes.keys()]
    assert not re.search(r"https?:|//\w|@import|url\(", report.to_html())
    assert [tag for tag, _ in page.tags].count("script") == 1


@pytest.mark.parametrize("broken", ["<p><b></p></b>", "<p>", "</p>"])
def test_the_parser_sees_what_is_not_balanced(broken: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        Page(broken)


def test_it_has_the_numbers_of_the_report(page: Page, report: AuditReport) -> None:
    # 2 * 4 * 8 * 16 FLOPs in bfloat16, 2 * 4 * 16 * 2 in float32.
    assert report.flops == 1024 + 256
    assert {"1.28 kFLOP", bytes_text(report.residual_bytes)} <= set(page.all_in("p"))
    assert "bfloat16 80.0 %" in page.said
    assert "float32 20.0 %" in page.said
    assert report.residuals
    rows: list[Any] = [*report.product_lines, *report.upcasts, *report.residuals]
    lines = {row.line for row in rows}
    assert lines <= set(page.all_in("td"))
    assert line_of("forgotten", "Net.__call__") in page.all_in("td")
    assert all(flops_text(row.flops) in page.all_in("td") for row in report.products)
    assert all(sentence in page.said for sentence in report.unseen)


def test_the_script_finds_both_buttons(page: Page) -> None:
    """An attribute without a value is not written, and "close all" did nothing."""
    buttons = [attributes for tag, attributes in page.tags if tag == "button"]
    assert [button.get("data-open") for button in buttons] == ["yes", "no"]


def find(node: ModuleNode, *names: str) -> ModuleNode:
    return find(node.inside[names[0]], *names[1:]) if names else node


def test_modules_have_the_flops_and_upcasts_of_what_is_inside(
    report: AuditReport, page: Page
) -> None:
    root = module_tree(report)
    assert find(root, "Net", "up").flops == {"bfloat16": 1024}
    assert find(root, "Net", "down").flops == {"float32": 256}
    assert find(root, "Net").flops == root.flops == {"bfloat16": 1024, "float32": 256}
    assert find(root, "Net").harmful_upcasts == 1
    assert find(root, "Net", "up").harmful_upcasts == 0
    assert root.kept_bytes == report.residual_bytes
    summaries = [
        f"{flops_text(flops)}FLOP, {share} %" for flops, share in ((1024, 80.0), (256, 20.0))
    ]
    assert set(summaries) <= set(page.all_in("span"))
    assert "1 upcast" in page.all_in("b")


def test_without_modules_the_tree_is_one_of_functions() -> None:
    def loss(x: Any) -> Any:
        return jnp.einsum("ab,bc->ac", x, x)

    root = module_tree(audit(loss, jax.ShapeDtypeStruct((4, 4), F32)))
    function = "test_without_modules_the_tree_is_one_of_functions.loss"
    assert find(root, "test_html.py", function).flops == {"float32": 128}


def test_layers_stand_in_their_order() -> None:
    def f(x: Any) -> Any:
        for i in range(12):
            with jax.named_scope(f"layer_{i}"):
                x = x @ x
        return x

    root = module_tree(audit(f, jax.ShapeDtypeStruct((4, 4), F32)))
    assert [node.name for node in root.ordered()] == [f"layer_{i}" for i in range(12)]


HOSTILE = '<script>alert(\'x\')<b>" & <td onclick="y">'


def test_no_name_can_break_the_page() -> None:
    """Scopes and titles may hold anything; nothing of it becomes an element or an attribute."""

    def f(x: Any) -> Any:
        with jax.named_scope(HOSTILE):
            return x.astype(F32) @ x.astype(F32)

    page = Page(audit(f, jax.ShapeDtypeStruct((4, 4), BF16)).to_html(title=HOSTILE))
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not any("onclick" in attributes for _, attributes in page.tags)
    assert page.all_in("h1") == page.all_in("title") == [HOSTILE]
    assert "<td onclick=" in "".join(page.all_in("small"))  # the path, as the report has it


def test_the_check_sees_what_is_not_escaped() -> None:
    assert Page(tag("td", HOSTILE)).said == HOSTILE
    raw = Page(tag("p", Markup("<b onclick='y'></b>")))
    assert any("onclick" in attributes for _, attributes in raw.tags)


def test_branches_that_add_up_to_more_than_the_program_are_said() -> None:
    def f(x: Any) -> Any:
        def short(x: Any) -> Any:
            return x @ x

        def long(x: Any) -> Any:
            return (x @ x) @ x

        return jax.lax.cond(x.sum() > 0, short, long, x)

    report = audit(f, jax.ShapeDtypeStruct((4, 4), F32))
    assert report.flops == 256
    assert "the bars are shares of 384 FLOP" in report.to_html()


def test_programs_without_products_or_modules_have_a_page() -> None:
    for fn in (lambda x: x, jnp.sin):
        page = Page(
            audit(fn, jax.ShapeDtypeStruct((3,), jnp.int8 if fn is not jnp.sin else F32)).to_html()
        )
        assert "0 FLOP" in page.said


def test_it_is_written_and_returned(report: AuditReport, tmp_path: pathlib.Path) -> None:
    text = report.to_html(tmp_path / "audit.html", title="é")
    assert (tmp_path / "audit.html").read_text("utf-8") == text
    assert "<h1>é</h1>" in text
