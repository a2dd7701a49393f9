"""Policies: parsing and printing are inverses, jmp's strings keep their meaning."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import jmp
import pytest
from hypothesis import given, strategies as st

import jaxmp
from jaxmp._numerics.dtypes import _BY_NAME

pytestmark = pytest.mark.annotations

LONG_NAMES = sorted({dtype.name for dtype in _BY_NAME.values()})
any_policy = st.builds(jaxmp.Policy, *[st.sampled_from(LONG_NAMES)] * 4)


@given(any_policy)
def test_parse_is_the_inverse_of_str(policy: jaxmp.Policy) -> None:
    assert jaxmp.get_policy(str(policy)) == policy
    assert eval(repr(policy).replace("Policy", "jaxmp.get_policy", 1)) == policy
    assert hash(jaxmp.get_policy(str(policy))) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy


@given(any_policy, st.data())
def test_blanks_order_and_short_names_do_not_matter(
    policy: jaxmp.Policy, data: st.DataObject
) -> None:
    short = {
        dtype.name: [n for n, d in _BY_NAME.items() if d == dtype] for dtype in _BY_NAME.values()
    }
    keys = {"params": "p", "compute": "c", "output": "o", "reduce": "r"}
    parts = []
    for long, dtype in zip(
        keys,
        (policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.reduce_dtype),
        strict=True,
    ):
        blank = data.draw(st.sampled_from(["", " ", "  "]))
        key = data.draw(st.sampled_from([long, keys[long]]))
        name = data.draw(st.sampled_from(short[dtype.name]))
        parts.append(f"{blank}{key}{blank}={blank}{name}{blank}")
    assert jaxmp.get_policy(",".join(data.draw(st.permutations(parts)))) == policy


JMP_VALUES = ["f32", "float32", "full", "bf16", "bfloat16", "f16", "float16", "half", "f64"]
JMP_STRINGS = JMP_VALUES + [
    ",".join(pairs)
    for keys in (["p"], ["c"], ["params", "c"], ["c", "output"], ["p", "compute", "o"], ["o"])
    for pairs in itertools.islice(
        itertools.product(*[[f"{k}={v}" for v in JMP_VALUES] for k in keys]), 0, None, 7
    )
]


@pytest.mark.parametrize("text", JMP_STRINGS)
def test_jmp_strings_mean_what_they_mean_in_jmp(text: str) -> None:
    ours, theirs = jaxmp.get_policy(text), jmp.get_policy(text)
    assert isinstance(ours, jmp.Policy)
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(ours, field) == jnp.dtype(getattr(theirs, field))
    if "half" not in text:
        assert jaxmp.get_policy(theirs) == ours


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("float32", "float32 float32 float32 float32"),
        ("bfloat16", "bfloat16 bfloat16 bfloat16 float32"),
        ("float16", "float16 float16 float16 float32"),
        ("mixed_bfloat16", "float32 bfloat16 float32 float32"),
        ("mixed_float16", "float32 float16 float32 float32"),
        ("O0", "float32 float32 float32 float32"),
        ("O3", "float16 float16 float32 float32"),
        ("float64", "float64 float64 float64 float64"),
        ("float8_e4m3fn", "float8_e4m3fn float8_e4m3fn float8_e4m3fn float32"),
        (" mixed_bfloat16 ", "float32 bfloat16 float32 float32"),
        ("p=f32, c=bf16, r=bf16", "float32 bfloat16 bfloat16 bfloat16"),
        ("c=e5m2", "float32 float8_e5m2 float8_e5m2 float32"),
    ],
)
def test_presets(name: str, dtypes: str) -> None:
    policy = jaxmp.get_policy(name)
    got = (policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.reduce_dtype)
    assert " ".join(dtype.name for dtype in got) == dtypes


def test_any_spelling_of_a_dtype_is_the_same_policy() -> None:
    spellings = ["bf16", "bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), jnp.bfloat16(0).dtype]
    policies = {jaxmp.Policy("f32", spelling, jnp.float32) for spelling in spellings}
    assert policies == {jaxmp.get_policy("mixed_bfloat16")}
    assert jaxmp.get_policy("mixed_bfloat16").compute_dtype == jnp.bfloat16


def test_casts() -> None:
    policy = jaxmp.get_policy("p=f32,c=bf16,o=f16")
    tree = {"w": jnp.ones(2), "ids": jnp.arange(2)}
    for cast, dtype in (
        (policy.cast_to_param, jnp.float32),
        (policy.cast_to_compute, jnp.bfloat16),
        (policy.cast_to_output, jnp.float16),
    ):
        assert cast(tree)["w"].dtype == dtype
        assert cast(tree)["ids"].dtype == jnp.int32


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cast_to_8_bits_without_a_scale_warns(name: str) -> None:
    """Autocast, train steps and layers refuse such a policy; others call `cast_to_compute`."""
    policy = jaxmp.get_policy(f"params=float32,compute={name},output=float32")
    with pytest.warns(UserWarning, match=f"rounds to {name} without a scale.*'mixed_float8'"):
        low = policy.cast_to_compute({"x": jnp.ones(100)})
    added, _ = jax.lax.scan(lambda total, x: (total + x, None), jnp.zeros((), name), low["x"])
    assert added < 20  # of 100
    jaxmp.get_policy("mixed_float8").cast_to_compute(low)  # a warning would be an error here


def test_with_output_dtype_keeps_the_rest() -> None:
    policy = jaxmp.get_policy("p=f32,c=bf16,o=f16,r=bf16").with_output_dtype("f32")
    assert str(policy) == "params=float32,compute=bfloat16,output=float32,reduce=bfloat16"
