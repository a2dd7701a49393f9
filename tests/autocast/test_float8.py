"""`mixed_float8` through autocast: which products are in float8, which are not, and why."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import compiled, error, rows, weights
from tests.support.dots import PRODUCTS, equations

pytestmark = [
    pytest.mark.annotations,
    pytest.mark.jax,
    pytest.mark.usefixtures("standard_promotion"),
]
FP8 = "mixed_float8"
E4, E5, B16, F16, F32 = "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32"
X, W, V = rows(32, 64), weights(64, 64), weights(64, 64, seed=2)


def products(fun: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """Of each product the dtypes of its operands, and why it is not in float8."""
    return list(_found(jax.make_jaxpr(fun)(*args).jaxpr, ""))


def _found(jaxpr: Any, around: str) -> Iterator[tuple[str, str]]:
    """The same; programs inside of an equation are in its scopes."""
    for equation in jaxpr.eqns:
        stack = f"{around}/{equation.source_info.name_stack}"
        if equation.primitive.name in (*PRODUCTS, "ragged_dot_general"):
            dtypes = {str(v.aval.dtype) for v in equation.invars[:2]}
            _, _, reason = stack.partition("jaxmp.not_float8:")
            # Behind a reason there are other scopes, or the end of "transpose(jvp(...))".
            yield ",".join(sorted(dtypes)), reason.partition("/")[0].rstrip(")")
        for param in equation.params.values():
            for inner in param if isinstance(param, (tuple, list)) else [param]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _found(inner, stack)


def of_autocast(fun: Callable[..., Any], *args: Any, policy: Any = FP8) -> list[tuple[str, str]]:
    return products(jaxmp.autocast(fun, policy), *args)


def dot(x: Any, w: Any) -> Any:
    return x @ w


def gradient(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda x, w: jnp.sum(fun(x, w) ** 2), (0, 1))


def attention(x: Any, w: Any) -> Any:
    q, k, v = (x @ (w * i) for i in (1.0, 2.0, 3.0))
    return jax.nn.softmax(q @ k.T) @ v


def scoped(name: str) -> Callable[[Any, Any], Any]:
    return jax.named_scope(name)(dot)


def test_products_with_weights_are_in_float8() -> None:
    assert of_autocast(dot, X, W) == [(E4, "")]
    both = sorted(products(gradient(jaxmp.autocast(dot, FP8)), X, W))
    mixed = f"{E4},{E5}"
    assert both == sorted([(E4, ""), (mixed, ""), (mixed, "")])
    assert of_autocast(dot, X, W, policy="mixed_bfloat16") == [(B16, "")]  # control


def test_products_of_activations_are_not() -> None:
    """Attention scores and their use: no weight, so there is nothing to say either."""
    assert of_autocast(attention, X, W) == [(E4, "")] * 3 + [(B16, "")] * 2


LEFT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, str]] = {
    "convolution": (
        lambda x, w: lax.conv(x, w, (1, 1), "SAME"),
        (rows(2, 16, 8, 8), weights(16, 16, 3, 3)), B16, "conv_general_dilated",
    ),
    "ragged_dot": (
        lambda x, w: lax.ragged_dot(x, w, jnp.array([16, 16])),
        (X, weights(2, 64, 64)), B16, "ragged_dot_general",
    ),
    "K": (dot, (rows(32, 24), weights(24, 64)), B16, "K = 24 is no multiple of 16"),
    "N": (dot, (X, weights(64, 50)), B16, "N = 50 is no multiple of 16"),
    "M": (dot, (rows(1, 64), W), B16, "M = 1: one row is read, not multiplied"),
    "vector": (dot, (X, weights(64, 64)[0]), B16, "it is no product of matrices"),
    "head": (scoped("lm_head"), (X, W), B16, "heads"),
    "inside of a head": (scoped("classifier/dense"), (X, W), B16, "heads"),
    "embedding": (scoped("embed"), (X, W), B16, "embeddings"),
    "router": (scoped("moe/router"), (X, W), B16, "routers"),
    # These are no matter of float8: they are float32 under every policy.
    "precision": (functools.partial(jnp.matmul, precision="highest"), (X, W), F32, ""),
    "full_precision": (jaxmp.full_precision(dot), (X, W), F32, ""),
}  # fmt: skip


def none_found(reason: str) -> Any:
    """The warning that no product of a function is in float8, unless another call may have more."""
    if reason == LEFT["M"][3]:
        return nullcontext()
    text = f"asks for products in 8 bits, and autocast finds none to put there: {reason}"
    return pytest.warns(UserWarning, match=re.escape(text)) if reason else nullcontext()


def test_a_product_of_masks_is_none_in_8_bits() -> None:
    """They have one byte, too: the warning that nothing else is in 8 bits stays."""

    def fun(x: Any, w: Any, mask: Any) -> Any:
        return x @ w, jnp.dot(mask, mask.T)

    with none_found("N = 50 is no multiple of 16"):
        jaxmp.autocast(fun, FP8)(X, weights(64, 50), jnp.ones((4, 4), bool))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_out_says_why(name: str) -> None:
    """In the scope of the product, where an audit finds it; its derivatives say so too."""
    fun, args, dtype, reason = LEFT[name]
    with none_found(reason):
        found = of_autocast(fun, *args)
    assert found == [(dtype, reason)]
    total = lambda *args: jnp.sum(jaxmp.autocast(fun, FP8)(*args) ** 2)  # noqa: E731
    with none_found(reason):
        backward = products(jax.grad(total, (0, 1)), *args)
    assert {each for each, _ in backward} == {dtype}
    assert {why for _, why in backward} == {reason}


def stream(x: Any, w: Any) -> Any:
    """A stream that begins with an argument is float32, as an updated weight is."""
    return x + jnp.tanh(x @ w)


def test_float32_activations_are_no_weights() -> None:
    def similarities(x: Any, w: Any) -> Any:
        h = stream(x, w)
        return h @ h.T

    reason = "neither operand is made of arguments alone"
    assert of_autocast(similarities, X, W) == [(E4, ""), (B16, reason)]
    got, want = (jaxmp.autocast(similarities, policy)(X, W) for policy in (FP8, "mixed_bfloat16"))
    assert error(got, want) < 0.03


@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_float32_operands_the_argument_is_the_weight(swapped: bool) -> None:
    """Its gradient is the product that `rowwise_hp` keeps in bfloat16."""

    def last(x: Any, v: Any) -> Any:
        return jnp.sum((v @ x.T if swapped else x @ v) ** 2)

    def gradients(by: int) -> list[tuple[str, str]]:
        fun = lambda x, w, v: last(stream(x, w), v)  # noqa: E731
        fast = jaxmp.autocast(fun, "mixed_float8,products=rowwise_hp")
        return products(jax.grad(fast, by), X, W, V)

    assert [dtypes for dtypes, _ in gradients(2)] == [E4, E4, B16]


def test_products_that_add_nothing_up_are_not() -> None:
    """They are multiplications, and no products of weights."""
    outer = lambda x, w: (jnp.einsum("i,j->ij", x[:, 0], w[0]), x @ w)  # noqa: E731
    assert of_autocast(outer, X, W) == [(E4, "")]


@pytest.mark.parametrize("rows_", [1, 2])
def test_batches_count_as_rows(rows_: int) -> None:
    """Of (batch, 1, features), all but the features are rows: a step of decoding a batch."""
    found = of_autocast(dot, rows(rows_, 1, 64), W)
    assert found == [(E4, "")] if rows_ == 2 else [(B16, LEFT["M"][3])]


def test_float64_stays_alone() -> None:
    with jax.enable_x64(True):
        x, w = (jnp.asarray(a, jnp.float64) for a in (X, W))
        assert of_autocast(dot, x, w) == [("float64", "")]


RULED: dict[str, tuple[list[Any], Any, dict[str, tuple[str, str]]]] = {
    "out of float8": (
        [("blocks/0/*", "mixed_bfloat16")], FP8,
        {"blocks/0/up": (B16, ""), "blocks/1/up": (E4, ""), "lm_head": (B16, "heads")},
    ),
    "a head into float8": ([("lm_head", FP8)], FP8, {"lm_head": (E4, ""), "score": (B16, "heads")}),
    "only one into float8": (
        [("*/up", FP8)], "mixed_bfloat16", {"blocks/0/up": (E4, ""), "blocks/0/down": (B16, "")},
    ),
    "float32": ([("up", "float32")], FP8, {"up": (F32, ""), "down": (E4, "")}),
    "left as traced": ([("up", None)], FP8, {"up": (F32, ""), "down": (E4, "")}),
    "another recipe": (
        [("up", f"{FP8},products=tensorwise:forward=float8_e5m2")], FP8,
        {"up": (E5, ""), "down": (E4, "")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULED)
def test_rules_by_path(name: str) -> None:
    """A rule of the user decides, also about heads; the innermost scope with a rule counts."""
    given, default, want = RULED[name]
    rules = jaxmp.PolicyRules(given, default=default)

    def model(x: Any, w: Any) -> Any:
        return [scoped(scope)(x, w) for scope in want]

    assert of_autocast(model, X, W, policy=rules) == list(want.values())


def test_a_policy_in_the_text_of_a_scope_keeps_its_recipe() -> None:
    """Inner parts that jaxmp marks by a policy's name are read back with their recipe."""
    policy = jaxmp.get_policy("mixed_float8,products=rowwise")
    inner = jax.named_scope(f"jaxmp.policy:{policy}")(dot)
    found = of_autocast(lambda x, w: (inner(x, w), x @ w), X, W, policy="mixed_bfloat16")
    assert found == [(E4, ""), (B16, "")]


