"""What an audit says: its checks, their messages, and the tables that it prints."""

import builtins
import io
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxmp._tools.inspect.api import AuditError, AuditReport, audit
from tests.support.audit_lines import array, line_of

pytestmark = pytest.mark.annotations

BF16, F32 = jnp.bfloat16, jnp.float32


def loss(params: Any, x: Any) -> Any:
    with jax.named_scope("body"):
        x = jnp.sin(x @ params["low"])
    x = x.astype(F32)  # forgotten
    return jnp.sum(x @ params["high"])  # wide


@pytest.fixture(scope="module")
def report() -> AuditReport:
    params = {"low": array(8, 16, dtype=BF16), "high": array(16, 2)}
    return audit(loss, params, array(4, 8, dtype=BF16))


@pytest.fixture(scope="module")
def summed() -> AuditReport:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def body(x: Any) -> Any:
        return lax.psum(x, "data") + lax.pmax(x, "data")  # bfloat16 sum

    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec()}
    return audit(jax.shard_map(body, mesh=mesh, **specs), array(8, 4, dtype=BF16), compiled=True)


def test_what_is_as_it_should_be_passes(report: AuditReport) -> None:
    # 1024 FLOPs in bfloat16 and 256 in float32; sin keeps its cosine, and a cast float32 (4, 16).
    assert report.check(products=("bfloat16", "float32")) is report
    assert report.check(products="bf16", share=0.8, upcasts=1, residual_bytes=384) is report


def message(report: AuditReport, **expected: Any) -> list[str]:
    with pytest.raises(AuditError) as caught:
        report.check(**expected)
    assert isinstance(caught.value, AssertionError)
    return str(caught.value).splitlines()


def test_products_of_other_dtypes_are_listed(report: AuditReport) -> None:
    assert message(report, products="bfloat16") == [
        "the audit failed.",
        "products: 80.0 % of their FLOPs have operands in bfloat16, wanted at least 100.0 %. "
        "The others:",
        f"  20.0 %  float32 x float32 -> float32  at {line_of('wide', 'loss')}",
    ]
    assert "wanted at least 80.1 %" in message(report, products="bfloat16", share=0.801)[1]
    assert message(report, products=["float32", "float16"])[1:] == [
        "products: 20.0 % of their FLOPs have operands in float32 or float16, wanted at least "
        "100.0 %. The others:",
        "  80.0 %  bfloat16 x bfloat16 -> bfloat16  at "
        + line_of("wide", "loss").replace(str(number("wide")), str(number("forgotten") - 1))
        + ", body",
    ]


def number(comment: str) -> int:
    return int(re.findall(r":(\d+) ", line_of(comment))[0])


def test_upcasts_are_listed(report: AuditReport) -> None:
    assert message(report, upcasts=0) == [
        "the audit failed.",
        "upcasts: 1 make products wide, allowed are 0:",
        f"  20.0 % of the FLOPs  bfloat16 -> float32  at {line_of('forgotten', 'loss')}",
    ]


def test_residuals_are_listed(report: AuditReport) -> None:
    got = message(report, residual_bytes=383)
    assert got[:2] == [
        "the audit failed.",
        "residual_bytes: 384 are kept for the backward pass, allowed are 383:",
    ]
    assert got[2] == f"  256 bytes  float32  at {line_of('forgotten', 'loss')}"
    assert len(got) == 4


def test_all_that_is_wrong_is_said_at_once(report: AuditReport) -> None:
    got = message(report, products="bfloat16", upcasts=0, residual_bytes=0)
    starts = [line.partition(":")[0] for line in got if not line.startswith("  ")]
    assert starts == ["the audit failed.", "products", "upcasts", "residual_bytes"]


def test_a_check_of_nothing_fails() -> None:
    nothing = audit(jnp.sin, array(3))
    assert message(nothing, products="bfloat16")[1] == (
        "products: the program has none, so none in bfloat16."
    )


