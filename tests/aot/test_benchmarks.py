"""The benchmarks that only compile: they run at toy size, and their rows say what they should."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.lab.compilers import compiler_options
from tests.aot.conftest import Compiler
from tests.support.surroundings import benchmark_path  # noqa: F401
from tests.support.traffic import traffic

pytestmark = pytest.mark.usefixtures("standard_promotion", "benchmark_path")


# What other tests here defend as well: these run, each with so many rows.
RUNS = {
    "bench_distributed": ("--quick --platforms gpu", 3),
    "bench_skipping": (
        "--platforms gpu --layers 8 --width 512 --devices 8 --paths step --policies bfloat16 "
        "--skips none cond",
        2,
    ),
    "bench_float8_compiled": ("--widths 256 --context 128 --products none tensorwise", 2),
}


@pytest.mark.exhaustive
@pytest.mark.every_case
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(gpu: Compiler, tpu: Compiler, name: str) -> None:
    arguments, least = RUNS[name]
    rows = importlib.import_module(name).main([*arguments.split(), "--no-write"])
    assert len(rows) >= least


VIT = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the compiler of jax 0.10 finds no tiles for 25,088 rows"
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("part", "number"), [
    *(("gpt", i) for i in range(16)), *(("float8", i) for i in range(4)),
    *(pytest.param("vit", i, marks=VIT) for i in range(4)), *(("resnet", i) for i in range(4)),
])  # fmt: skip
def test_contenders_of_make_device_fit_an_h100(gpu: Compiler, part: str, number: int) -> None:
    """At full size, with plain attention: more memory than with cuDNN's, which is not here."""
    vision = importlib.import_module("on_device.vision")
    model, parts = importlib.import_module("gpt").GPT, importlib.import_module("on_device.gpt")
    cases: list[Any] = {
        "gpt": lambda: parts.cases(model(24, 1024, 16, 50304, 1024), 8),
        "float8": lambda: importlib.import_module("on_device.float8").step_cases(
            model(4, 4096, 32, 32768, 1024), 8
        ),
        "vit": lambda: vision.vit_cases(vision._BASE),
        "resnet": lambda: vision.resnet_cases({}, 128, 224),
    }[part]()
    contender, batch = cases[number].contender, cases[number].batch
    with jax.default_matmul_precision(contender.precision):
        step = gpu(contender.step, jax.eval_shape(contender.start), batch, donate=(0,))
    stats = step.memory_analysis()
    peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    peak += stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert 2 * 2**30 < peak < 70 * 2**30
    assert stats.alias_size_in_bytes > 0.9 * stats.output_size_in_bytes  # the state is donated


@pytest.mark.jax
def test_the_least_effort_is_one_that_a_compiler_for_tpus_knows(tpu: Compiler) -> None:
    """Its option has another name since jax 0.12, and an unknown one is an error."""
    on_one = jax.sharding.SingleDeviceSharding(tpu.devices[0])
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=on_one)
    lowered = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x)
    assert compiler_options("tpu", "default") == compiler_options("gpu", "least") == {}
    assert len(compiler_options("tpu", "least")) == 1
    assert lowered.compile(compiler_options("tpu", "least")).cost_analysis()["flops"] > 2 * 256**3
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile({"optimization_zeal": -1.0})  # positive control


def test_recompute(gpu: Compiler) -> None:
    """Models in a scan keep less, and compute no product twice, where whole blocks do."""
    bench: Any = importlib.import_module("bench_recompute")
    quick = ["--quick", "--platform", gpu.platform, "--loops", "scan", "--no-write"]
    contenders = "by hand,by hand + auto,by hand + whole blocks"
    rows = bench.main([*quick, "--models", "gpt,resnet", "--contenders", contenders])
    by = {(row["model"], row["contender"]): row for row in rows}
    for model in ("gpt", "resnet"):
        auto, whole = (by[model, f"by hand + {way}"] for way in ("auto", "whole blocks"))
        assert auto["products_own"] == pytest.approx(1, abs=0.005)
        assert whole["products_own"] > 1.1
        assert auto["temp_own"] < 1
    assert by["gpt", "by hand + auto"]["temp_own"] < 0.5


SIZE = 8192**2  # arrays beyond a TPU's vector memory
ARRAYS = [jax.ShapeDtypeStruct((8192, 8192), dtype) for dtype in (jnp.float32, jnp.bfloat16)]


def test_traffic(compiler: Compiler) -> None:
    """Bytes that can be counted by hand."""
    program = compiler(lambda x, y: (x * 2.0, y + 1), *ARRAYS, donate=(0, 1))
    assert traffic(str(program.as_text())) == pytest.approx(12 * SIZE, rel=0.01)


def test_traffic_of_branches(tpu: Compiler) -> None:
    """The one that moves most counts. What decides between them reads an array before."""

    def step(x: jax.Array, y: jax.Array) -> Any:
        def taken(x: jax.Array, y: jax.Array) -> Any:
            return x * 2.0, y + 1

        return jax.lax.cond(jnp.sum(x) > 0, taken, lambda *same: same, x, y)

    program = tpu(step, *ARRAYS, donate=(0, 1))
    assert traffic(str(program.as_text())) == pytest.approx((4 + 12) * SIZE, rel=0.01)
