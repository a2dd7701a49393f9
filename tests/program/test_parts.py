"""Equal parts of a program run as one jitted function, and change nothing but the time to trace.

That the same operations run is said of a hundred programs in `package/test_digests.py`. Here is
what makes parts equal or not, and that JAX's transformations go through them.
"""

import collections
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata

import jaxmp
from jaxmp._program import compat
from jaxmp._program.op_classes import CONTRACTIONS
from jaxmp._program.program import PART, equations_in, is_part_call
from tests.support.compilations import Count
from tests.support.same_operations import hash_of

pytestmark = pytest.mark.jax

EXACT, FAST = (jaxmp.Policy(*["float32"] * 3, precision=x) for x in ("highest", "tensorfloat32"))
BF16, FLOAT8 = "mixed_bfloat16", "mixed_float8"
WIDTH = 8
EXACTLY = {"xla_allow_excess_precision": False}


def params_of(layers: int, widths: Any = None) -> list[Any]:
    widths = widths or [WIDTH] * (layers + 1)
    rng = np.random.default_rng(0)
    return [
        {"w": (rng.normal(size=shape) / 3).astype(np.float32), "scale": np.ones((1, shape[0]), "f")}
        for shape in itertools.pairwise(widths)
    ]


def layer(p: Any, x: Any) -> Any:
    x = x * p["scale"] / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return jax.nn.relu(checkpoint_name(x @ p["w"], "product"))


def loss(params: Any, x: Any, layer: Callable[..., Any] = layer) -> Any:
    for i, p in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = layer(p, x)
    return jnp.mean(x**2)


X = np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)