def test_what_is_around_stays_in_16_bits() -> None:
    """The bias and what follows see bfloat16, as under `mixed_bfloat16`."""

    def layer(x: Any, w: Any) -> Any:
        return jax.nn.gelu(x @ w + w[0]) @ w

    def elementwise(policy: str) -> list[tuple[str, str]]:
        found = equations(jax.make_jaxpr(jaxmp.autocast(layer, policy))(X, W))
        names = ("add", "tanh", "integer_pow", "mul")
        shapes = [e for e in found if e.primitive.name in names and e.outvars[0].aval.size > 1]
        return [(e.primitive.name, str(e.outvars[0].aval.dtype)) for e in shapes]

    ours, plain = elementwise(FP8), elementwise("mixed_bfloat16")
    assert ("add", B16) in plain
    scaled = [each for each in ours if each not in plain or ours.count(each) > plain.count(each)]
    assert {dtype for _, dtype in ours} == {dtype for _, dtype in plain}
    assert set(scaled) <= {("mul", B16)}  # the one number that scales each product
    got = jax.eval_shape(jaxmp.autocast(layer, FP8), X, W)
    assert got == jax.eval_shape(jaxmp.autocast(layer, "mixed_bfloat16"), X, W)


def test_weights_are_rounded_from_float32() -> None:
    """What is rounded to float8 is the float32 weight, or an argument, and a 16-bit activation."""
    fun = jaxmp.autocast(lambda x, w: (x @ w) @ w.T, FP8)
    encoded = [
        str(e.invars[0].aval.dtype)
        for e in equations(jax.make_jaxpr(fun)(X, W))
        if e.primitive.name == "float8_encode"
    ]
    assert sorted(encoded) == [B16, F32, F32, F32]


