"""What users read when rules or Flax modules are wrong: what it was, what is valid, what to do."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn, nnx

import jaxmp
from jaxmp import PolicyRules

# These cases hand over wrong types on purpose; users have no runtime type checker in between.
pytestmark = pytest.mark.usefixtures("unchecked", "standard_promotion")

X = jnp.ones((2, 4))
KEY = jax.random.key(0)


class LinenScale(nn.Module):
    """A leaf that mixes its params into its inputs, and has no dtype."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.param("scale", nn.initializers.ones, (4,))


class LinenNet(nn.Module):
    """A layer that follows policies, and one that cannot."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return LinenScale(name="scale")(nn.Dense(4)(x))


class BoundInside(nn.Module):
    """Applies a policy to a module that has its place in the tree already."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jaxmp.linen.apply_policy(nn.Dense(2), "bf16")(x)


class NnxScale(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale


class NnxNet(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.scale = NnxScale()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale(self.dense(x))


NAMED = PolicyRules([("scale", "mixed_bfloat16")])


def step_under(rules: Any, **options: Any) -> Any:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), rules)
    state = jaxmp.TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
    step = jaxmp.make_train_step(lambda params, batch: jnp.sum(params["w"]), **options)
    return step(state, jnp.ones(2))


CANNOT = (
    "Scale at 'scale' cannot compute in bfloat16: it has float32 params, and no 'dtype' of its own "
    "that would say to cast them. Give its instances a dtype (in linen a field) and cast params to "
    "it where they are used, or leave it alone with the rule ('scale', None) before the others. "
    "Autocast of the whole model needs no 'dtype': jaxmp.autocast(model.apply, rules) in linen, "
    "jaxmp.nnx.autocast(model, rules) in nnx"
)


def linen_init(module: Any, rules: Any) -> Any:
    return jax.eval_shape(jaxmp.linen.apply_policy(module, rules).init, KEY, X)


def optimizer(**options: Any) -> Any:
    return jaxmp.nnx.Optimizer(NnxNet(), options.pop("tx"), **options)


def gradients_first() -> Any:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16"))
    grads = nnx.jit(jaxmp.nnx.grad(lambda m: m(X).mean(), loss_scale=optimizer.loss_scale))(model)
    return optimizer.update(grads, model)


