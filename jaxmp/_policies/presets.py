"""Ready-made rules: the parts of a model that everyone keeps in float32, found by their names."""

import dataclasses
import functools
from typing import Any

import jmp

from jaxmp._numerics.dtypes import DType
from jaxmp._policies.patterns import check_pattern, matches
from jaxmp._policies.policy import Policy, check_not_ambiguous, describe_other, get_policy
from jaxmp._policies.policy_rules import PolicyRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of module, found by the names that model authors give it: a pattern for rules.

    Attributes:
      name: what the family is called in tables.
      paths: globs over the path of a module.
      types: globs over the names of its class and base classes.
      except_types: globs over class names of modules outside of the family in spite of their name.
      optional: whether the family may be missing from a model without a warning.

    >>> NORMS("decoder/layer_3/post_attention_layernorm", None)
    True
    """

    name: str
    paths: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    except_types: tuple[str, ...] = ()
    optional: bool = True

    def __post_init__(self) -> None:
        for glob in (*self.paths, *self._types, *self._except_types):
            check_pattern(glob)

    def __call__(self, path: str, module: Any = None) -> bool:
        """Whether a module belongs to the family."""
        if any(matches(glob, path, module) for glob in self._except_types):
            return False
        return any(matches(glob, path, module) for glob in (*self.paths, *self._types))

    @functools.cached_property
    def _types(self) -> tuple[str, ...]:
        return tuple(f"type:{glob}" for glob in self.types)

    @functools.cached_property
    def _except_types(self) -> tuple[str, ...]:
        return tuple(f"type:{glob}" for glob in self.except_types)


# The names come from 17 public code bases of JAX models, counted in November 2026. These globs find
# 1,009 of 1,028 norms, and every rotary embedding. The routers leave out `gate`, since half of the
# modules of that name are gated linear units.
NORMS = Family(
    name="norms",
    paths=(
        *("*norm*", "*Norm*", "ln", "ln_*", "*_ln", "*_ln_*", "ln[0-9]"),
        *("bn", "bn_*", "*_bn", "bn[0-9]", "gn", "gn_*", "gn[0-9]"),
    ),
    types=(
        *("*RMSNorm", "*RMSNormGated", "*LayerNorm", "LayerNorm2d"),
        *("*BatchNorm", "*GroupNorm", "*InstanceNorm", "*L2Norm", "*ScaleNorm"),
    ),
    # These two reparametrise the weights of the layer inside them, and normalise no activation.
    except_types=("SpectralNorm", "WeightNorm"),
)
# An error in a logit is not averaged over anything.
HEADS = Family(
    name="heads",
    paths=(
        *("head", "lm_head", "*_lm_head", "classifier", "classification_head"),
        *("logits", "logits_dense", "logitdense", "Logits*", "output_logits"),
        *("qa_outputs", "vocab_projector", "embed_out", "unembed", "score"),
    ),
)
# An error in a router chooses other experts.
ROUTERS = Family(
    name="routers",
    paths=tuple(
        glob
        for name in ("router", "Router", "router_logits", "router_weights")
        for glob in (name, f"{name}/*")  # many are modules around one dense layer
    ),
    types=("*Router", "RouterWeights", "*MoEGate", "GateLogit"),
)
EMBEDDINGS = Family(
    name="embeddings",
    # Layers that Flax names itself have a number: a whole model may be called SentenceEmbedder.
    paths=(
        *("*embed*", "wte", "wte.*", "Embed", "Embedding"),
        *("*Embed_[0-9]*", "*Embedding_[0-9]*", "*Embeddings_[0-9]*"),
    ),
    types=("Embed", "Embedding"),
)
# Sines and cosines read the last bits of their phases, which grow with the position.
ROTARY = Family(
    name="rotary",
    paths=("rope", "rotary", "rotary_emb*", "rope_emb*", "rope_2d"),
    types=("*RotaryEmbedding", "RoPE", "*RopePositionEmbedding", "Rope2DPosEmb"),
    except_types=("*With*",),
)


def keep_float32(
    policy: str | jmp.Policy, *families: Family, output_dtype: Any = "float32"
) -> PolicyRules:
    """Makes rules that run families of modules in float32, and everything else under one policy.

    Their products are float32 on TPUs and GPUs too, which takes six passes of bfloat16 on a TPU; or
    they have the precision of the policy, if it says one: see docs/precision.md.

    Args:
      policy: the policy of the rest.
      *families: `NORMS`, `HEADS`, `ROUTERS`, `EMBEDDINGS`, `ROTARY`, or your own `Family`.
      output_dtype: the dtype that these modules return. With float32 they do what Flax's layers do
        with `dtype=float32`. With the compute dtype of the policy they keep half as much for the
        backward pass, and lose no more than the cast of the next layer would.

    Returns:
      The rules.

    Raises:
      TypeError: for anything but a family.
      ValueError: for an unknown policy or dtype.

    >>> print(keep_float32("mixed_bfloat16", NORMS, HEADS))
    norms      float32
    heads      float32
    (default)  mixed_bfloat16
    """
    for family in families:
        if not isinstance(family, Family):
            raise TypeError(
                f"keep_float32 takes families such as jaxmp.rules.NORMS, got {family!r}. For a "
                "pattern of your own write PolicyRules([(pattern, 'float32')], default=policy)"
            )
    default = get_policy(policy)
    # A policy's precision is that of its float32 products, and these modules are its float32 parts.
    float32 = Policy("float32", "float32", output_dtype, precision=default.precision)
    return PolicyRules([(family, float32) for family in families], default=default)


def keep_norms_float32(policy: str | jmp.Policy, *, output_dtype: Any = "float32") -> PolicyRules:
    """Makes rules that run norms in float32, with float32 params, and the rest under one policy.

    A norm's variance is a sum of squares, which overflows in float16. Its scale and bias lose their
    last digits in bfloat16. The time of a norm is the time of reading its input.

    Args:
      policy: the policy of the rest.
      output_dtype: what norms return; see `keep_float32`.

    Returns:
      The rules.

    Raises:
      ValueError: for an unknown policy or dtype.

    >>> rules = keep_norms_float32("mixed_float16")
    >>> [rules.resolve(path).compute_dtype.name for path in ("block_0/ln_1", "block_0/mlp")]
    ['float32', 'float16']
    """
    return keep_float32(policy, NORMS, output_dtype=output_dtype)


# Common practice leaves these out of float8: an error of 5 % in a logit, or in the choice of an
# expert, is not averaged over anything.
_NOT_IN_FLOAT8 = (HEADS, EMBEDDINGS, ROUTERS)


def family_left_out(path: str, module: Any = None) -> str | None:
    """Returns the family of a module that is left out of float8; None if there is none.

    The modules around it, by its path, count too.

    >>> family_left_out("decoder/lm_head/dense"), family_left_out("decoder/mlp")
    ('heads', None)
    """
    # `lm_head/dense` is in a head. Plain functions have only scopes, which read like such paths.
    names = path.split("/")
    for family in _NOT_IN_FLOAT8:
        around = ("/".join(names[:end]) for end in range(1, len(names)))
        if family(path, module) or any(map(family, around)):
            return family.name
    return None


def get_rules(rules: str | jmp.Policy | PolicyRules) -> PolicyRules:
    """Returns the rules for a name, a policy or rules.

    Args:
      rules: rules; a policy or the text of one, which then holds everywhere; or `"O2"`, apex's
        level of that name: float16 with norms in float32 that return float16.

    Raises:
      TypeError: for anything else.
      ValueError: for an unknown policy, and for "bf16", "fp16" and "half", which may mean two.

    >>> get_rules("mixed_bfloat16") == PolicyRules(default="mixed_bfloat16")
    True
    >>> print(get_rules("O2"))
    norms      params=float32,compute=float32,output=float16,reduce=float32
    (default)  params=float16,compute=float16,output=float32,reduce=float32
    """
    if isinstance(rules, PolicyRules):
        return rules
    if isinstance(rules, str) and rules.strip() == "O2":
        return keep_norms_float32("O2", output_dtype="float16")
    if isinstance(rules, (str, jmp.Policy)):
        check_not_ambiguous(rules)
        return PolicyRules(default=get_policy(rules))
    raise TypeError(
        "rules must be jaxmp.PolicyRules([(pattern, policy), ...]), a policy or its name, got "
        f"{describe_other(rules)}"
    )


def all_policies(rules: PolicyRules) -> list[Policy]:
    """Returns the policies in rules, the default last, without None for modules left alone.

    >>> len(all_policies(keep_norms_float32("mixed_bfloat16")))
    2
    """
    policies = [policy for _, policy in rules.rules] + [rules.default]
    return [policy for policy in policies if policy is not None]


def dtypes_of(rules: PolicyRules) -> set[DType]:
    """Returns the dtypes in which a model under rules holds params or computes.

    >>> sorted(dtype.name for dtype in dtypes_of(keep_norms_float32("mixed_float16")))
    ['float16', 'float32']
    """
    policies = all_policies(rules)
    return {p.param_dtype for p in policies} | {p.compute_dtype for p in policies}