@jax.custom_vjp
def own(x: Any, w: Any) -> Any:
    return x @ w


own.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

AROUND: dict[str, Callable[[Any, Any], Any]] = {
    "bare": dot,
    "jit": jax.jit(dot),
    "scan": lambda x, w: lax.scan(lambda c, w: (c @ w, None), x, w[None])[0],
    "checkpoint": jax.checkpoint(dot),
    "cond": lambda x, w: lax.cond(x[0, 0] > -9, dot, lambda x, w: x, x, w),
    "vmap": lambda x, w: jax.vmap(dot, (0, None))(x[None], w)[0],
    "vmap of weights": lambda x, w: jax.vmap(dot)(x[None], w[None])[0],
    "custom_vjp": own,
    "fori_loop": lambda x, w: lax.fori_loop(0, 2, lambda i, c: c @ w, x),
    "transposed weight": lambda x, w: x @ w.T,
    "einsum": lambda x, w: jnp.einsum("bi,ij->bj", x, w),
    "on the left": lambda x, w: (w @ x.T).T,
    "merged": lambda x, w: x @ (w + 0.5 * w[:, :1] * w[:1]),
}


@pytest.mark.parametrize("name", AROUND)
def test_constructs(name: str) -> None:
    """The same product in each, forward and backward, with the result of float32 to 8 %."""
    fun = AROUND[name]
    cast = jaxmp.autocast(fun, FP8, enter_custom_vjp=True)
    forward = products(cast, X, W)
    assert {each for each, _ in forward} == {E4}
    backward = products(gradient(cast), X, W)
    if name == "custom_vjp":  # its own passes: a rule is a program like others
        assert backward.count((E4, "")) >= 1
    else:
        assert {each for each, _ in backward} == {E4, f"{E4},{E5}"}
    got, want = (compiled(f)(X, W) for f in (cast, fun))
    assert got.dtype == want.dtype == jnp.float32
    assert 1e-3 < error(got, want) < 0.08
    got, want = (compiled(gradient(f))(X, W) for f in (cast, fun))
    assert [g.dtype for g in got] == [jnp.float32] * 2
    assert error(got, want) < 0.15


