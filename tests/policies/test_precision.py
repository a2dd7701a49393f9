"""The precision of float32 products in a policy: spellings are one value, others are refused."""

import dataclasses
import pickle
from typing import Any

import jax
import jmp
import pytest
from jax import lax

import jaxmp
from jaxmp._numerics.precision import (
    default_precision,
    precision_of,
    users_option,
)

pytestmark = [pytest.mark.annotations, pytest.mark.jax]
F32 = "params=float32,compute=float32,output=float32,reduce=float32"
CANONICAL = {
    None: None,
    "default": "default",
    " High ": "high",
    "HIGHEST": "highest",
    "TensorFloat32": "tensorfloat32",
    lax.Precision.DEFAULT: "default",
    lax.Precision.HIGH: "high",
    lax.Precision.HIGHEST: "highest",
    "bf16_bf16_f32_x3": "BF16_BF16_F32_X3",
    "TF32_TF32_F32": "TF32_TF32_F32",
    lax.DotAlgorithmPreset.DEFAULT: "default",
    lax.DotAlgorithmPreset.BF16_BF16_F32_X6: "BF16_BF16_F32_X6",
    lax.DotAlgorithmPreset.F32_F32_F32: "F32_F32_F32",
}


@pytest.mark.parametrize(("given", "name"), CANONICAL.items(), ids=map(str, CANONICAL))
def test_every_spelling_is_one_value(given: Any, name: str | None) -> None:
    policy = jaxmp.Policy("float32", "float32", "float32", precision=given)
    assert policy.precision == name
    assert str(policy) == F32 + (f",precision={name}" if name else "")
    again = jaxmp.get_policy(str(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert eval(repr(policy).replace("Policy", "jaxmp.get_policy", 1)) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert dataclasses.replace(policy) == policy
    assert isinstance(policy, jmp.Policy)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("hihg", "unknown precision of float32 products 'hihg'. Did you mean 'high'?"),
        ("TF32_TF32", "Did you mean 'TF32_TF32_F32'?"),
        ("float32", "'float32'. Did you mean 'highest'?"),
        ("bfloat16", "'bfloat16'. Did you mean 'default'?"),
        ("tf32", "'tf32'. Did you mean 'tensorfloat32'?"),
        (2, "'2'. Valid: default, high, highest, tensorfloat32, or an algorithm"),
        (lax.DotAlgorithmPreset.F16_F16_F32, "algorithm for float32 operands: BF16_BF16_F32, BF"),
        ("", "unknown precision of float32 products ''"),
    ],
)
def test_others_are_refused(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match="precision") as error:
        jaxmp.Policy("float32", "float32", "float32", precision=given)
    assert told in str(error.value)


def test_in_strings_and_rules() -> None:
    """The fifth key goes with the others; rules print and read it, as configs do."""
    policy = jaxmp.get_policy("precision = high, c=bf16, o=f32")
    assert policy == jaxmp.Policy("float32", "bfloat16", "float32", precision="high")
    assert policy != jaxmp.get_policy("mixed_bfloat16")
    assert policy.with_output_dtype("bfloat16").precision == "high"
    rules = jaxmp.PolicyRules({"head": "precision=tensorfloat32"}, default="mixed_bfloat16")
    assert f"{F32},precision=tensorfloat32" in str(rules)
    assert eval(repr(rules), {"PolicyRules": jaxmp.PolicyRules}) == rules
    assert jaxmp.PolicyRules.from_json('{"rules": {"head": "precision=high"}}').rules[0][1] == (
        jaxmp.get_policy("precision=high")
    )
    with pytest.raises(ValueError, match=r"'precison'.* Did you mean 'precision'\?.*, precision"):
        jaxmp.get_policy("precison=high")


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("float32,precision=high", "p=f32,c=f32,o=f32,precision=high"),
        ("f32, precision = TensorFloat32", "precision=tensorfloat32"),
        ("mixed_bfloat16,precision=high", "p=f32,c=bf16,o=f32,precision=high"),
        ("mixed_float16,reduce=f16", "p=f32,c=f16,o=f32,r=f16"),
        ("bfloat16,p=f32", "p=f32,c=bf16,o=bf16"),
        ("float32,o=bf16,precision=BF16_BF16_F32_X3", "o=bf16,c=f32,precision=BF16_BF16_F32_X3"),
        ("mixed_bfloat16,p=f64", "p=f64,c=bf16,o=f32,r=f64"),
    ],
)
def test_a_name_may_come_before_the_keys(text: str, pairs: str) -> None:
    """The keys say what differs from it; the policy is the value that all keys together name."""
    policy = jaxmp.get_policy(text)
    assert policy == jaxmp.get_policy(pairs)
    assert jaxmp.get_policy(str(policy)) == policy
    assert jaxmp.PolicyRules(default=text) == jaxmp.PolicyRules(default=policy)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("mixed_bfloat,precision=high", "Did you mean 'mixed_bfloat16'? Only the name of a dtype,"),
        # Levels of apex are more than dtypes.
        ("O2,precision=high", "cannot read 'O2' in policy 'O2,precision=high': expected key=dtype"),
        ("precision=high,float32", "cannot read 'float32' in policy"),
        ("float32,bfloat16,p=f32", "cannot read 'bfloat16' in policy"),
        ("float32,precision=high,precision=high", "'precision' is given twice"),
        ("float32,", "unknown policy 'float32,'"),
    ],
)
def test_other_names_before_keys_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match="policy") as error:
        jaxmp.get_policy(text)
    assert told in str(error.value)


def test_what_is_kept_in_float32_has_the_precision_of_the_policy() -> None:
    rules = jaxmp.rules.keep_float32("c=bf16,precision=high", jaxmp.rules.HEADS)
    kept = rules.resolve("head")
    assert kept is not None
    assert (kept.compute_dtype.name, kept.precision) == ("float32", "high")


def test_the_option_of_the_user_is_told_from_what_is_asked() -> None:
    assert (users_option(), precision_of(None), precision_of("high")) == (None, "highest", "high")
    with default_precision("highest"):
        assert jax.config.jax_default_matmul_precision == "highest"  # type: ignore[attr-defined]
        assert (users_option(), precision_of(None)) == (None, "highest")
        with default_precision(None):
            assert jax.config.jax_default_matmul_precision is None  # type: ignore[attr-defined]
        with jax.default_matmul_precision("high"):
            assert (users_option(), precision_of(None)) == ("high", None)
    with (
        jax.default_matmul_precision("high"),
        default_precision("highest"),
        default_precision("default"),
    ):
        assert (users_option(), precision_of(None), precision_of("high")) == ("high", None, "high")
        with default_precision(None):
            assert jax.config.jax_default_matmul_precision == "high"  # type: ignore[attr-defined]
