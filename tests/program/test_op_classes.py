"""The table of operations: complete, without doubles, and what the overrides of a call do to it."""

import collections
import functools
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmp
from jaxmp._program import op_classes
from jaxmp._program.op_classes import _TABLE, CLASSES, CONTRACTIONS, COSTS, OpClass
from jaxmp._program.op_lists import OpLists, op_lists
from tests.support.dots import count_dots, equations

pytestmark = [pytest.mark.jax, pytest.mark.annotations]

# Has a rule of its own, outside of the table: a cast of the program's.
OWN_RULE = {"convert_element_type"}

BF16 = "mixed_bfloat16"
X = jnp.linspace(0.1, 1.0, 16).reshape(4, 4)


PRIMITIVES_OF_JAX = """
import jax.experimental.pallas
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad

listed = [each for each in vars(primitives).values() if isinstance(each, Primitive)]
print(*{each.name for each in (*listed, *ad.primitive_jvps, *ad.primitive_transposes)})
"""


@functools.cache
def primitives_of_jax() -> set[str]:
    """The names of all primitives that JAX knows derivatives of, or lists.

    In a process of their own: other libraries add primitives to JAX's.
    """
    command = [sys.executable, "-c", PRIMITIVES_OF_JAX]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def check_complete(names: Iterable[str], classes: dict[str, OpClass]) -> None:
    """Fails if a primitive has no class, and says what to do about it."""
    new = sorted(set(names) - set(classes) - OWN_RULE)
    if new:
        pytest.fail(
            f"jax {jax.__version__} has primitives that jaxmp/_program/op_classes.py has no class "
            f"for: {', '.join(new)}. Until they are in its table they run as they were traced. "
            "Read what each does, and add it to the line of its like; to ALONE if in doubt"
        )


def test_every_primitive_has_a_class() -> None:
    names = primitives_of_jax()
    assert {"dot_general", "scan", "pallas_call", "exp", "scatter-add"} <= names
    check_complete(names, CLASSES)


def test_a_primitive_without_a_class_is_named() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"no class for: fresh, newer\. Until .* ALONE"):
        check_complete({"exp", "newer", "fresh"}, CLASSES)
    lacking = {name: each for name, each in CLASSES.items() if name != "tanh"}
    with pytest.raises(pytest.fail.Exception, match="no class for: tanh"):
        check_complete(primitives_of_jax(), lacking)


def doubles(table: dict[OpClass, tuple[str, ...]]) -> set[str]:
    counts = collections.Counter(
        name for lines in table.values() for line in lines for name in line.split()
    )
    return {name for name, count in counts.items() if count > 1}


def test_no_name_is_in_the_table_twice() -> None:
    assert set(_TABLE) == set(OpClass)
    assert not doubles(_TABLE)
    more = {**_TABLE, OpClass.PROMOTE: (*_TABLE[OpClass.PROMOTE], "exp sub")}
    assert doubles(more) == {"exp", "sub"}