def test_recompute_changes_no_bit() -> None:
    def model(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return x

    plain = jaxmp.autocast(model, FP8)
    want = jax.jit(gradient(plain))(X, W)
    everything = jax.checkpoint_policies.everything_saveable
    saving = functools.partial(jax.checkpoint, policy=everything)
    for again in (jaxmp.recompute, jax.checkpoint, saving):
        cast = again(plain)
        assert {each for each, _ in products(cast, X, W)} == {E4}
        jax.tree.map(np.testing.assert_array_equal, jax.jit(gradient(cast))(X, W), want)
        # Autocast plans what is inside a function of its own a bit differently, also in bfloat16.
        cast = jaxmp.autocast(again(model), FP8)
        assert {each for each, _ in products(cast, X, W)} == {E4}
        assert error(jax.jit(gradient(cast))(X, W), want) < 0.1


def test_what_is_inside_of_a_custom_vjp_says_so() -> None:
    """In both passes; none of it counts as put in float8."""
    fun = lambda x, w: own(x, w) @ w  # noqa: E731
    fast = jaxmp.autocast(fun, FP8, kernels="traced")
    report = jaxmp.audit(jax.grad(lambda *args: fast(*args).sum()), X, W)
    assert {(row.reason, row.count) for row in report.left_out} == {
        ("inside of a jax.custom_vjp", 3)
    }
    narrow = lambda x, w: own(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))  # noqa: E731
    with none_found("inside of a jax.custom_vjp"):
        jaxmp.autocast(narrow, FP8, kernels="traced")(X, W)


def test_a_function_of_16_bit_params_says_that_nothing_is_in_float8() -> None:
    low = W.astype(jnp.bfloat16)
    with none_found("operands have 16 bits in the function itself. jaxmp.audit has"):
        jaxmp.autocast(lambda x, w: x.astype(w.dtype) @ w, FP8)(X, low)
    jaxmp.autocast(lambda x, w, v: (x.astype(w.dtype) @ w) @ v, FP8)(X, low, W)  # one is


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_thresholds_of_a_gpu(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`minimum="auto"` leaves out what is slower there, on a GPU alone; None leaves out nothing."""
    shapes = {
        "tensorwise": [(4096, 1024, False), (4112, 1024, True), (64, 1040, True), (64, 64, False)],
        "rowwise": [
            (8192, 2048, False), (1024, 8192, False), (2048, 4096, False), (2064, 4096, True),
            (2048, 4112, True), (1040, 4112, True),
        ],
    }  # fmt: skip

    def found(minimum: str) -> list[bool]:
        policy = f"mixed_float8,products={recipe}:minimum={minimum}"
        fun = jaxmp.autocast(lambda x, w: x @ w, policy)
        said = []
        for k, n, _ in shapes[recipe]:
            structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, k), (k, n))]
            ((dtypes, why),) = products(fun, *structs)
            assert why == ("" if dtypes == E4 else f"K = {k}, N = {n} is slower in 8 bits")
            said.append(dtypes == E4)
        return said

    everything = [True] * len(shapes[recipe])
    assert found("auto") == found("none") == everything
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with none_found(f"K = {shapes[recipe][0][0]}"):
        assert found("auto") == [is_faster for *_, is_faster in shapes[recipe]]
    assert found("none") == everything
