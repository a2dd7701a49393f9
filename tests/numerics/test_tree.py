"""Casting, finiteness and selection over whatever a tree can hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

import jaxmp
from jaxmp._numerics.tree import cast_floating, check_like, strong, widen
from tests.support.bits import bits, tree_bits

pytestmark = pytest.mark.annotations

FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def menagerie() -> dict[str, object]:
    """One of everything that trees of real programs hold and that is no float to cast."""
    return {
        "int": jnp.arange(3),
        "bool": jnp.array(True),
        "uint8": np.arange(3, dtype=np.uint8),
        "int4": jnp.zeros(2, jnp.int4),
        "key": jax.random.key(0),
        "raw_key": jax.random.key_data(jax.random.key(0)),
        "none": None,
        "complex": jnp.ones(2, jnp.complex64),
        "float0": np.zeros(2, jax.dtypes.float0),
        "string": "relu",
        "python_int": 3,
        "python_float": 0.5,
        "object": object,
    }


@pytest.mark.parametrize("dtype", FLOATS)
def test_only_floats_are_cast(dtype: str) -> None:
    tree = menagerie()
    out = cast_floating(tree, dtype)
    for name, leaf in tree.items():
        assert out[name] is leaf, name


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_every_float_is_cast(source: str, dtype: str) -> None:
    x = jnp.asarray([0.0, 1.0, -2.0], source)
    for leaf in (x, np.asarray(x), np.asarray(x)[0], jax.ShapeDtypeStruct((3,), source)):
        out = cast_floating({"x": leaf}, dtype)["x"]
        assert out.dtype == jnp.dtype(dtype)
        assert out.shape == leaf.shape
        assert isinstance(out, jax.Array | jax.ShapeDtypeStruct)


def test_a_leaf_of_the_right_dtype_is_not_copied() -> None:
    x = jnp.ones(3)
    assert cast_floating(x, jnp.float32) is x


def test_weak_types_become_strong() -> None:
    assert jnp.asarray(1.0).weak_type  # positive control
    assert not cast_floating(jnp.asarray(1.0), jnp.float32).weak_type
    state = strong({"count": 0, "lr": 0.1, "x": jnp.asarray(2.0), "name": "adam"})
    assert state["name"] == "adam"
    assert all(not x.weak_type for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    assert state["lr"].dtype == jnp.float32


def test_sharding_is_kept() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.ones((8, 2)), sharding)
    out = cast_floating(x, jnp.bfloat16)
    assert out.sharding.is_equivalent_to(sharding, x.ndim)


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2), elements=st.floats(width=32)))
def test_all_finite_agrees_with_numpy(x: np.ndarray) -> None:
    tree = {"x": x, "ints": np.arange(2), "key": jax.random.key(0), "none": None, "name": "a"}
    assert bool(jaxmp.numbers.all_finite(tree)) == bool(np.isfinite(x).all())


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_all_finite_sees_every_dtype(dtype: str, value: float) -> None:
    x = jnp.asarray([1.0, value], dtype)
    assert not jax.jit(jaxmp.numbers.all_finite)([jnp.ones(2), x])
    assert jaxmp.numbers.all_finite(jnp.ones(2, dtype))


def test_all_finite_of_large_finite_values() -> None:
    """A norm of these overflows in float16 and in float32; they are finite all the same."""
    assert jaxmp.numbers.all_finite(jnp.full(1000, 65504.0, jnp.float16))
    assert jaxmp.numbers.all_finite(jnp.full(1000, 3e38, jnp.float32))
    assert not jnp.isfinite(jnp.linalg.norm(jnp.full(1000, 3e38)))  # positive control


def test_all_finite_of_python_numbers() -> None:
    assert not jaxmp.numbers.all_finite([float("nan")])
    assert jaxmp.numbers.all_finite([1.0, 2, "x"])


@pytest.mark.parametrize("pred", [True, False])
def test_select_takes_one_tree_whole(pred: bool) -> None:
    a = {"x": jnp.asarray([jnp.nan, -0.0, 1.0]), "k": jax.random.key(1), "i": jnp.int32(3)}
    b = {"x": jnp.asarray([1.0, jnp.inf, 0.0]), "k": jax.random.key(2), "i": jnp.int32(4)}
    chosen = jax.jit(jaxmp.numbers.select)(jnp.array(pred), a, b)
    assert tree_bits(chosen) == tree_bits(a if pred else b)


def test_widen() -> None:
    tree = widen({"b": jnp.ones(1, jnp.bfloat16), "c": jnp.ones(1, jnp.complex64), "i": 3})
    assert tree["b"].dtype == jnp.float32
    assert tree["c"].dtype == jnp.complex64
    assert tree["i"] == 3


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"w": 1.0}}, "missing: b; left over: a/w. Do this"),
        ({"b": np.ones((2, 1))}, r"x leaf 'b' has shape \(2, 1\), but the leaf of y has \(2,\)"),
        ({"b": [np.ones(2)]}, "missing: b; left over: b/0"),
    ],
)
def test_check_like(tree: object, message: str) -> None:
    like = {"b": np.ones(2)}
    check_like(like, like, name="x", like_name="y", advice="Do this.")
    with pytest.raises(ValueError, match=message):
        check_like(tree, like, name="x", like_name="y", advice="Do this.")


def test_check_like_shortens_and_names_containers() -> None:
    many = {str(i): 1.0 for i in range(9)}
    with pytest.raises(ValueError, match=r"missing: 0, 1, 2, 3, 4, \.\.\."):
        check_like({}, many, name="x", like_name="y", advice="")
    with pytest.raises(ValueError, match="other containers"):
        check_like((1.0,), [1.0], name="x", like_name="y", advice="")


def test_bits_sees_what_equality_does_not() -> None:
    """Positive control for every bit-for-bit test."""
    assert bits(jnp.float32(0.0)) != bits(jnp.float32(-0.0))
    assert bits(jnp.float32(1.0)) != bits(jnp.bfloat16(1.0))
    assert bits(jnp.float32(np.nan)) == bits(jnp.float32(np.nan))