def parts_of(fun: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """How many calls of parts there are, and of how many functions."""
    calls = [x for x in equations_in([jax.make_jaxpr(fun)(*args)]) if is_part_call(x)]
    return len(calls), len({id(x.params["jaxpr"]) for x in calls})


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, operations run one by one."""
    jax.clear_caches()  # JAX would give back what it has traced before
    monkeypatch.setattr(compat, "is_staged", lambda: False)


def gradients(f: Any, **options: Any) -> Any:
    return jaxmp.value_and_grad(jaxmp.autocast(f, BF16), **options)


@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
def test_a_layer_is_traced_once(reduce_dtype: Any) -> None:
    fun = gradients(loss, reduce_dtype=reduce_dtype)
    (calls, functions), (more, as_many) = (parts_of(fun, params_of(n), X) for n in (6, 12))
    assert 0 < functions == as_many
    assert more - calls >= 6 * 2  # forward and backward


def test_slices_of_stacked_weights() -> None:
    """They are all different, and stand before the layers that are equal."""

    def stacked(w: Any, x: Any) -> Any:
        x = x @ w[6, 0]
        for i in range(6):
            x = (jnp.tanh(x @ w[i, 0]) * 2.0 + x) @ w[i, 1] + x * 2.0
        return jnp.tanh(x)

    fun, w = jaxmp.autocast(stacked, BF16), np.ones((7, 2, WIDTH, WIDTH), "f")
    assert parts_of(fun, w, X) == (6, 1)


def test_a_tied_weight_is_cast_once() -> None:
    """The first part that casts it hands the cast on."""
    tied = lambda params, x: loss([params[0]] * 6, layer(params[1], x))  # noqa: E731
    program = jax.make_jaxpr(jaxmp.autocast(tied, BF16))(params_of(2), X)
    assert any(map(is_part_call, equations_in([program])))
    casts = [x for x in equations_in([program]) if x.primitive.name == "convert_element_type"]
    assert sum(x.invars[0].aval.shape == (WIDTH, WIDTH) for x in casts) == 2  # one of each weight


def test_where_nothing_repeats_there_are_no_parts() -> None:
    different = params_of(6, [WIDTH, 9, 10, 11, 12, 13, 14])
    assert parts_of(gradients(loss), different, X) == (0, 0)


def with_factors(i: int, p: Any, x: Any) -> Any:
    return layer(p, x) * (1 + i % 2)


def with_constants(i: int, p: Any, x: Any) -> Any:
    return layer(p, x) + np.full((1, WIDTH), i, "f")


def with_other_operands(i: int, p: Any, x: Any) -> Any:
    """A bias that is a param, or computed; operands in 16 bits, or in float32."""
    x = layer(p, x) + (p["scale"] if i % 2 else jnp.tanh(p["scale"] @ p["w"]))
    return (jnp.exp(x) if i % 2 else jnp.tanh(x)) @ p["w"]


def with_policies(i: int, p: Any, x: Any) -> Any:
    return (jaxmp.full_precision(layer) if i % 2 else layer)(p, x)


def with_callbacks(i: int, p: Any, x: Any) -> Any:
    x = layer(p, x)
    return x + jax.pure_callback(lambda x: x * (1 + i % 2), x, lax.stop_gradient(x))


def with_loops(i: int, p: Any, x: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, x: layer(p, x) + i % 2, x)


def with_checkpoints(i: int, p: Any, x: Any) -> Any:
    return jax.checkpoint(lambda x: layer(p, x) * (1 + i % 2))(x)


def with_branches(i: int, p: Any, x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda x: layer(p, x), lambda x: x * (1 + i % 2), x)


def with_own_derivatives(i: int, p: Any, x: Any) -> Any:
    @jax.custom_jvp
    def own(x: Any) -> Any:
        return jnp.sin(x)

    own.defjvp(lambda x, t: (own(x[0]), t[0] * (1 + i % 2)))
    return own(layer(p, x))


def sign_with(rule: Callable[[Any, Any], Any]) -> Any:
    """The function is JAX's, as of `relu`; its derivative is not."""
    sign = jax.custom_jvp(jnp.sign)
    sign.defjvp(lambda x, t: (sign(*x), rule(x[0], t[0])))
    return sign


def by_factor(factor: float) -> Any:
    return sign_with(lambda x, t: factor * t)


def by_constant(factor: float) -> Any:
    return sign_with(lambda x, t: np.full(x.shape, factor, "f") * t)


def by_callback(factor: float) -> Any:
    return sign_with(
        lambda x, t: jax.pure_callback(lambda x: x * 0 + factor, x, lax.stop_gradient(x)) * t
    )


def by_inner_rule(factor: float) -> Any:
    inner = by_factor(factor)
    return sign_with(lambda x, t: inner(x * 2.0) * t)


def by_literal(factor: float) -> Any:
    hypot = jax.custom_jvp(jnp.hypot)
    hypot.defjvp(lambda x, t: (jnp.hypot(*x), t[0] * hypot(x[0], np.float32(factor))))
    return lambda x: hypot(x, np.float32(0.5))


def by_what_is_zero(factor: float) -> Any:
    def rule(x: Any, t: Any) -> Any:
        (x, y), (t, u) = x, t
        is_zero = isinstance(u, jax.custom_derivatives.SymbolicZero)
        return hypot(x, y), t * (factor if is_zero else 1.0)

    hypot = jax.custom_jvp(jnp.hypot)
    hypot.defjvp(rule, symbolic_zeros=True)
    return lambda x: hypot(x, np.ones((3, WIDTH), "f"))


def by_scope(factor: float) -> Any:
    def rule(x: Any, t: Any) -> Any:
        with jax.named_scope(f"factor_{factor}"):
            return (x @ np.eye(WIDTH, dtype="f")) * t

    return sign_with(rule)


RULES = [by_factor, by_constant, by_callback, by_inner_rule, by_literal, by_what_is_zero, by_scope]


@pytest.mark.filterwarnings("ignore:rules that match nothing")  # they match in derivatives
@pytest.mark.programs(40, reason="two second derivatives")
@pytest.mark.parametrize("make", RULES)
def test_derivatives_that_differ(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one function of JAX, by what its rule computes, holds, or is named."""
    own = [make(1.0), make(10.0)]

    def kind(i: int, p: Any, x: Any) -> Any:
        return own[i % 2](layer(p, x) * 2.0 + x) + x

    rules = [("factor_1.0", "float32")] if make is by_scope else []
    policy = jaxmp.PolicyRules(rules, default=BF16)
    fun = jaxmp.autocast(lambda *args: unlike_loss(kind, *args), policy)

    def found() -> Any:
        slope = lambda x: jnp.sum(jax.grad(fun, 1)(params_of(4), x) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(slope), compiler_options=EXACTLY)(X)

    program = jax.make_jaxpr(fun)(params_of(4), X)
    assert any(map(is_part_call, equations_in([program])))
    shared = found()
    one_by_one(monkeypatch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), shared, found())


def with_signed_zeros(i: int, p: Any, x: Any) -> Any:
    zero, x = -0.0 if i % 2 else 0.0, layer(p, x)
    return x + lax.composite(lambda x, s: x + s, "zero")(lax.stop_gradient(x), s=zero)


def with_rows(i: int, p: Any, x: Any) -> Any:
    """A param, or numbers."""
    row = p["scale"] if i % 2 else jnp.arange(WIDTH, dtype=jnp.float32)[None] / WIDTH
    return jnp.tanh(x @ p["w"]) * row * 2.0 + 1.0


def with_turns(i: int, p: Any, x: Any) -> Any:
    """A product reads one of two values."""
    a = jnp.tanh(x @ p["w"]) * 2.0 + 1.0
    b = jnp.sin(a) * 3.0 + 1.0
    with jax.named_scope("second"):
        return jnp.cos((a if i % 2 else b) @ p["w"]) * 2.0 + 1.0 + a + b


SCALES = [jax.jit(lambda x, c=c: jnp.tanh(x @ (np.eye(WIDTH, dtype="f") * c)) * 2) for c in (1, 3)]


def with_inner_constants(i: int, p: Any, x: Any) -> Any:
    return jnp.tanh(SCALES[i % 2](x @ p["w"]) * 2.0 + 1.0) * 3.0


def with_randomness(i: int, p: Any, x: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), i), 0.5, x.shape)
    return layer(p, jnp.where(keep, x, 0))


UNLIKE = [
    with_factors,
    with_constants,
    with_other_operands,
    with_policies,
    with_checkpoints,
    with_branches,
    with_own_derivatives,
    with_signed_zeros,
    with_rows,
    with_turns,
    with_inner_constants,
    with_randomness,
]


def unlike_loss(kind: Any, params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        x = kind(i, p, layer(p, x))
    return jnp.mean(x**2)


@pytest.mark.parametrize("kind", UNLIKE)
@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
def test_layers_that_differ(kind: Any, reduce_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a factor, a policy, a function, or the programs of their loops: each does its own."""
    fun = gradients(lambda *args: unlike_loss(kind, *args), reduce_dtype=reduce_dtype)
    shared = jax.make_jaxpr(fun)(params_of(6), X)
    assert any(map(is_part_call, equations_in([shared])))
    one_by_one(monkeypatch)
    assert hash_of(shared) == hash_of(jax.make_jaxpr(fun)(params_of(6), X))


@pytest.mark.parametrize("kind", [with_loops, with_callbacks])
def test_gradients_of_layers_that_differ(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: the hash knows no order of what a loop carries backward, and no callbacks."""

    def found() -> Any:
        fun = jax.grad(jaxmp.autocast(lambda *args: unlike_loss(kind, *args), BF16))
        return jax.jit(fun, compiler_options=EXACTLY)(params_of(6), X)

    shared = found()
    one_by_one(monkeypatch)
    jax.tree.map(np.testing.assert_array_equal, shared, found())


def test_the_hash_sees_one_other_factor() -> None:
    """The positive control of these tests."""
    programs = [jax.make_jaxpr(lambda x, f=f: jnp.sin(x) * f)(X) for f in (1.0, 2.0, 2.0)]
    one, two, again = map(hash_of, programs)
    assert one != two == again


def test_weak_results_of_layers() -> None:
    """Two checkpoints that differ in a weakly typed number that they return."""

    def numbers(x: Any) -> list[Any]:
        ones = (1.0, jnp.float64(1.0), 1.0, jnp.float64(1.0))
        inner = [jax.checkpoint(lambda x, one=one: (jnp.sin(x) * 2 + 1, one)) for one in ones]
        results = []
        for f in inner:
            x, one = f(x)
            results.append(one)
        return results

    with jax.enable_x64(True):
        for fun in (numbers, jaxmp.autocast(numbers, BF16), jaxmp.recompute(numbers)):
            weak = [x.weak_type for x in jax.make_jaxpr(fun)(X).out_avals]
            assert weak == [True, False, True, False]


@pytest.mark.parametrize("different", [1, 2])
def test_a_part_has_one_context(different: int) -> None:
    """Such as the host, where a call runs as a whole; here a mark, which newer JAX has too."""

    def marked(params: Any, x: Any) -> Any:
        for i, p in enumerate(params):
            with set_xla_metadata(mark=str(i % different)):
                y = jnp.sin(jnp.tanh(x @ p["w"]) * 2 + 1)
            x = jnp.cos(y) * 3.0 + 1.0 + x
        return x

    program = jax.make_jaxpr(jaxmp.autocast(marked, BF16))(params_of(6), X)
    calls = [x for x in program.eqns if is_part_call(x)]
    marks = set()
    for call in calls:
        inner = {str(x.ctx.xla_metadata) for x in call.params["jaxpr"].eqns}
        assert inner == {str(call.ctx.xla_metadata)}
        marks |= inner
    assert len(marks) == 1 + different


def test_kernels_in_loops() -> None:
    """The float32 bodies are equal, and those in 16 bits are not."""

    def looped(p: Any, x: Any, dtype: Any) -> Any:
        kernel = jax.ffi.ffi_call("product", jax.ShapeDtypeStruct(x.shape, dtype))
        turn = lambda x, _: (kernel(x.astype(dtype), p["w"].astype(dtype)).astype(x.dtype), None)  # noqa: E731
        return lax.scan(turn, x, length=2)[0]

    def kernels(params: Any, x: Any) -> Any:
        for i, p in enumerate(params):
            x = looped(p, jnp.tanh(x * 2 + 1), x.dtype if i < 3 else np.float32)
        return x

    program = jax.make_jaxpr(jaxmp.autocast(kernels, BF16, kernels="low"))(params_of(6), X)
    found = [x for x in equations_in([program]) if x.primitive.name == "ffi_call"]
    dtypes = [x.invars[0].aval.dtype.name for x in found]
    assert dtypes == ["bfloat16"] * 3 + ["float32"] * 3


def test_transposed_products() -> None:
    """Those that JAX transposes itself are in another form than what exporters read."""

    def linear(x: Any) -> Any:
        for p in params_of(6):
            x = (x @ p["w"]) * 2 + x
        return x

    fun = jaxmp.autocast(linear, BF16)
    transposed = jax.make_jaxpr(lambda y: jax.linear_transpose(fun, X)(y))(X)
    names = [x.primitive.name for x in equations_in([transposed])]
    assert names.count("low_precision_product") == 6


def test_weights_that_move_from_layer_to_layer() -> None:
    """What a weight was before its moves does not pile up in the arguments of parts."""

    def moving(p: Any, x: Any, layers: int) -> Any:
        for _ in range(layers):
            p = p.T
            x = jnp.tanh(x @ p) * 2 + 1
        return x

    def arguments(layers: int) -> int:
        fun = jaxmp.autocast(lambda p, x: moving(p, x, layers), BF16)
        program = jax.make_jaxpr(fun)(params_of(1)[0]["w"], X)
        return sum(len(x.invars) for x in equations_in([program]) if is_part_call(x))

    assert arguments(20) <= 2.5 * arguments(10)


def counted(p: Any, x: Any) -> Any:
    """What it returns says nothing of the dtypes inside."""
    best = lambda _, n: n + jnp.argmax(x @ p["w"])  # noqa: E731
    n = lax.fori_loop(0, 2, best, jnp.int32(0)) * 2 + 1
    n = jnp.sum(jnp.tanh(x) > p["scale"]) * n + 1
    return x + lax.stop_gradient(n.astype(x.dtype) % 2)


def with_activations(p: Any, x: Any) -> Any:
    """They are parts of their own: products of one layer are not as those of the others."""
    x = x @ p["w"]
    with jax.named_scope("activations"):
        return jnp.tanh(x) * x + x * 2.0


@pytest.mark.parametrize(
    ("default", "other", "layer"),
    [
        (BF16, "float32", layer),
        (BF16, "float32", counted),
        (BF16, "float32", with_activations),
        (FLOAT8, BF16, layer),
        (FLOAT8, "mixed_int8", layer),
        (EXACT, FAST, layer),
    ],
)
def test_rules_by_path(
    default: Any, other: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer has another policy, by its name alone."""
    fun = jaxmp.autocast(
        lambda *args: loss(*args, layer),
        jaxmp.PolicyRules([("layer_1", other)], default=default),
    )
    args = params_of(6, [16] * 7), np.ones((3, 16), "f")
    program = jax.make_jaxpr(fun)(*args)
    assert parts_of(fun, *args)[0] > 0
    one_by_one(monkeypatch)
    alone = jax.make_jaxpr(fun)(*args)
    assert sorted(kinds_of_products(program).values()) == [1, 5]
    assert hash_of(program) == hash_of(alone)


def kinds_of_products(program: Any) -> collections.Counter[Any]:
    products = [x for x in equations_in([program]) if x.primitive.name in CONTRACTIONS]
    return collections.Counter((str(x.invars[0].aval), x.params.get("precision")) for x in products)


def called_from_many_lines(params: Any, x: Any) -> Any:
    x = layer(params[0], x)
    x = layer(params[1], x)
    x = layer(params[2], x)
    x = layer(params[3], x)
    for p in params[4:]:
        x = layer(p, x)
    return jnp.mean(x**2)


def layer_on_other_lines(p: Any, x: Any) -> Any:
    x = x * p["scale"] / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return jax.nn.relu(checkpoint_name(x @ p["w"], "product"))


def on_many_lines(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        x = (layer_on_other_lines if i > len(params) / 2 else layer)(p, x)
    return jnp.mean(x**2)


def in_many_scopes(params: Any, x: Any) -> Any:
    for i, p in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("first"):
                x = x * 2.0 + jnp.sin(x) * jnp.cos(x)
            with jax.named_scope("odd" if i % 2 else "even"):
                x = layer(p, x)
    return jnp.mean(x**2)


@pytest.mark.parametrize("fun", [loss, called_from_many_lines, on_many_lines, in_many_scopes])
def test_reports_name_every_layer(fun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scopes and lines are those of each call; the report is as without parts."""
    params = params_of(8)
    assert parts_of(gradients(fun), params, X)[0] > 0
    shared = str(jaxmp.audit(gradients(fun), params, X))
    one_by_one(monkeypatch)
    assert shared == str(jaxmp.audit(gradients(fun), params, X))


def names_in_profiles() -> set[str]:
    text = jax.jit(gradients(loss)).lower(params_of(5), X).compile().as_text()
    return set(re.findall(r'op_name="([^"]*)"', text))


def test_profiles_name_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = names_in_profiles()
    one_by_one(monkeypatch)
    alone = names_in_profiles()
    assert {name.replace(f"/jit({PART})", "") for name in shared} >= alone
    assert "jit(loss)/transpose(jvp(jaxmp.autocast))/layer_3/mul" in alone  # a positive control


POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize(
    "policy",
    [
        POLICIES.everything_saveable,
        POLICIES.nothing_saveable,
        POLICIES.dots_saveable,
        POLICIES.save_only_these_names("product"),
    ],
)
def test_checkpoints_keep_what_they_kept(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around layers that run as parts, by the names and products inside of them."""
    fun = jax.checkpoint(jaxmp.autocast(loss, BF16), policy=policy)
    assert parts_of(fun, params_of(4), X)[0] > 0
    shared = jaxmp.audit(fun, params_of(4), X).residual_bytes
    one_by_one(monkeypatch)
    assert parts_of(fun, params_of(4), X)[0] == 0
    assert shared == jaxmp.audit(fun, params_of(4), X).residual_bytes


TRANSFORMATIONS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "vmap of gradients": lambda f: jax.vmap(jax.grad(f), (None, 0)),
    "forward mode": lambda f: lambda p, x: jax.jvp(lambda x: f(p, x), (x,), (x,)),
    "second derivatives": lambda f: jax.hessian(f, 1),
    "recomputed": lambda f: jax.grad(jaxmp.recompute(f)),
    "in a scan": lambda f: lambda p, x: lax.scan(lambda c, x: (c + f(p, x), c), 0.0, x[None])[0],
}


@pytest.mark.programs(40, reason="a transformation and its control, each in one jit")
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fun, params = TRANSFORMATIONS[name](jaxmp.autocast(loss, BF16)), params_of(4)
    x = X[:, None] if "vmap" in name else X
    shared = jax.jit(fun, compiler_options=EXACTLY)(params, x)
    one_by_one(monkeypatch)
    alone = jax.jit(lambda *args: fun(*args), compiler_options=EXACTLY)(params, x)
    jax.tree.map(np.testing.assert_array_equal, shared, alone)


def test_effects_stay_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def printing(p: Any, x: Any) -> Any:
        jax.debug.print("{}", p["number"], ordered=True)
        return layer(p, x)

    params = [p | {"number": np.int32(i)} for i, p in enumerate(params_of(4))]
    jax.block_until_ready(jax.jit(jaxmp.autocast(lambda *x: loss(*x, printing), BF16))(params, X))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["0", "1", "2", "3"]


def test_an_exported_gradient_runs() -> None:
    """One function is called for many layers."""
    fun = jax.jit(gradients(loss))
    params = params_of(12)
    exported = jax.export.export(fun)(params, X)
    jax.tree.map(np.testing.assert_array_equal, exported.call(params, X), fun(params, X))


def test_an_export_with_two_sizes() -> None:
    def layers_of_both(params: Any, x: Any, y: Any) -> Any:
        for p in params:
            x, y = (jnp.tanh(z @ p["w"] + p["scale"]) * 2.0 + z for z in (x, y))
        return x, y

    sizes = jax.export.symbolic_shape("q, k")
    types = [jax.ShapeDtypeStruct((size, WIDTH), jnp.float32) for size in sizes]
    fun = jax.jit(jaxmp.autocast(layers_of_both, BF16))
    exported = jax.export.export(fun)(params_of(4), *types)
    args = params_of(4), X, X[:2]
    jax.tree.map(np.testing.assert_array_equal, exported.call(*args), fun(*args))


def test_what_runs_in_a_part() -> None:
    """Derivatives of JAX, comparisons and lookups do not cut a layer in two."""

    def mixed(p: Any, x: Any) -> Any:
        x = jax.nn.relu(x @ p["w"])
        x = jnp.where(x > 0.5, x, x * 0.1) + x[:, np.arange(WIDTH)[::-1]]
        return jnp.tanh(x) * 2.0

    fun = jaxmp.autocast(lambda *args: loss(*args, mixed), BF16)
    assert parts_of(fun, params_of(6), X)[1] <= 2


@pytest.mark.programs(400, reason="eager gradients are what it is about")
def test_outside_of_jit_nothing_is_compiled_twice(compilations: Count) -> None:
    """A function for each part would be new in each call."""
    fun, params = jax.grad(jaxmp.autocast(loss, BF16)), params_of(4)
    fun(params, X)
    before = compilations()
    fun(params, X)
    assert compilations() == before


def test_an_update_is_traced_once() -> None:
    """Whatever the ways to skip it; by its own trace, optax takes as long as a model."""
    updates = []

    def counted(updates_: Any, state: Any, params: Any = None) -> Any:
        updates.append(1)
        return updates_, state

    inner = optax.GradientTransformation(lambda params: (), counted)
    tx = jaxmp.mixed_precision(inner, BF16)
    state = jax.eval_shape(lambda p: jaxmp.TrainState.create(params=p, tx=tx), params_of(2))
    step = jaxmp.make_train_step(loss)
    updates.clear()
    step.trace(state, X)
    assert len(updates) == 1
