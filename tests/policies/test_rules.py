"""Patterns and rules: what each kind matches, and what is said of those that are not valid."""

import json
import re
from typing import Any

import pytest

import jaxmp
from jaxmp import PolicyRules, rules as presets
from jaxmp._policies.patterns import matches
from jaxmp._policies.presets import get_rules

pytestmark = pytest.mark.annotations


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("*norm*", "blocks/0/attention_norm", True),
        ("head", "head/dense", False),
        ("decoder/**", "model/decoder/a/b", True),
        ("layers_[0-3]", "layers_2", True),
        ("[]]", "]", True),
        ("[!]]", "]", False),
        ("[^a]", "^", True),
        ("[[a]", "[", True),
        ("a[+-]", "a-", True),
    ],
)
def test_globs(glob: str, path: str, expected: bool) -> None:
    """The usual ones, and odd sets; `test_patterns` draws all others."""
    assert matches(glob, path, None) == expected


class Norm:
    """Stands for a module class."""


class FastNorm(Norm):
    """And one for a subclass."""


def test_kinds_of_patterns() -> None:
    rules = PolicyRules(
        [
            (re.compile(r"block_\d+"), "float16"),
            ("re:.*/out", "float64"),
            (Norm, "float32"),
            ("type:*List", "float32"),
            (lambda path, module: len(path) > 8, "bfloat16"),
            ("frozen", None),
        ],
        default="mixed_bfloat16",
    )

    def compute(path: str, module: Any = None) -> str | None:
        policy = rules.resolve(path, module)
        return policy and policy.compute_dtype.name

    assert compute("block_12") == "float16"
    assert compute("a/block_1") == "bfloat16"  # an expression matches the whole path, or nothing
    assert compute("b/out") == "float64"
    assert compute("x", FastNorm()) == "float32"
    assert compute("x") == "bfloat16"
    assert compute("x", type("MyList", (list,), {})()) == "float32"
    assert compute("a/long/path") == "bfloat16"
    assert compute("frozen") is None


def test_the_first_match_wins() -> None:
    with pytest.warns(UserWarning, match="the rule for 'b' can never hold"):
        rules = PolicyRules([("a", "float16"), ("*", "bfloat16"), ("b", "float32")])
    assert rules.decide("a").rule == 0
    assert rules.decide("b").rule == 1
    assert rules.unused(["a", "b"]) == ["b"]
    assert rules.unused(["b"]) == ["a", "b"]
    assert PolicyRules([("a", "f32")]).resolve("b") is None


def test_rules_are_values() -> None:
    pairs = [("*norm*", "float32"), (Norm, "p=f32,c=bf16"), (re.compile("a"), "bf16")]
    one, two = PolicyRules(pairs, default="bf16"), PolicyRules(pairs, default="bfloat16")
    assert one == two
    assert hash(one) == hash(two)
    assert one != PolicyRules(reversed(pairs), default="bf16")
    assert one != PolicyRules(pairs)
    assert len({one, two}) == 1
    with pytest.raises(AttributeError):
        one.default = None  # type: ignore[misc]


def test_a_dictionary_and_pairs_are_the_same() -> None:
    assert PolicyRules({"a": "f32", "b": "bf16"}) == PolicyRules([("a", "f32"), ["b", "bf16"]])


def test_texts_of_config_files() -> None:
    toml = """
    default = "mixed_bfloat16"
    [rules]
    "*norm*" = "float32"
    "re:.*head" = "params=float32, compute=bfloat16, output=float32"
    "type:Embed" = "none"
    """
    rules = PolicyRules.from_toml(toml)
    assert [pattern for pattern, _ in rules.rules] == ["*norm*", "re:.*head", "type:Embed"]
    assert rules.resolve("x", type("Embed", (), {})()) is None
    text = json.dumps(
        {
            "default": "mixed_bfloat16",
            "rules": [
                ["*norm*", "float32"],
                {"pattern": "re:.*head", "policy": "mixed_bfloat16"},
                ["type:Embed", None],
            ],
        }
    )
    assert PolicyRules.from_json(text) == rules
    assert PolicyRules.from_dict({}) == PolicyRules()


def test_what_is_printed() -> None:
    rules = PolicyRules(
        [(presets.NORMS, "float32"), (re.compile("a.*"), None)], default="p=f32,c=bf16"
    )
    assert str(rules) == (
        "norms      float32\n"
        "re:a.*     (left alone)\n"
        "(default)  params=float32,compute=bfloat16,output=bfloat16,reduce=float32"
    )
    assert rules.table({"": None, "ln_f": None, "a": None}) == (
        "(root)  params=float32,compute=bfloat16,output=bfloat16,reduce=float32  (default)\n"
        "ln_f    float32                                                         norms\n"
        "a       (left alone)                                                    re:a.*"
    )
    plain = PolicyRules([("a", "float32"), ("b", None)], default="mixed_float16")
    assert eval(repr(plain)) == plain


