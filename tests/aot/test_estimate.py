"""Estimates of programs that compilers for absent devices make."""

import importlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmp.diagnostics import absent_devices, estimate, find_device
from tests.aot.conftest import Compiler

ROOT = Path(__file__).parents[2]
N = 2048
MATRIX = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)


def chain(x: Any, w: Any) -> Any:
    """Three products in a loop."""
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0]


@pytest.mark.jax
@pytest.mark.parametrize("device", ["h100", "v5e"])
def test_operations_of_a_loop(device: str, gpu: Compiler, tpu: Compiler) -> None:
    cost = estimate(chain, MATRIX, MATRIX, device=device)
    assert cost.flops == {"bfloat16": 3 * 2 * N**3}
    peak = find_device(device).peaks.bfloat16
    assert 3 * 2 * N**3 / peak < cost.seconds < 2.5 * 3 * 2 * N**3 / peak
    assert cost.rows[0].line.startswith("test_estimate.py:")
    assert (cost.cycles is None) == (device == "h100")
    assert cost.arguments >= 2 * 2 * N**2


def test_cycles_are_of_the_order_of_the_roofline(tpu: Compiler) -> None:
    """A product keeps a v5e busy: its clock is 1.5 GHz (Austin et al., "Scaling", 2025)."""
    cost = estimate(
        jnp.matmul, *[jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2, device="v5e"
    )
    assert cost.cycles is not None
    assert cost.cycles / 1.5e9 == pytest.approx(cost.seconds, rel=0.25)


def test_float8_pays_where_it_is_native(gpu: Compiler) -> None:
    def product(x: Any, w: Any) -> Any:
        over = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, w, over, preferred_element_type=jnp.bfloat16)

    low = [jax.ShapeDtypeStruct((8192, 8192), jnp.float8_e4m3fn)] * 2
    wide = [jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)] * 2
    options = {"xla_gpu_enable_triton_gemm": False}
    for device, least in {"h100": 1.8, "a100": 0.5}.items():
        costs = [
            estimate(product, *args, device=device, compiler_options=options)
            for args in (wide, low)
        ]
        assert (costs[0].seconds / costs[1].seconds > 1.8) == (least > 1)
    assert list(costs[1].flops) == ["bfloat16"]  # an A100 multiplies copies in 16 bits


@pytest.mark.jax
@pytest.mark.parametrize("abstract", [True, False])
def test_sharded_arguments_are_sharded_over_absent_devices(abstract: bool, gpu: Compiler) -> None:
    mesh: Any = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    if not abstract:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def array(*shape: int, split: bool) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec("data") if split else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def loss(w: Any, x: Any) -> Any:
        y = jax.lax.with_sharding_constraint(x @ w, PartitionSpec("data"))
        return jnp.mean(jnp.tanh(y) ** 2)

    cost = estimate(
        jax.grad(loss), array(512, 512, split=False), array(4096, 512, split=True), device="h100"
    )
    assert cost.devices == 8
    assert cost.collectives["all-reduce"] >= 4 * 512**2
    assert sum(cost.flops.values()) == 2 * 2 * 4096 * 512**2 / 8  # on each device


def mean_over(mesh: Any) -> tuple[Any, jax.ShapeDtypeStruct]:
    """A function that names its mesh, and its argument."""
    over = PartitionSpec("data")
    mean = jax.shard_map(
        lambda x: jax.lax.pmean(jnp.sum(x), "data"),
        mesh=mesh,
        in_specs=over,
        out_specs=PartitionSpec(),
    )
    return mean, jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, over))


def test_a_function_may_name_a_mesh_of_absent_devices_but_not_of_those_here(gpu: Compiler) -> None:
    devices = absent_devices("h100", 4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    mean, x = mean_over(mesh)
    assert estimate(mean, x, device="h100").devices == 4
    mean, x = mean_over(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)))
    with pytest.raises(ValueError, match=r"Make that mesh of jaxmp\.diagnostics\.absent_devices"):
        estimate(mean, x, device="h100")


def test_a_callback_to_python_is_refused(gpu: Compiler) -> None:
    def told(x: Any) -> Any:
        jax.debug.print("{}", x[0, 0])
        return x + 1

    with pytest.raises(ValueError, match=r"calls back to Python, as jax\.debug\.print does"):
        estimate(told, MATRIX, device="h100")


@pytest.mark.jax
def test_what_steps_take(gpu: Compiler) -> None:
    """Keys, numbers and texts among arguments; none at all; donated ones."""

    def drawn(key: Any, size: int, mode: str, *, scale: float) -> Any:
        assert mode == "normal"
        return scale * jax.random.normal(key, (size, size))

    cost = estimate(drawn, jax.random.key(0), 512, "normal", scale=2.0, device="h100")
    assert cost.outputs >= 4 * 512**2
    assert estimate(lambda: jnp.arange(4096.0) * 2, device="h100").outputs >= 4 * 4096
    given, kept = (
        estimate(lambda x: x + 1, jnp.ones((256, 256)), device="h100", donate=donate)
        for donate in (0, ())
    )
    assert (given.aliased, kept.aliased) == (4 * 256**2, 0)


def _pairs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_estimate")


QUICK = ("layer norm, computed in float32", "an optimizer")


@pytest.mark.usefixtures("standard_promotion")
def test_the_estimate_that_the_docs_show(gpu: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    """A train step of abstract arrays: the code of the page prints what the page shows."""
    page = (ROOT / "docs" / "cost.md").read_text()
    model, call, shown = re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:3]
    namespace: dict[str, Any] = {}
    for code in (model, call):
        exec(compile(code, "net.py", "exec"), namespace)
    printed = capsys.readouterr().out
    # Compilers fuse as their version does: what the model has is the same under each.
    same = ("An estimate for h100", "products of bfloat16", "net.py:18 (loss_fn.layer)")
    for words in same:
        (wanted, *_), (got, *_) = (
            [line.split()[:4] for line in text.splitlines() if words in line]
            for text in (shown, printed)
        )
        assert wanted == got


@pytest.mark.usefixtures("standard_promotion")
def test_the_faster_program_by_cycles_is_the_faster_by_roofline(
    tpu: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _pairs(monkeypatch)
    chosen = [pair for pair in bench.pairs(small=True) if pair.name in QUICK]
    rows = [bench.compared(pair, "v5e") for pair in chosen]
    assert [row["agree"] for row in rows] == ["yes"] * len(QUICK), rows


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_nine_of_ten_pairs_rank_as_the_compiler_ranks_them(
    tpu: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _pairs(monkeypatch).main(["--no-write"])
    clear = [row["agree"] for row in rows if row["agree"] != "alike"]
    assert len(clear) > 10
    assert clear.count("yes") >= 0.9 * len(clear)