CASES: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    # patterns and rules
    ("empty glob", lambda: PolicyRules({"": "f32"}), ValueError,
     "'' is no valid glob: it is empty. Write names joined by single slashes, such as "
     "'decoder/**/mlp', or '/' for the model itself"),
    ("double slash", lambda: PolicyRules({"a//b": "f32"}), ValueError,
     "'a//b' is no valid glob: it has an empty name between or after slashes"),
    ("stars", lambda: PolicyRules({"a**/b": "f32"}), ValueError,
     "'a**/b' is no valid glob: '**' stands for whole names and must be alone between slashes"),
    ("bracket", lambda: PolicyRules({"layer_[0": "f32"}), ValueError,
     "'layer_[0' is no valid glob: '[' without a closing ']'"),
    ("set", lambda: PolicyRules({"layer_[9-0]": "f32"}), ValueError,
     "'layer_[9-0]' is no valid glob: [9-0] is no set"),
    ("expression", lambda: PolicyRules({"re:(": "f32"}), ValueError,
     "'re:(' is no regular expression: missing ), unterminated subpattern"),
    ("class", lambda: PolicyRules({"type:": "f32"}), ValueError,
     "'type:' names no class. Write a class name, as in 'type:*Norm'"),
    ("bytes", lambda: PolicyRules([(re.compile(b"a"), "f32")]), TypeError, "matches bytes"),
    ("pattern", lambda: PolicyRules([(3, "f32")]), TypeError,
     "a pattern must be a glob such as '*norm*', a compiled regular expression, a module class or "
     "a hashable function (path, module) -> bool; got 3"),
    ("module as pattern", lambda: PolicyRules([(nn.Dense(2), "f32")]), TypeError,
     "a pattern must be a glob such as '*norm*', a compiled regular expression, a module class or"),
    ("predicate of one", lambda: PolicyRules([(lambda path: True, "f32")]), TypeError,
     "a hashable function (path, module) -> bool; got <function"),
    ("partial class", lambda: PolicyRules([(functools.partial(nn.Dense, 2), "f32")]), TypeError,
     "a pattern must be a glob such as '*norm*', a compiled regular expression, a module class or"),
    ("config default", lambda: PolicyRules.from_toml("[default]\nhead = 'f32'"), TypeError,
     "'default' must be a policy or its name, got {'head': 'f32'}"),
    ("config rules", lambda: PolicyRules.from_dict({"rules": "f32"}), TypeError,
     "rules must be (pattern, policy) pairs or a dictionary, got 'f32'"),
    ("single module", lambda: jaxmp.nnx.apply_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
     PolicyRules({"head": "f32"}), strict=True), ValueError,
     "rules that match nothing in this model: 'head'. It is one module, '/'. Correct the"),
    ("policy", lambda: PolicyRules({"a": "mixed_bf16"}), ValueError,
     "unknown policy 'mixed_bf16'. Did you mean 'mixed_bfloat16'?"),
    ("rules", lambda: PolicyRules("mixed_bfloat16"), TypeError,
     "rules must be (pattern, policy) pairs or a dictionary, got 'mixed_bfloat16'. For one policy "
     "everywhere, write PolicyRules(default='mixed_bfloat16')"),
    ("pair", lambda: PolicyRules(["ab"]), TypeError,
     "a rule must be a pair (pattern, policy), got 'ab'"),
    ("config key", lambda: PolicyRules.from_dict({"*norm*": "f32"}), ValueError,
     "unknown key '*norm*' in a config of rules. Valid keys: rules, default. Patterns belong "
     "under 'rules'"),
    ("config", lambda: PolicyRules.from_json("[]"), TypeError,
     "a config must be a dictionary, got list"),
    ("config rule", lambda: PolicyRules.from_dict({"rules": [{"patern": "a", "policy": "f32"}]}),
     ValueError, "a rule must have the keys 'pattern' and 'policy', got {'patern': 'a',"),
    ("pattern twice", lambda: PolicyRules.from_json('{"rules": {"head": "f32", "head": "bf16"}}'),
     ValueError, "'head' is there twice, with 'f32' and 'bf16': only one of them can hold. Remove"),
    ("rules twice", lambda: PolicyRules.from_json('{"rules": {}, "rules": {"a": "f32"}}'),
     ValueError, "'rules' is there twice"),
    ("pattern twice in TOML", lambda: PolicyRules.from_toml("[rules]\na = 'f32'\na = 'bf16'"),
     ValueError, "Cannot overwrite a value"),
    ("number of rules", lambda: PolicyRules.from_json('{"rules": 5}'), TypeError,
     "'rules' must be a table {pattern: policy} or a list of pairs, got 5. Leave the key out for"),
    ("no rules", lambda: PolicyRules.from_json('{"rules": null}'), TypeError,
     "'rules' must be a table {pattern: policy} or a list of pairs, got null. Leave the key out"),
    ("number as policy", lambda: PolicyRules.from_json('{"rules": {"head": 5}}'), TypeError,
     "policy must be a string or a Policy, got int"),
    ("number as default", lambda: PolicyRules.from_json('{"default": 5}'), TypeError,
     "'default' must be a policy or its name, got 5"),
    ("dtype as policy", lambda: jaxmp.get_policy(jnp.bfloat16), TypeError,
     "policy must be a string or a Policy, got the dtype bfloat16, which does not say what has it: "
     "the params, the computation or the output. Write 'mixed_bfloat16' (float32 params, the usual "
     "choice) or 'bfloat16' (params, compute and output are all bfloat16), or "
     "'params=float32,compute=bfloat16,output=float32'"),
    ("NumPy dtype as policy", lambda: jaxmp.get_policy(jnp.dtype("float32")), TypeError,
     "Write 'float32' (params, compute and output are all float32), or"),
    ("dtype in rules", lambda: PolicyRules([("head", jnp.float16)]), TypeError,
     "got the dtype float16, which does not say what has it: the params, the computation or the "
     "output. Write 'mixed_float16'"),
    ("None as policy", lambda: jaxmp.get_policy(None), TypeError,
     "policy must be a string or a Policy, got None. 'none' is for make_train_step alone"),
    ("toml", lambda: PolicyRules.from_toml("rules ="), ValueError, "Invalid value"),
    ("family", lambda: jaxmp.rules.keep_float32("bf16", "norms"), TypeError,
     "keep_float32 takes families such as jaxmp.rules.NORMS, got 'norms'. For a pattern of your "
     "own write PolicyRules([(pattern, 'float32')], default=policy)"),
    ("rules", lambda: jaxmp.linen.apply_policy(nn.Dense(1), [("a", "f32")]), TypeError,
     "rules must be jaxmp.PolicyRules([(pattern, policy), ...]), a policy or its name, got list"),
    ("O2 of a step", lambda: step_under("O2"), ValueError,
     "the optimizer was wrapped for rules about types of modules (as 'O2' has them), which a "
     "function has not. Put the model under them with jaxmp.linen.apply_policy or "
     "jaxmp.nnx.apply_policy, and give make_train_step policy='none': the model casts by itself"),
    ("a cast of all under rules", lambda: step_under(NAMED, cast="all"), ValueError,
     "cast='all' casts to one dtype, and the optimizer was wrapped for rules, which have several. "
     "Use cast='products'"),
    ("a policy for rules", lambda: step_under(NAMED, policy="mixed_bfloat16"), ValueError,
     "the optimizer was wrapped for other rules than those of this step"),
    ("float8 by a cast", lambda: step_under("mixed_float8", cast="params"), ValueError,
     "cast='params' casts to bfloat16, and this policy has products in float8, which only "
     "cast='products' makes"),
    # modules
    ("linen class", lambda: jaxmp.linen.apply_policy(nn.Dense, "bf16"), TypeError,
     "jaxmp.linen works on linen modules, got the class Dense. Make a module of it, or decorate "
     "it with jaxmp.linen.with_policy(rules)"),
    ("nnx in linen", lambda: jaxmp.linen.apply_policy(NnxNet(), "bf16"), TypeError,
     "jaxmp.linen works on linen modules, got NnxNet. For an nnx module use jaxmp.nnx"),
    ("function in linen", lambda: jaxmp.linen.apply_policy(jnp.tanh, "bf16"), TypeError,
     "jaxmp.linen works on linen modules, got PjitFunction"),
    ("remove in linen", lambda: jaxmp.linen.remove_policy({}), TypeError,
     "jaxmp.linen works on linen modules, got dict"),
    ("summary in linen", lambda: jaxmp.linen.summary(3, KEY, X), TypeError,
     "jaxmp.linen works on linen modules, got int"),
    ("decorated module", lambda: jaxmp.linen.with_policy("bfloat16")(nn.Dense(2)), TypeError,
     "For a module write jaxmp.linen.apply_policy(module, rules)"),
    ("bound", lambda: BoundInside().init(KEY, X), ValueError,
     "Dense is bound to its variables or to a parent already. Apply the policy to the unbound "
     "module, or inside of a compact method to the class: "
     "jaxmp.linen.with_policy(rules)(Class)(...)"),
    ("nnx class", lambda: jaxmp.nnx.apply_policy(nnx.Linear, "bf16"), TypeError,
     "jaxmp.nnx works on nnx modules, got the class Linear. Make a module of it first"),
    ("linen in nnx", lambda: jaxmp.nnx.apply_policy(nn.Dense(2), "bf16"), TypeError,
     "jaxmp.nnx works on nnx modules, got Dense. For a linen module use jaxmp.linen"),
    ("state in nnx", lambda: jaxmp.nnx.apply_policy(nnx.split(NnxNet())[1], "bf16"), TypeError,
     "Put the parts together with nnx.merge first"),
    ("summary in nnx", lambda: jaxmp.nnx.summary(None), TypeError,
     "jaxmp.nnx works on nnx modules, got NoneType"),
    # policies that cannot be honoured
    ("linen float8", lambda: jaxmp.linen.apply_policy(LinenNet(), "p=f32,c=e4m3fn"), ValueError,
     "no layer can compute in float8_e4m3fn (policy 'params=float32,compute=float8_e4m3fn,"),
    ("decorator float8", lambda: jaxmp.linen.with_policy({"a": "c=e5m2"}), TypeError,
     "rules must be jaxmp.PolicyRules"),
    ("nnx float8", lambda: jaxmp.nnx.apply_policy(NnxNet(), PolicyRules({"dense": "c=e5m2"})),
     ValueError, "plain cast to float8 loses small values. Use 'mixed_float8'"),
    ("linen leaf", lambda: linen_init(LinenNet(), NAMED), ValueError, f"Linen{CANNOT}"),
    ("nnx leaf", lambda: jaxmp.nnx.apply_policy(NnxNet(), NAMED), ValueError, f"Nnx{CANNOT}"),
    ("linen root leaf", lambda: linen_init(LinenScale(), "mixed_float16"), ValueError,
     "LinenScale at '(root)' cannot compute in float16"),
    ("nnx root leaf", lambda: jaxmp.nnx.apply_policy(NnxScale(), "mixed_float16"), ValueError,
     "NnxScale at '(root)' cannot compute in float16"),
    # training
    ("gradients before the model", gradients_first, TypeError,
     "update takes the model and then its gradients: optimizer.update(model, grads); got a State "
     "as the model, and a module as its gradients"),
    ("optimizer", lambda: optimizer(tx=optax.sgd(0.1)), TypeError,
     "tx must be jaxmp.mixed_precision(optimizer, policy), got GradientTransformationExtraArgs"),
    ("nothing to split",
     lambda: jaxmp.nnx.value_and_grad(lambda m: m(X).sum(), microbatches=2)(NnxNet()), ValueError,
     "microbatches needs a positional batch argument to split"),
    ("nnx loss", lambda: jaxmp.nnx.value_and_grad(lambda m, x: m(x))(NnxNet(), X), TypeError,
     "the loss must be a float scalar, got float32[2, 4]. Take a mean or a sum over the batch"),
    ("nnx microbatches", lambda: jaxmp.nnx.value_and_grad(lambda m, x: m(x).mean(),
     microbatches=3)(NnxNet(), X), ValueError, "the batch has 2 examples, which 3 microbatches"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_message(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()