# Names from public model code: HuggingFace, MaxText, EasyDeL, T5X, Scenic, big_vision, Flax.
NAMES = {
    ("norm", True): """encoder_norm norm final_norm input_layernorm post_attention_layernorm
        layer_norm LayerNorm q_norm k_norm pre_ffw_norm norm1 ln1 ln_f ln_1 pre_head_layer_norm gn1
        gn_root bn bn1 init_bn query_ln key_ln norm_f normalization cross_attention_ln_view0
        LayerNorm_0 BatchNorm_3""",
    ("norm", False): """dense attention mlp gate_proj query_proj lane_0 unknown1 plan_ne column_n
        heads inner_line down_proj embed bnet linear_1""",
    ("head", True): "lm_head head classifier logits_dense logitdense qa_outputs LogitsText",
    ("head", False): """multi_head_attention MultiHeadAttention_0 pre_head_layer_norm map_head_conv
        overhead key_head roi_heads router_logits attention_logits logit_scale pre_logits head_bn
        heads""",
}


@pytest.mark.every_case
@pytest.mark.parametrize(("family", "found"), NAMES)
def test_families_are_found_by_name(family: str, found: bool) -> None:
    matches = {"norm": presets.NORMS, "head": presets.HEADS}[family]
    for name in NAMES[family, found].split():
        assert matches(name) == matches(f"decoder/layer_0/{name}") == found, name
        assert not matches(f"decoder/{name}/dense"), name


def test_norms_are_found_by_class() -> None:
    def of(name: str) -> Any:
        return type(name, (), {})()

    for name in ("LayerNorm", "FlaxLlamaRMSNorm", "T5LayerNorm", "BatchNorm", "InstanceNorm"):
        assert presets.NORMS("x", of(name)), name
    for name in ("Dense", "WeightNorm", "SpectralNorm", "AttentionWithNorm", "Normalizer"):
        assert not presets.NORMS("x", of(name)), name
    # ... also where the name of a wrapper of weights looks like a norm's.
    assert not presets.NORMS("SpectralNorm_0", of("SpectralNorm"))


def test_routers_and_rotary_embeddings() -> None:
    assert presets.ROUTERS("moe/router")
    assert presets.ROUTERS("moe/router/kernel_proj")
    for name in ("gate", "gate_proj", "router_norm", "shared_expert_gate"):
        assert not presets.ROUTERS(f"moe/{name}"), name
    assert presets.ROTARY("layer/rotary_emb")
    assert not presets.ROTARY("layer/rope_theta")
    assert not presets.ROTARY("layer/pos_embed")


def test_keep_float32() -> None:
    rules = presets.keep_float32("mixed_float16", presets.NORMS, presets.HEADS, output_dtype="f16")
    norm = rules.resolve("a/ln_f")
    assert norm == jaxmp.get_policy("p=f32,c=f32,o=f16")
    assert rules.resolve("lm_head") == norm
    assert rules.resolve("a/mlp") == jaxmp.get_policy("mixed_float16")
    assert presets.keep_norms_float32("bf16").resolve("ln_f") == jaxmp.get_policy("float32")


def test_apex_levels() -> None:
    o2 = get_rules("O2")
    assert o2.resolve("bn1") == jaxmp.get_policy("p=f32,c=f32,o=f16")
    assert o2.resolve("conv1") == jaxmp.get_policy("p=f16,c=f16,o=f32") == jaxmp.get_policy("O2")
    o3 = get_rules("O3")
    assert o3.resolve("bn1") == o3.resolve("conv1") == jaxmp.get_policy("O3")


def test_a_family_may_be_missing_from_a_model() -> None:
    rules = presets.keep_float32("bf16", presets.NORMS, presets.ROUTERS)
    rules.warn_unused({"dense": None}, strict=True)
    assert [family.name for family in rules.unused(["dense"])] == ["norms", "routers"]


def test_a_family_of_ones_own() -> None:
    mixers = presets.Family(name="mixers", paths=("mix_*",), types=("*Mixer",), optional=False)
    rules = presets.keep_float32("bf16", mixers)
    assert rules.resolve("a/mix_1") == jaxmp.get_policy("float32")
    with pytest.raises(ValueError, match="'mixers'"):
        rules.warn_unused({"dense": None}, strict=True)


SHADOWED = [
    ([("head", "float32"), ("norm", "float32"), ("head", "bfloat16")], "head", "head"),
    ([("**", "float32"), ("head", "bfloat16")], "head", "**"),
    ([("*", "float32"), ("*norm*", "bfloat16")], "*norm*", "*"),
    ([("/**", None), ("type:Dense", "bfloat16")], "type:Dense", "/**"),
    ([(dict, "float32"), (dict, "bfloat16")], "dict", "dict"),
    ([(re.compile("a"), "float32"), (re.compile("a"), "bfloat16")], "re:a", "re:a"),
]


@pytest.mark.parametrize(("rules", "hidden", "by"), SHADOWED)
def test_a_rule_that_can_never_hold_is_told_of(rules: Any, hidden: str, by: str) -> None:
    text = f"the rule for {hidden!r} can never hold: the one before it for {by!r} decides all"
    with pytest.warns(UserWarning, match=re.escape(text)):
        PolicyRules(rules)
    if all(isinstance(pattern, str) for pattern, _ in rules):
        with pytest.warns(UserWarning, match=re.escape(text)):
            PolicyRules.from_dict({"rules": rules})


def test_rules_that_may_hold_are_not_told_of() -> None:
    PolicyRules([("head", "float32"), ("**", "bfloat16")])
    PolicyRules([("*", "float32"), ("/", "bfloat16")])  # the model itself has no name
    PolicyRules([("*", "float32"), ("type:Net", "bfloat16"), ("re:", "bfloat16")])
    PolicyRules([("decoder/**", "float32"), ("**/head", "bfloat16")])