def test_the_other_lists_are_of_the_table() -> None:
    assert {CLASSES[name] for name in CONTRACTIONS} == {OpClass.LOWER}
    sets = {key: value for key, value in vars(op_classes).items() if isinstance(value, frozenset)}
    assert "CONTRACTIONS" in sets
    # Primitives without derivatives, and those of other libraries, are in no class.
    unlisted = {"psend", "tpu_custom_call", *op_classes.FOREIGN_CALLS}
    unknown = {key: value - COSTS.keys() - unlisted for key, value in sets.items()}
    assert not any(unknown.values()), unknown


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("lists", "error", "told"),
    [
        ({"lower": "tanh"}, TypeError, r"got a string\. Write lower=\['tanh'\]"),
        ({"float32": [jnp.tanh]}, TypeError, "float32 must list names of primitives such as 'exp'"),
        ({"promote": [1]}, TypeError, "got 1"),
        ({"lower": ["tanh"], "float32": ["tanh"]}, ValueError, "'tanh' is in two of the lists"),
        ({"promote": ["exp"], "float32": ["exp"]}, ValueError, "'exp' is in two of the lists"),
    ],
)
def test_lists_that_are_none(lists: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        op_lists(**lists)
    with pytest.raises(error, match=told):
        jaxmp.autocast(jnp.tanh, BF16, **lists)


def test_lists_that_are_fine() -> None:
    assert op_lists() == OpLists()
    assert op_lists(lower=("tanh", "tanh"), float32=iter(["exp2"])).overrides == (
        ("tanh", OpClass.LOWER),
        ("exp2", OpClass.FLOAT32),
    )


def test_the_innermost_name_decides() -> None:
    lists = op_lists(lower=["outer"], float32=["inner"], promote=["exp"])
    assert lists.of("sin", ["outer"]) is OpClass.LOWER
    assert lists.of("sin", ["outer", "inner"]) is OpClass.FLOAT32
    assert lists.of("sin", ["inner", "outer"]) is OpClass.LOWER
    assert lists.of("exp", ["outer", "inner"]) is OpClass.PROMOTE
    assert lists.of("sin") is CLASSES["sin"]
    assert lists.of("unheard_of") is None


@pytest.mark.parametrize("name", ["scan", "cholesky", "pallas_call"])
def test_what_has_no_dtype_to_choose(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' cannot be in lower: autocast does not choose"):
        op_lists(lower=[name])


def dtypes(fun: Callable[..., Any], primitive: str, policy: str = BF16, **lists: Any) -> list[str]:
    """In which dtypes a primitive runs under autocast: those of its first operands."""
    cast = jaxmp.autocast(fun, policy, output="computed", **lists)
    return [
        str(each.invars[0].aval.dtype)
        for each in equations(jax.make_jaxpr(cast)(X, X))
        if each.primitive.name == primitive
    ]


def after_a_product(fun: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, w: fun(x @ w)


@pytest.mark.parametrize(
    ("fun", "primitive", "without", "lists", "with_them"),
    [
        (after_a_product(jnp.exp), "exp", "float32", {"promote": ["exp"]}, "bfloat16"),
        (after_a_product(jnp.exp), "exp", "float32", {"lower": ["exp"]}, "bfloat16"),
        (after_a_product(jnp.tanh), "tanh", "bfloat16", {"float32": ["tanh"]}, "float32"),
        # Of a parameter: what is lower is cast, what promotes follows it.
        (lambda x, w: jnp.tanh(x), "tanh", "float32", {"lower": ["tanh"]}, "bfloat16"),
        (lambda x, w: jnp.exp(x), "exp", "float32", {"promote": ["exp"]}, "float32"),
        (lambda x, w: x @ w, "dot_general", "bfloat16", {"float32": ["dot_general"]}, "float32"),
        (lambda x, w: x @ w, "dot_general", "bfloat16", {"promote": ["dot_general"]}, "float32"),
        (after_a_product(jax.nn.silu), "logistic", "bfloat16", {"float32": ["silu"]}, "float32"),
        (after_a_product(jax.nn.relu), "max", "bfloat16", {"float32": ["relu"]}, "float32"),
        (after_a_product(lax.cumsum), "cumsum", "float32", {"lower": ["cumsum"]}, "bfloat16"),
    ],
)
def test_what_an_override_does(
    fun: Callable[..., Any], primitive: str, without: str, lists: dict[str, Any], with_them: str
) -> None:
    assert dtypes(fun, primitive) == [without]
    assert dtypes(fun, primitive, **lists) == [with_them]
    # The name of something else changes nothing.
    others = {key: ["sqrt"] for key in lists}
    assert dtypes(fun, primitive, **others) == [without]


def test_an_override_holds_inside_of_everything() -> None:
    def fun(x: Any, w: Any) -> Any:
        def turn(carry: Any, w: Any) -> Any:
            return jax.checkpoint(jax.jit(lambda c: jnp.tanh(c @ w)))(carry), None

        return lax.scan(turn, x, jnp.stack([w, w]))[0]

    assert dtypes(fun, "tanh") == ["bfloat16"]
    assert dtypes(fun, "tanh", float32=["tanh"]) == ["float32"]

    def grad(**lists: Any) -> set[str]:
        cast = jax.grad(lambda x, w: jnp.sum(jaxmp.autocast(fun, BF16, **lists)(x, w)))
        found = equations(jax.make_jaxpr(cast)(X, X))
        return {str(e.invars[0].aval.dtype) for e in found if e.primitive.name == "tanh"}

    assert grad() == {"bfloat16"}
    assert grad(float32=["tanh"]) == {"float32"}


@jax.jit
def small(x: Any) -> Any:
    return jnp.tanh(x)


@jax.jit
def around(x: Any) -> Any:
    return jax.nn.sigmoid(small(x))


def test_a_function_within_a_function() -> None:
    fun = after_a_product(around)

    def found(**lists: Collection[str]) -> tuple[list[str], list[str]]:
        return dtypes(fun, "tanh", **lists), dtypes(fun, "logistic", **lists)

    assert found() == (["bfloat16"], ["bfloat16"])
    assert found(float32=["around"]) == (["float32"], ["float32"])
    assert found(float32=["small"]) == (["float32"], ["float32"])  # logistic follows
    assert found(float32=["around"], lower=["small"]) == (["bfloat16"], ["float32"])
    assert found(float32=["around"], lower=["logistic"]) == (["float32"], ["bfloat16"])


@jax.jit
def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@jax.jit
def looped(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, carry: jnp.sin(jnp.exp(carry)), x)


def test_a_function_that_stays_one() -> None:
    """What multiplies or loops is not inlined; its name holds for what is in it all the same."""
    assert dtypes(layer, "tanh") == dtypes(layer, "dot_general") == ["bfloat16"]
    assert dtypes(layer, "tanh", float32=["layer"]) == ["float32"]
    assert dtypes(layer, "dot_general", float32=["layer"]) == ["float32"]
    fun = after_a_product(looped)
    assert dtypes(fun, "exp") == ["float32"]
    assert dtypes(fun, "exp", lower=["looped"]) == ["bfloat16"]


def test_the_result_is_what_the_dtype_gives() -> None:
    """Not only the jaxpr: 16-bit exponentials overflow where float32 ones do not."""
    x = jnp.array([[12.0, 0.0]])

    def fun(x: Any, w: Any) -> Any:
        return jnp.log(jnp.exp(x @ w))

    exact = jaxmp.autocast(fun, "mixed_float16")(x, jnp.ones((2, 1)))
    assert exact.item() == pytest.approx(12, rel=1e-6)
    lost = jaxmp.autocast(fun, "mixed_float16", lower=["exp"])(x, jnp.ones((2, 1)))
    assert lost.item() == jnp.inf
    assert count_dots(jaxmp.autocast(fun, "mixed_float16", float32=CONTRACTIONS), X, X) == {
        "float32": 1
    }