def test_many_offenders_are_cut_short() -> None:
    def f(x: Any) -> Any:
        for i in range(13):
            with jax.named_scope(f"layer_{i}"):
                x = x @ x
        return x

    got = message(audit(f, array(4, 4)), products="bfloat16")
    assert len(got) == 2 + 10 + 1
    assert got[2].endswith(", layer_0")
    assert got[-1] == "  and 3 more"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {},
            "nothing to check: give products, precision, upcasts, residual_bytes, kept or lock",
        ),
        ({"share": 0.5}, "share goes with products"),
        ({"upcasts": 1, "share": 0.5}, "share is about products: give products='bfloat16' too"),
        ({"products": "bfloat61"}, r"unknown dtype 'bfloat61'\. Did you mean 'bfloat16'\?"),
        ({"products": ()}, "products must name at least one dtype"),
        ({"products": "bfloat16", "share": 80}, "above 0 and up to 1, got 80"),
        ({"products": "bfloat16", "share": True}, "above 0 and up to 1, got True"),
        ({"upcasts": -1}, "upcasts is the largest number allowed, an int from 0 up, got -1"),
        ({"upcasts": True}, "got True"),
        ({"residual_bytes": 0.5}, "residual_bytes is the largest number allowed"),
    ],
)
def test_arguments_that_make_no_sense(
    report: AuditReport, arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        report.check(**arguments)


def test_residuals_of_what_is_no_loss_cannot_be_checked(summed: AuditReport) -> None:
    with pytest.raises(ValueError, match="no residuals: its result is neither a float scalar"):
        summed.check(residual_bytes=0)


def test_integer_products_can_be_allowed() -> None:
    report = audit(jnp.matmul, array(4, 8, dtype=jnp.int8), array(8, 2, dtype=jnp.int8))
    assert report.check(products="int8").share("int8") == 1.0
    assert message(report, products="bfloat16")[2].startswith("  100.0 %  int8 x int8 -> int8  at ")


PRINTED = """\
Products: 1.28 kFLOP
┏━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━┳━━━━━━━┓
┃ operands            ┃ result   ┃ on TPU / GPU    ┃   FLOP ┃  share ┃ count ┃
┡━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━┩
│ bfloat16 x bfloat16 │ bfloat16 │                 │ 1.02 k │ 80.0 % │     1 │
│ float32 x float32   │ float32  │ bf16 x 1 / TF32 │   256  │ 20.0 % │     1 │
└─────────────────────┴──────────┴─────────────────┴────────┴────────┴───────┘
Products with an operand of 32 bits or more
┏━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━┓
┃ line, module, pass       ┃ operands          ┃ result  ┃ on TPU / GPU    ┃  share ┃ count ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━┩
│ test_report.py:00 (loss) │ float32 x float32 │ float32 │ bf16 x 1 / TF32 │ 20.0 % │     1 │
└──────────────────────────┴───────────────────┴─────────┴─────────────────┴────────┴───────┘
"""


def test_it_prints(report: AuditReport) -> None:
    text = str(report)
    stable = re.sub(r"\.py:\d+ \((\w+)\)", r".py:00 (\1) ", text)
    assert squeezed(PRINTED) in squeezed(stable)
    assert "Kept for the backward pass: 384 B" in text
    assert "│ argument │ params.low  │ bfloat16 │      1 │     128 │ 256 B │" in text
    assert "Not seen:\n - Collectives that the compiler's partitioner inserts" in text
    assert "Collectives in the program" not in text


def squeezed(text: str) -> str:
    """Without the blanks and rules of a table, whose widths follow the line numbers."""
    return re.sub(r"[ ━─]+", " ", text)


def test_collectives_print(summed: AuditReport) -> None:
    text = str(summed)
    assert "Collectives in the program, per device" in text
    assert re.search(r"│ psum\w* +│ data │ bfloat16 │ test_report.py:\d+ \(summed.body\)", text)
    assert "No residuals of a backward pass: its result is neither" in text


@pytest.mark.parametrize("width", [100, 120])
def test_it_fits(report: AuditReport, summed: AuditReport, width: int) -> None:
    from rich.console import Console

    for shown in (report, summed, summed.compiled):
        console = Console(width=width, record=True, color_system=None, file=io.StringIO())
        console.print(shown)
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines)


def test_long_tables_are_cut() -> None:
    def f(x: Any) -> Any:
        for i in range(20):
            with jax.named_scope(f"layer_{i}"):
                x = x.astype(F32).astype(BF16)
        return x

    report = audit(f, array(4, 4, dtype=BF16))
    assert len(report.upcasts) == 20
    text = str(report)
    assert text.count("layer_") == 12
    assert "and 8 more rows" in text


def test_in_a_notebook_a_report_is_text_too(
    report: AuditReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = str(report)

    class ZMQInteractiveShell:  # by this name rich knows a notebook, and draws on its page
        pass

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert str(report) == expected != ""
