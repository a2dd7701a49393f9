"""Histograms say what a format loses of an array, as casting it does, and cost a step little."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType

import jaxmp
from jaxmp._numerics.histograms import _bin_of, _count_by_comparison, _count_by_scatter
from jaxmp.diagnostics import histograms, plot_histograms, underflow_report
from tests.support.compilations import Count

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]
F16 = "mixed_float16"
MORE = pytest.mark.exhaustive
RNG = np.random.default_rng(0)
N = 200_000
ARRAYS = {
    "normal": RNG.normal(0, 1e-4, N),
    "lognormal": RNG.lognormal(-12, 3, N),
    "heavy tails": RNG.standard_t(2, N) * 1e-3,
    "sparse": RNG.lognormal(-8, 2, N) * (RNG.random(N) < 0.5),
    "powers of two": np.exp2(RNG.integers(-40, 20, N)),
}
FORMATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def shares(x: Any, dtype: str, scale: float) -> tuple[float, float, float]:
    """Zero, subnormal and not finite, of the numbers that are not zero, by casting them."""
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        cast = (x * np.float32(scale)).astype(FORMATS[dtype]).astype(np.float32)
    normal = float(ml_dtypes.finfo(FORMATS[dtype]).smallest_normal)
    subnormal = (cast != 0) & (np.abs(cast) < normal)
    count = np.count_nonzero(x)
    return (
        np.count_nonzero((cast == 0) & (x != 0)) / count,
        np.count_nonzero(subnormal) / count,
        np.count_nonzero(~np.isfinite(cast)) / count,
    )


def found(report: Any) -> tuple[float, float, float]:
    return report.total.flushed, report.total.subnormal, report.total.overflow


@pytest.mark.jax
@pytest.mark.parametrize(
    "name",
    ["lognormal", *(pytest.param(x, marks=MORE) for x in ("normal", "heavy tails", "sparse"))],
)
def test_shares_are_those_of_a_cast(name: str) -> None:
    """To 1e-4 in 16 bits; in float8 what becomes zero to 1e-4, and the rest to 0.02."""
    x = jnp.asarray(ARRAYS[name], jnp.float32)
    counted = histograms({"x": x})
    seen = set()
    for dtype in FORMATS:
        bound = 1e-4 if dtype in ("float16", "bfloat16") else 0.02
        for log2 in (-4, 0, 5, 10, 15, 20, 24):
            expected = shares(x, dtype, 2.0**log2)
            given = found(underflow_report(counted, dtype=dtype, loss_scale=2.0**log2))
            assert given == pytest.approx(expected, abs=bound), (dtype, log2)
            assert given[0] == pytest.approx(expected[0], abs=1e-4), (dtype, log2)
            seen |= {i for i, share in enumerate(expected) if share > 0.05}
    assert seen == {0, 1, 2}  # the bounds are not those of nothing


def test_powers_of_two_are_exact_but_for_ties() -> None:
    """A histogram takes the tie between zero and the smallest number for the latter."""
    x = jnp.asarray(ARRAYS["powers of two"], jnp.float32)
    tie = np.count_nonzero(np.asarray(x) == 2.0**-25) / N
    assert tie > 0.01
    expected = shares(x, "float16", 1.0)
    given = found(underflow_report(histograms({"x": x})))
    assert given == pytest.approx((expected[0] - tie, expected[1] + tie, expected[2]), abs=1e-4)
    alone = found(underflow_report(histograms({"x": jnp.full(3, 2.0**-25)})))
    assert alone == pytest.approx(shares(np.full(3, 2.0**-25), "float16", 1.0), abs=1e-9)


@pytest.mark.parametrize("scale", [3.0, pytest.param(1000.0, marks=MORE)])
def test_scales_between_powers_of_two(scale: float) -> None:
    x = jnp.asarray(ARRAYS["lognormal"], jnp.float32)
    given = found(underflow_report(histograms({"x": x}), loss_scale=scale))
    assert given == pytest.approx(shares(x, "float16", scale), abs=2e-3)


@pytest.mark.jax
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_of_arrays_the_shares_are_exact(name: str, dtype: str) -> None:
    """In every format, at every scale, ties too."""
    x = np.float32(ARRAYS[name])
    for scale in (1.0, 3.0, 2.0**-4, 2.0**20, 448 / float(np.abs(x).max())):
        given = found(underflow_report({"x": x}, dtype=dtype, loss_scale=scale))
        assert given == pytest.approx(shares(x, dtype, scale), abs=1e-6), scale


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_limits_of_formats_are_those_of_casts(dtype: str) -> None:
    """Each limit is the first number that a cast keeps, keeps as a normal one, or loses."""
    info = ml_dtypes.finfo(FORMATS[dtype])
    numbers = [float(info.smallest_subnormal) / 2, float(info.smallest_normal), float(info.max)]
    if dtype != "bfloat16":
        numbers += [float(info.smallest_normal - info.smallest_subnormal / 2), 464.0, 65520.0]
    for x in numbers:
        near = np.float32([np.nextafter(np.float32(x), np.float32(0)), x, np.nextafter(x, np.inf)])
        for one in near:
            given = found(underflow_report({"x": one[None]}, dtype=dtype))
            assert given == shares(one[None], dtype, 1.0), float(one)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", *(pytest.param(x, marks=MORE) for x in list(FORMATS)[:2])]
)
def test_the_largest_number_decides_whether_anything_overflows(dtype: str) -> None:
    """Bins end at powers of two, and formats do not: scaled to fit, nothing is said to overflow."""
    x = jnp.asarray(ARRAYS["normal"], jnp.float32)
    limit = float(ml_dtypes.finfo(FORMATS[dtype]).max)
    fits = np.exp2(np.floor(np.log2(limit / float(jnp.max(jnp.abs(x))))))
    assert underflow_report({"x": x}, dtype=dtype, loss_scale=float(fits)).total.overflow == 0
    above = underflow_report({"x": x}, dtype=dtype, loss_scale=float(2 * fits)).total.overflow
    assert (above > 0) == (shares(x, dtype, 2 * fits)[2] > 0)


def test_in_large_arrays_nothing_overflows_either() -> None:
    """More numbers than float32 counts exactly, and another count of those that fit."""
    x = jnp.where(jnp.arange(2**24 + 5) % 3 == 0, 1.0, 3.0)
    assert underflow_report({"x": x}).total.overflow == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=30, max_size=30))
def test_any_bits_land_in_their_bin(patterns: list[int]) -> None:
    """Zeros, subnormal numbers, infinities and NaN among them; both ways of counting agree."""
    bits = np.array([*patterns, 0, 1, 2**15, 2**23 - 1, 0x7F800000, 0xFF800000, 0x7FC00000])
    x = np.abs(bits.astype(np.uint32).view(np.float32)).astype(np.float64)
    edges = [0, 2.0**-149, 2.0**-134, 2.0**-126, *(2.0**k for k in range(-80, 42)), np.inf]
    bins = np.where(np.isnan(x), 127, np.searchsorted(edges, x, side="right") - 1)
    expected = np.bincount(bins, minlength=128)
    numbers = _bin_of(jnp.asarray(bits.astype(np.uint32) & np.uint32(0x7FFFFFFF)))
    assert np.array_equal(numbers, bins)
    for count in (_count_by_comparison, _count_by_scatter):
        assert np.array_equal(jax.jit(count)(numbers), expected)


def test_every_kind_of_leaf() -> None:
    tree = {
        "bf16": jnp.array([1.0, 0.0, jnp.nan], jnp.bfloat16),
        "codes": jnp.array([448.0, 2.0**-9], jnp.float8_e4m3fn),
        "complex": jnp.array([1.0 + 4.0j]),
        "empty": jnp.zeros((0, 3)),
        "f16": jnp.array([[65504.0, -jnp.inf]], jnp.float16),
        "key": jax.random.key(0),
        "none": None,
        "number": 3.0,
        "numpy": np.array([2.0**-140, 1e38]),  # float64
        "scalar": jnp.float32(-3.0),
        "step": jnp.int32(3),
        "text": "a",
        "function": jnp.tanh,
    }
    counted = histograms(tree)
    assert counted.names == ("bf16", "codes", "complex", "empty", "f16", "numpy", "scalar")
    assert counted.counts.sum(1).tolist() == [3, 2, 2, 0, 2, 2, 1]
    assert counted.largest.tolist()[:5] == [1, 448, 4, 0, 65504]
    rows = {row.name: row for row in underflow_report(counted).rows}
    assert (rows["bf16"].zeros, rows["bf16"].nan, rows["f16"].infinite) == (1, 1, 1)
    assert (rows["empty"].flushed, rows["empty"].overflow) == (0, 0)
    assert rows["empty"].recommended_scale is None
    assert "what bfloat16 and float16 and float8_e4m3fn had lost before" in str(
        underflow_report(counted)
    )
    assert underflow_report(tree) == underflow_report(counted)


@pytest.mark.parametrize("tree", [{}, None, {"step": jnp.int32(3)}])
def test_a_tree_without_floats_has_no_rows(tree: Any) -> None:
    report = underflow_report(tree)
    assert (report.rows, report.total.size) == ((), 0)


def test_float64_beyond_float32_counts_at_its_ends() -> None:
    with jax.enable_x64(True):
        counted = histograms({"x": jnp.array([1e-300, 0.0, 1e300, jnp.inf], jnp.float64)})
    row = underflow_report(counted).total
    assert (row.zeros, row.infinite, row.size) == (1, 1, 4)
    assert (row.flushed, row.overflow) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", 15), ("float8_e4m3fn", 8), ("float8_e5m2", 15), ("bfloat16", None)],
)
def test_the_recommended_scale_leaves_room(dtype: str, expected: int | None) -> None:
    """As torch.amp would settle, three powers of two below; bfloat16 needs none."""
    report = underflow_report({"a": jnp.array([0.011]), "b": jnp.array([0.3])}, dtype=dtype)
    rows = {row.name: row for row in report.rows}
    if expected is None:
        assert report.total.recommended_scale == 1
    else:
        assert rows["a"].recommended_scale == 2.0 ** (expected - 3 + 7)  # 0.011 = 1.4 * 2**-7
        assert report.total.recommended_scale == 2.0 ** (expected - 3 + 2)


def test_faults_of_the_caller() -> None:
    x = {"x": jnp.ones(3)}
    with pytest.raises(ValueError, match="unknown dtype 'flaot16'"):
        underflow_report(x, dtype="flaot16")
    with pytest.raises(TypeError, match="when must be a boolean scalar"):
        histograms(x, when=3)
    with pytest.raises(ValueError, match=r"these histograms are empty\. A step of make_train_step"):
        underflow_report(histograms(x, when=jnp.array(False)))
    assert underflow_report({"x": jnp.zeros((0, 3))}).total.size == 0  # counted, and nothing there


def test_on_eight_devices_numbers_stay_where_they_are() -> None:
    x = jnp.asarray(ARRAYS["lognormal"][: 64 * 1024].reshape(64, 1024).astype(np.float32))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        assert underflow_report({"x": placed}) == underflow_report({"x": x})
        with jax.set_mesh(mesh):
            compiled = jax.jit(lambda x: histograms({"x": x})).lower(placed).compile()
            assert np.array_equal(compiled(placed).counts, histograms({"x": x}).counts)
            # As TPUs and GPUs count.
            compared = jax.jit(lambda x: _count_by_comparison(_bin_of(jnp.abs(x).view(jnp.uint32))))
            assert np.array_equal(compared(placed), np.asarray(compiled(placed).counts)[0])
        text = compiled.as_text()
        assert text.count(" all-reduce(") + text.count(" all-reduce-start(") >= 1
        assert "all-gather" not in text


@pytest.mark.parametrize("when", [None, True])
def test_in_a_shard_map_each_device_counts_its_own(when: bool | None) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    def count(x: Any) -> Any:
        local = histograms({"x": x}, when=None if when is None else jnp.array(when))
        return jax.lax.psum(local.counts, "data")

    x = jnp.asarray(ARRAYS["normal"][:800], jnp.float32)
    assert np.array_equal(count(x), histograms({"x": x}).counts)


def test_vmap_and_scan_give_leading_axes() -> None:
    x = jnp.asarray(ARRAYS["sparse"][:400], jnp.float32).reshape(4, 100)
    mapped = jax.vmap(lambda row: histograms({"x": row}))(x)
    _, scanned = jax.lax.scan(lambda c, row: (c, histograms({"x": row})), 0, x)
    assert mapped.counts.shape == (4, 1, 128)
    assert np.array_equal(mapped.counts, scanned.counts)
    assert underflow_report(mapped) == underflow_report(histograms({"x": x}))


PARAMS = {"up": np.full((16, 8), 0.1, np.float32), "down": np.full((8, 2), 0.1, np.float32)}


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def step_and_state(policy: str = F16, **options: Any) -> Any:
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), policy)
    state = jaxmp.TrainState.create(params=jax.tree.map(jnp.array, PARAMS), tx=tx)
    return jaxmp.make_train_step(loss_fn, policy, **options), state


@pytest.mark.jax
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=MORE), 2])
def test_a_step_counts_every_so_many_calls(microbatches: int, compilations: Count) -> None:
    """Skipped calls count as calls. What is counted is the unscaled gradient; nothing recompiles.

    The second call of a counting step that is skipped would count again if steps were counted.
    """
    x = RNG.normal(size=(8, 16)).astype(np.float32)
    broken = x.copy()
    broken[0, 0] = np.inf
    step, state = step_and_state(histograms_every=3, microbatches=microbatches)
    plain, twin = step_and_state(microbatches=microbatches)
    counted, compiled = [], []
    for call in range(7):
        batch = broken if call in (3, 4) else x
        grads = jax.jit(jaxmp.grad(loss_fn))(state.params, x) if call == 0 else None
        state, metrics = step(state, batch)
        compiled.append(compilations())
        hist = metrics["histograms"]
        counted.append(bool(np.any(hist.counts)))
        if grads is not None:
            largest = np.abs(grads["down"]).max()
            assert np.asarray(hist.largest)[0] == pytest.approx(largest, rel=0.01)
        twin, _ = plain(twin, batch)
        compilations()
    assert counted == [True, False, False] * 2 + [True]
    assert int(state.skipped if hasattr(state, "skipped") else metrics["skipped"]) == 2
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(twin), strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.exhaustive
def test_a_step_on_a_mesh_as_jax_makes_it() -> None:
    """Explicit axes: the counts are whole, those of overflows too, and the state stays there."""
    mesh = jax.make_mesh((8,), ("data",))
    x = jnp.asarray(RNG.normal(size=(8, 16)), jnp.float32)
    step, state = step_and_state(histograms_every=1)
    expected = step(state, x)[1]["histograms"]
    with jax.set_mesh(mesh):
        step, state = step_and_state(histograms_every=1, count_overflows=True)
        state = jax.device_put(state, jax.P())
        state, metrics = step(state, jax.device_put(x, jax.P("data")))
    assert metrics["histograms"].counts.sum() == 16 * 8 + 8 * 2
    difference = metrics["histograms"].counts - expected.counts
    assert jnp.abs(difference).sum() <= 4  # sums over devices round otherwise
    with jax.set_mesh(mesh):
        _, metrics = step(state, jax.device_put(x.at[0, 3].set(jnp.inf), jax.P("data")))
    # The row that the infinity is multiplied with; behind it `tanh` is 1.
    assert jax.tree.map(int, metrics["nonfinite"]) == {"down": 0, "up": 8}


@pytest.mark.parametrize(
    ("option", "off", "on"), [("histograms_every", None, 100), ("count_overflows", False, True)]
)
def test_without_it_the_step_is_the_same_text(option: str, off: Any, on: Any) -> None:
    texts = []
    for options in ({}, {option: off}, {option: on}):
        step, state = step_and_state(**options)
        texts.append(step.lower(state, jnp.ones((8, 16))).as_text())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]  # the control


@pytest.mark.parametrize("every", [0, -1, True])
def test_every_how_many_calls_is_a_whole_number(every: Any) -> None:
    with pytest.raises(ValueError, match="histograms_every must be the number of calls"):
        jaxmp.make_train_step(loss_fn, F16, histograms_every=every)


def flops(fun: Any, *args: Any) -> float:
    return float(jax.jit(fun).lower(*args).compile().cost_analysis()["flops"])


def test_every_100_calls_cost_less_than_1_percent_of_the_operations() -> None:
    """On 64 rows. By comparisons, as TPUs and GPUs count: a CPU counts with fewer operations.

    XLA counts the operations, and of a loop those of one turn: a histogram has eight. Its
    operations are divided by the 100 calls that it serves.
    """
    width = 128
    params = {"up": jnp.ones((width, 4 * width)), "down": jnp.ones((4 * width, width))}
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), F16)
    state = jaxmp.TrainState.create(params=params, tx=tx)
    step = jaxmp.make_train_step(loss_fn, F16, donate=False)
    whole = step.lower(state, jnp.ones((64, width))).compile().cost_analysis()["flops"]

    def bins(grads: Any) -> Any:
        leaves = jax.tree.leaves(grads)
        return [_bin_of(jax.lax.bitcast_convert_type(x, jnp.uint32)) for x in leaves]

    once = flops(bins, params)
    turn = flops(lambda grads: list(map(_count_by_comparison, bins(grads))), params) - once
    by_comparison, numbers = once + 8 * turn, 2 * 4 * width**2
    assert by_comparison > 2 * 128 * numbers  # it is counted: two for each bin and number
    assert by_comparison / 100 < 0.01 * whole
    assert flops(histograms, params) < 40 * numbers  # here, by scatters


def test_a_plot_shows_each_array(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    tree = {"a": jnp.array([1e-9, 1e-3]), "b[bold]": jnp.array([2.0]), "zeros": jnp.zeros(3)}
    figure = plot_histograms(tree, tmp_path / "h.png", loss_scale=2.0**10)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b[bold]"]
    assert (tmp_path / "h.png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_histograms({"zeros": jnp.zeros(3)})


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_histograms({"a": jnp.ones(3)})
