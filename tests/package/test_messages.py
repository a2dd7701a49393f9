"""What users read when they give something wrong: what it was, what is valid, what to do."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._numerics.tree import cast_floating
from jaxmp._policies.recipe import get_recipe

# These cases hand over wrong types on purpose; users have no runtime type checker in between.
pytestmark = pytest.mark.usefixtures("unchecked")

PARAMS = {"w": jnp.ones(2), "b": jnp.zeros(1)}


def tx(**options: Any) -> jaxmp.MixedPrecision:
    return jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16", **options)


def update(grads: Any = PARAMS, state: Any = None, params: Any = PARAMS) -> Any:
    transform = tx()
    return transform.update(grads, transform.init(PARAMS) if state is None else state, params)


def value_and_grad(*args: Any, fun: Any = None, **options: Any) -> Any:
    fun = fun or (lambda w, x: jnp.mean(w * x))
    return jaxmp.value_and_grad(fun, **options)(*args or (jnp.float32(1.0), jnp.ones(6)))


def train_state(**collections: Any) -> jaxmp.TrainState:
    return jaxmp.TrainState.create(params=PARAMS, tx=tx(), **collections)


def step(fun: Any, **options: Any) -> Any:
    collections = options.pop("collections", {})
    return jaxmp.make_train_step(fun, **options)(train_state(**collections), jnp.ones(3))


def float8_state() -> jaxmp.TrainState:
    """Wrapped for a plain cast to float8."""
    wrapped = jaxmp.mixed_precision(optax.sgd(0.1), "c=e4m3fn,o=f32")
    return jaxmp.TrainState.create(params=PARAMS, tx=wrapped)


def any_step() -> Any:
    return jaxmp.make_train_step(lambda p, b: p["b"][0])


def flax_state() -> Any:
    return flax.training.train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx())


CASES: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    # policies
    ("policy name", lambda: jaxmp.get_policy("mixed_bfloat15"), ValueError,
     "unknown policy 'mixed_bfloat15'. Did you mean 'mixed_bfloat16'? Valid: float32, bfloat16, "
     "float16, mixed_bfloat16, mixed_float16, mixed_float8, mixed_int8, O0, O1, O2, O3, any other "
     "dtype name such as 'f64', or a string such as "
     "'params=float32,compute=bfloat16,output=float32'."),
    ("part of a policy name", lambda: jaxmp.get_policy("float8"), ValueError,
     "unknown policy 'float8'. Did you mean 'mixed_float8'?"),
    ("policy type", lambda: jaxmp.get_policy(3), TypeError,
     "policy must be a string or a Policy, got int"),
    ("dtype name", lambda: jaxmp.get_policy("c=bfloat61"), ValueError,
     "unknown dtype 'bfloat61'. Did you mean 'bfloat16'? Valid names: float64, float32,"),
    ("far dtype name", lambda: jaxmp.get_policy("c=zzz"), ValueError,
     "unknown dtype 'zzz'. Valid names: float64, float32,"),
    ("dtype", lambda: jaxmp.Policy("f32", jnp.int32, "f32"), ValueError,
     "dtype int32 is not a float that a policy can hold. Valid names: float64"),
    ("not a dtype", lambda: jaxmp.Policy("f32", object(), "f32"), ValueError,
     "is not a dtype. Valid names: float64"),
    ("no dtype", lambda: jaxmp.Policy("f32", None, "f32"), ValueError,  # NumPy: float64
     "None is not a dtype. Valid names: float64"),
    ("key", lambda: jaxmp.get_policy("compte=bf16"), ValueError,
     "unknown key 'compte' in policy 'compte=bf16'. Did you mean 'compute'? Valid keys: "
     "params (p), compute (c), output (o), reduce (r)"),
    ("key twice", lambda: jaxmp.get_policy("c=bf16,compute=f16"), ValueError,
     "key 'compute' is given twice in policy 'c=bf16,compute=f16'"),
    ("two dtypes", lambda: jaxmp.get_policy("c=f16=bf16"), ValueError,
     "unknown dtype 'f16=bf16'"),
    ("trailing comma", lambda: jaxmp.get_policy("c=bf16,"), ValueError,
     "cannot read '' in policy 'c=bf16,': expected key=dtype"),
    ("no value", lambda: jaxmp.get_policy("c="), ValueError, "cannot read 'c='"),
    ("float8 recipe", lambda: jaxmp.get_policy("mixed_float8,products=tensorwize"), ValueError,
     "unknown recipe 'tensorwize'. Did you mean 'tensorwise'? Valid: tensorwise, rowwise, "
     "rowwise_hp"),
    ("float8 recipe type", lambda: jaxmp.Policy("f32", "bf16", "f32", products=8), TypeError,
     "products must be a jaxmp.float8.Recipe or its name, got int"),
    ("float8 recipe field", lambda: get_recipe("rowwise:gradiant=e5m2"), ValueError,
     "cannot read 'gradiant=e5m2' in recipe 'rowwise:gradiant=e5m2': expected one field=value of "
     "granularity, forward, gradient, power_of_two, weight_gradient, minimum. "
     "Did you mean 'gradient'?"),
    ("float8 granularity", lambda: jaxmp.float8.Recipe(granularity="channel"), ValueError,
     "granularity of a recipe must be one of 'tensor', 'row', 'block'; got "
     "'channel'"),
    ("float8 format", lambda: jaxmp.float8.Recipe(forward="bf16"), ValueError,
     "forward of a recipe must be one of float8_e4m3fn, float8_e5m2, int8; got bfloat16"),
    ("float8 and int8", lambda: get_recipe("int8:gradient=e5m2"), ValueError,
     "a recipe multiplies float8 or int8, not both; got forward=int8, gradient=float8_e5m2"),
    ("int8 weight gradient", lambda: get_recipe("int8:weight_gradient=float8"), ValueError,
     "weight_gradient of a recipe must be one of 'int8', 'bfloat16'; got 'float8'"),
    ("formats of 4 bits", lambda: jaxmp.get_policy("mixed_bfloat16,products=nvfp4"), ValueError,
     "nvfp4 has numbers of 4 bits, whose gradients need transforms and random rounding, and no "
     "device was here to measure them. Of formats with blocks there is 'mxfp8', for a B200"),
    ("blocks of another format", lambda: get_recipe("mxfp8:gradient=float8_e5m2"), ValueError,
     "blocks are MXFP8: one float8 format, and scales that are powers of two; got "
     "forward=float8_e4m3fn, gradient=float8_e5m2, power_of_two=True. Take the recipe 'mxfp8'"),
    ("blocks of int8", lambda: get_recipe("int8:granularity=block"), ValueError,
     "blocks are MXFP8: one float8 format, and scales that are powers of two; got forward=int8"),
    ("blocks on a CPU", lambda: jaxmp.float8.dot_general(
        jnp.ones((32, 32)), jnp.ones((32, 32)), (((1,), (0,)), ((), ())), recipe="mxfp8",
     ), NotImplementedError,
     "mxfp8 runs on NVIDIA GPUs of compute capability 10, such as a B200. This program is "
     "for CPU, where products of blocks would be products in bfloat16. Use 'tensorwise' or "
     "'rowwise_hp' there"),
    ("float8 in blocks", lambda: jaxmp.get_policy("mixed_float8,products=blockwise"), ValueError,
     "blockwise would be slower than bfloat16: XLA has no product of blocks of 128 with a scale "
     "each. For activations with outliers take 'rowwise_hp'. Use one of: tensorwise, rowwise"),
    ("float8, delayed", lambda: jaxmp.get_policy("mixed_float8,products=delayed:history=8"),
     ValueError, "scales from earlier steps need a state, which no recipe has. Take 'tensorwise', "
     "whose scales come from the values at hand. Use one of: tensorwise"),
    ("float8 in float32", lambda: jaxmp.get_policy("float32,products=tensorwise"), ValueError,
     "products in 8 bits (tensorwise) need a compute dtype of 16 bits for all that is around them, "
     "got float32. Use 'mixed_float8', or compute=bfloat16"),
    ("float8 parameter", lambda: jaxmp.float8.dot_general(1, 2, None, parameter=2), ValueError,
     "parameter must be 0 (lhs) or 1 (rhs), got 2"),
    ("O1", lambda: jaxmp.linen.with_policy("O1"), ValueError, "jaxmp.autocast(loss_fn, 'O1')"),
    # loss scales
    ("scale zero", lambda: jaxmp.StaticLossScale(0.0), ValueError,
     "scale must be a finite float32 above zero, at least 2**-126 so that 1/scale is finite, "
     "got 0.0"),
    ("scale negative", lambda: jaxmp.StaticLossScale(-1.0), ValueError, "got -1.0"),
    ("scale inf", lambda: jaxmp.StaticLossScale(float("inf")), ValueError, "got inf"),
    ("scale nan", lambda: jaxmp.DynamicLossScale(init_scale=float("nan")), ValueError,
     "init_scale must be a finite float32 above zero"),
    ("scale string", lambda: jaxmp.StaticLossScale("big"), ValueError,
     "scale must be a number, got 'big'"),
    ("min_scale zero", lambda: jaxmp.DynamicLossScale(min_scale=0.0), ValueError,
     "min_scale must be a finite float32 above zero"),
    ("growth 1", lambda: jaxmp.DynamicLossScale(growth_factor=1.0), ValueError,
     "growth_factor must be finite and above 1, got 1.0"),
    ("growth inf", lambda: jaxmp.DynamicLossScale(growth_factor=float("inf")), ValueError,
     "growth_factor must be finite and above 1, got inf"),
    ("backoff 1", lambda: jaxmp.DynamicLossScale(backoff_factor=1.0), ValueError,
     "backoff_factor must be between 0 and 1, got 1.0"),
    ("backoff negative", lambda: jaxmp.DynamicLossScale(backoff_factor=-0.5), ValueError,
     "backoff_factor must be between 0 and 1, got -0.5"),
    ("interval", lambda: jaxmp.DynamicLossScale(growth_interval=0), ValueError,
     "growth_interval must be a whole number of at least 1, got 0"),
    ("interval float", lambda: jaxmp.DynamicLossScale(growth_interval=2.5), ValueError,
     "growth_interval must be a whole number, got 2.5"),
    ("hysteresis", lambda: jaxmp.DynamicLossScale(hysteresis=True), ValueError,
     "hysteresis must be a whole number of at least 1, got True"),
    ("floor above ceiling", lambda: jaxmp.DynamicLossScale(min_scale=8.0, max_scale=4.0),
     ValueError, "min_scale 8.0 is above max_scale 4.0: the floor of the loss scale cannot be"),
    ("init outside", lambda: jaxmp.DynamicLossScale(init_scale=2.0**30), ValueError,
     "init_scale 1073741824.0 is outside min_scale 1.0 to max_scale 16777216.0. Move the bound"),
    ("flag", lambda: jaxmp.NoLossScale().adjust(jaxmp.NoLossScale().init(), jnp.ones(2)),
     TypeError, "grads_finite must be a boolean scalar, such as jaxmp.numbers.all_finite(grads); "
     "got float32[2]"),
    # gradients
    ("only integers", lambda: value_and_grad({"a": {"n": jnp.int32(1)}}, 1.0), TypeError,
     "argument 0, leaf 'a/n', is int32: only floating leaves have gradients and masters. Keep "
     "counters, keys and tables of integers in another argument"),
    ("key leaf", lambda: value_and_grad(jax.random.key(0), 1.0), TypeError,
     "argument 0, leaf '(root)', is a key<fry>: params are trees of arrays. Of a model that holds "
     "other things, such as an Equinox module, take the arrays: params, static = "
     "eqx.partition(model, eqx.is_inexact_array), and eqx.combine(params, static) in the loss "
     "function. Keep PRNG keys in another argument"),
    ("function among params", lambda: value_and_grad({"w": 1.0, "act": abs}, 1.0), TypeError,
     "argument 0, leaf 'act', is a builtin_function_or_method: params are trees of arrays"),
    ("function in a state", lambda: jaxmp.TrainState.create(
        params=PARAMS | {"act": abs}, tx=tx()), TypeError,
     "params, leaf 'act', is a builtin_function_or_method: params are trees of arrays"),
    ("vector loss", lambda: value_and_grad(fun=lambda w, x: w * x), TypeError,
     "the loss must be a float scalar, got float32[6]. Take a mean or a sum over the batch"),
    ("int loss", lambda: value_and_grad(fun=lambda w, x: jnp.int32(3)), TypeError,
     "the loss must be a float scalar, got int32[]"),
    ("no loss", lambda: value_and_grad(fun=lambda w, x: None), TypeError, "got a NoneType"),
    ("aux forgotten", lambda: value_and_grad(fun=lambda w, x: (w, x)), TypeError,
     "the loss must be a float scalar, got a tuple. If the function returns (loss, aux), give "
     "has_aux=True"),
    ("aux missing", lambda: value_and_grad(fun=lambda w, x: w, has_aux=True), TypeError,
     "with has_aux=True the loss function must return (loss, aux)"),
    ("config as scale", lambda: value_and_grad(loss_scale=jaxmp.DynamicLossScale()), TypeError,
     "loss_scale must be the state of a loss scale, such as opt_state.loss_scale or "
     "config.init(), a float scalar or None; got DynamicLossScale"),
    ("argnums", lambda: value_and_grad(argnums=2), ValueError,
     "argnums contains 2, but only 2 positional arguments came"),
    # microbatches
    ("does not divide", lambda: value_and_grad(microbatches=4), ValueError,
     "the batch has 6 examples, which 4 microbatches do not divide. Use a batch size that is a "
     "multiple of 4"),
    ("different lengths", lambda: value_and_grad(
        jnp.float32(1), jnp.ones(6), jnp.ones(4), fun=lambda w, x, t: w, microbatches=2),
     ValueError, "batch leaves '1' and '2' have 6 and 4 examples: only arrays with one and the "
     "same leading batch axis can be split into microbatches. Give each example its own"),
    ("keyword batch", lambda: jaxmp.grad(lambda w, x, y: w, microbatches=2)(
        1.0, jnp.ones(6), y=jnp.ones(6)), ValueError,
     "keyword argument 'y' has 6 examples like the batch, but keyword arguments are not split "
     "into microbatches. Pass it by position"),
    ("scalar in batch", lambda: value_and_grad(jnp.float32(1), 2.0, microbatches=2), ValueError,
     "batch leaf '1' is a scalar and has no examples to split into microbatches. Give each "
     "example its own, jnp.full(examples, x), or, in value_and_grad, leave its argument out"),
    ("microbatches 0", lambda: value_and_grad(microbatches=0), ValueError,
     "microbatches must be a whole number of at least 1, got 0"),
    ("no batch", lambda: value_and_grad(jnp.float32(1), fun=lambda w: w, microbatches=2),
     ValueError, "microbatches needs a positional batch argument to split"),
    ("both", lambda: value_and_grad(microbatches=2, batch_argnums=0), ValueError,
     "arguments [0] are in both argnums and batch_argnums"),
    # optimizer
    ("master", lambda: tx(master="fp32"), ValueError,
     "master must be one of 'float32', 'remainder', 'remainder8', 'kahan', "
     "'stochastic', 'none', got 'fp32'"),
    ("skip", lambda: tx(skip="where"), ValueError,
     "skip must be one of 'auto', 'cond', 'select', 'none', got 'where'"),
    ("skip none", lambda: tx(skip="none"), ValueError,
     "a dynamic loss scale finds its value by overflowing, and skip='none' would apply the"),
    ("loss scale", lambda: tx(loss_scale=1024.0), TypeError,
     "loss_scale must be 'auto' or a config such as DynamicLossScale(), StaticLossScale(1024.0) "
     "or NoLossScale(); got 1024.0"),
    ("loss scale class", lambda: tx(loss_scale=jaxmp.DynamicLossScale), TypeError, "got <class"),
    ("inner", lambda: jaxmp.mixed_precision("adam", "O0"), TypeError,
     "inner must be an optax.GradientTransformation such as optax.adamw(1e-3), got str"),
    ("optimizer and policy swapped", lambda: jaxmp.mixed_precision("O0", optax.sgd(0.1)),
     TypeError, "inner must be an optax.GradientTransformation such as optax.adamw(1e-3), got str"),
    ("twice", lambda: jaxmp.mixed_precision(tx(), "O0"), TypeError,
     "the optimizer is wrapped in mixed_precision already; wrap it once"),
    ("no params", lambda: update(params=None), ValueError,
     "mixed_precision needs the params to update: call tx.update(grads, state, params)"),
    ("foreign state", lambda: update(state=optax.sgd(0.1).init(PARAMS)), TypeError,
     "the state must be the MixedPrecisionState that tx.init returned, got tuple"),
    ("no state", lambda: tx().update(PARAMS, None, PARAMS), TypeError,
     "got None: the program around restored no state, perhaps since params were loaded in other "
     "dtypes than they were saved in. Load them as they were, or begin anew with tx.init(params)"),
    ("missing gradient", lambda: update(grads={"w": jnp.ones(2)}), ValueError,
     "gradients and params have different structures; missing: b. Differentiate with respect to"),
    ("wrong shape", lambda: update(grads={"w": jnp.ones(3), "b": jnp.ones(1)}), ValueError,
     "gradients leaf 'w' has shape (3,), but the leaf of params has (2,)"),
    ("integer gradients", lambda: update(grads={"w": jnp.arange(2), "b": jnp.ones(1)}), TypeError,
     "gradients, leaf 'w', is int32"),
    ("integer params", lambda: tx().init({"a": {"table": jnp.arange(3)}}), TypeError,
     "params, leaf 'a/table', is int32, and the optimizer moves it, or may: only floating leaves "
     "have gradients and masters. Keep counters, keys and tables of integers elsewhere (Equinox: "
     "eqx.filter(model, eqx.is_inexact_array); nnx: a Variable that is no Param), convert it to a "
     "float, or freeze it by optax.set_to_zero in an optax.multi_transform around all else"),
    ("params cast after init",
     lambda: update(params=cast_floating(PARAMS, jnp.float16)), ValueError,
     "the params do not match the optimizer state: their structure, shapes or dtypes are not "
     "those that tx.init saw. Masters now: none; wanted: b float32[1], w float32[2]. "
     "Cast params before tx.init (or let tx.init_params do it) and keep their dtypes, as "
     "optax.apply_updates does, and equinox.apply_updates does not. A state that was saved under "
     "another policy, or with another master=..., becomes one of this optimizer by "
     "jaxmp.storage.convert_state(state, tx). Where other params were frozen before, make the "
     "masters anew: state._replace(master=tx.init(params).master)"),
    ("other moments", lambda: tx(moments="int8").update(PARAMS, tx().init(PARAMS), PARAMS),
     ValueError, "the state is that of another optimizer, or its moments are stored otherwise"),
    ("in a chain", lambda: optax.chain(tx(), optax.clip(1.0)).init(PARAMS), ValueError,
     "mixed_precision must be the outermost transformation, but optax.transforms._combining "
     "called it. Put the other transformation inside: mixed_precision(optax.chain(clip, adamw)"),
    ("in MultiSteps", lambda: optax.MultiSteps(tx(), 2).init(PARAMS), ValueError,
     "must be the outermost transformation, but optax.transforms._accumulation called it"),
    ("in inject_hyperparams",
     lambda: optax.inject_hyperparams(lambda lr: jaxmp.mixed_precision(optax.sgd(lr), "O0"))(
         lr=0.1).init(PARAMS), ValueError, "must be the outermost transformation"),
    # train state
    ("bare tx", lambda: jaxmp.TrainState.create(params=PARAMS, tx=optax.sgd(0.1)), TypeError,
     "tx must be jaxmp.mixed_precision(optimizer, policy), got GradientTransformationExtraArgs"),
    ("collection name", lambda: train_state(step=1), ValueError,
     "collections cannot be called ['step']: TrainState uses such a name itself"),
    ("collection called like a method", lambda: train_state(replace=1, grads=2), ValueError,
     "collections cannot be called ['grads', 'replace']: TrainState uses such a name itself"),
    ("apply_fn", lambda: train_state(apply_fn=lambda x: x), TypeError,
     "apply_fn must be a tree of arrays, but its leaf '(root)' is a function. TrainState keeps no "
     "functions and no text: let the loss function close over them, as over model.apply"),
    ("text in a collection", lambda: train_state(stats={"name": "adam"}), TypeError,
     "stats must be a tree of arrays, but its leaf 'name' is a str"),
    ("another update", lambda: tx()._replace(update=optax.sgd(0.1).update), ValueError,
     "init and update of mixed_precision belong together, and cannot be replaced. Change the "
     "optimizer inside: mixed_precision(inner._replace(...), policy)"),
    ("unknown cast", lambda: jaxmp.make_train_step(lambda p, b: 0.0, cast="some"), ValueError,
     "cast must be 'products', 'params' or 'all', got 'some'"),
    ("flax state", lambda: any_step()(flax_state(), jnp.ones(3)), TypeError,
     "a step is called as step(state, batch) with a jaxmp.TrainState, got flax.TrainState. "
     "Make one with jaxmp.TrainState.create(params=..., tx=...). Flax's TrainState takes the same "
     "tx in a step of your own: jaxmp.value_and_grad with loss_scale=state.opt_state.loss_scale, "
     "then state.apply_gradients(grads=grads)"),
    ("swapped", lambda: any_step()(jnp.ones(2), train_state()), TypeError,
     "got jaxlib.ArrayImpl: the arguments are swapped. Make one with"),
    ("two policies", lambda: step(lambda p, b: p["b"][0], policy="mixed_bfloat16"), ValueError,
     "the train step computes in bfloat16, but the optimizer was wrapped for float16, and its "
     "loss scale chosen for that. Leave the policy of make_train_step out: it is that of the "
     "optimizer"),
    ("two reductions", lambda: step(
        lambda p, b: p["b"][0], policy="p=f32,c=f16,o=f32,reduce=float16"), ValueError,
     "the train step reduces gradients in float16, but the optimizer was wrapped for float32, and "
     "its loss scale chosen for that. Leave the policy of make_train_step out"),
    ("other rules", lambda: step(
        lambda p, b: p["b"][0], policy=jaxmp.PolicyRules([("a", "float32")])),
     ValueError, "the optimizer was wrapped for other rules than those of this step, and its loss "
     "scale chosen for them. Leave the policy of make_train_step out"),
    ("who casts", lambda: jaxmp.make_train_step(lambda p, b: 0.0, "none", cast="all"), ValueError,
     "cast='all' and policy='none' contradict each other: who casts?"),
    ("not a loss", lambda: jaxmp.make_train_step("mixed_bfloat16"), TypeError,
     "make_train_step takes a loss function, got str"),
    ("select", lambda: jaxmp.numbers.select(jnp.array(True), jnp.float32(1), jnp.float16(1)),
     TypeError, "cannot select between float32 and float16: cast one of them"),
    ("select by a mask", lambda: jaxmp.numbers.select(jnp.ones(2, bool), 1.0, 2.0), TypeError,
     "pred must be a boolean scalar, such as jaxmp.numbers.all_finite(grads); got bool[2]"),
    ("bool scale", lambda: value_and_grad(loss_scale=True), TypeError, "got bool"),
    ("complex gradients", lambda: update(grads={"w": jnp.ones(2, "c8"), "b": jnp.ones(1)}),
     TypeError, "gradients leaf 'w' is complex, but its param is real"),
    ("finite", lambda: tx().update(PARAMS, tx().init(PARAMS), PARAMS, finite=jnp.ones(2)),
     TypeError, "finite must be a boolean scalar"),
    ("aux in the step", lambda: step(lambda p, b: (p["b"][0], 1.0)), TypeError,
     "the loss function must return (loss) here, got a tuple of 2. For another output beside it, "
     "give has_aux=True"),
    ("unknown attribute", lambda: train_state(stats=1).stat, AttributeError,
     "TrainState has no field or collection 'stat'"),
    ("unknown collection", lambda: train_state(stats=1).apply_gradients(PARAMS, stat=1),
     ValueError, "the state has no collection 'stat'. Did you mean 'stats'? It has: stats. Give "
     "it to TrainState.create"),
    ("collection structure",
     lambda: train_state(stats={"m": 1.0}).apply_gradients(PARAMS, stats={"v": 1.0}), ValueError,
     "collection 'stats' and the old one have different structures; missing: m; left over: v"),
    ("float8 step", lambda: any_step()(float8_state(), 1.0), ValueError,
     "make_train_step cannot compute in float8_e4m3fn: a plain cast to float8 loses small "
     "gradients. Use 'mixed_float8', which scales"),
    ("no collections returned", lambda: step(lambda p, b, s: p["b"][0], collections={"s": 1.0}),
     TypeError, "the loss function must return (loss, collections) here, got float32[]. For"),
    ("collections not a dict",
     lambda: step(lambda p, b, s: (p["b"][0], 1.0), collections={"s": 1.0}), TypeError,
     "the collections that the loss function returns must be a dictionary by name, got float"),
    ("unknown collection returned",
     lambda: step(lambda p, b, s: (p["b"][0], {"t": 1.0}), collections={"s": 1.0}), ValueError,
     "the state has no collection 't'. It has: s. Give it to TrainState.create, or return it"),
    ("aux of the step", lambda: step(lambda p, b: p["b"][0], has_aux=True), TypeError,
     "the loss function must return (loss, aux) here, got float32[]"),
    ("mesh and params swapped", lambda: jaxmp.sharding.fully_sharded("mesh", PARAMS), TypeError,
     "mesh must be a jax.sharding.Mesh, got a dict"),
    ("step microbatches", lambda: jaxmp.make_train_step(lambda p, b: 0.0, microbatches=1.5),
     ValueError, "microbatches must be a whole number of at least 1, got 1.5"),
    ("nothing to check", lambda: jaxmp.check_progress({"a": 1}), TypeError,
     "no state of jaxmp.mixed_precision in this dict; pass the TrainState or the optimizer"),
]  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("call", "error", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_message(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_update_in_a_wrapper_is_refused_too() -> None:
    """Also under jit, and when only the update goes through the wrapper."""
    transform = tx()
    chained = optax.chain(transform, optax.scale(2.0))
    state = (transform.init(PARAMS), optax.ScaleState())
    with pytest.raises(ValueError, match="outermost"):
        jax.jit(chained.update)(PARAMS, state, PARAMS)


def stalled(scale: float = 1.0, skips: int = 50) -> jaxmp.TrainState:
    state = train_state()
    opt_state = state.opt_state._replace(
        skipped=jnp.int32(max(skips, 16)),  # as many as brought the scale down
        consecutive_skips=jnp.int32(skips),
        loss_scale=state.opt_state.loss_scale._replace(scale=jnp.float32(scale)),
    )
    return dataclasses.replace(state, opt_state=opt_state)


def test_check_progress() -> None:
    with pytest.raises(jaxmp.TrainingStalled, match="the loss is not finite, and the step was tak"):
        jaxmp.check_progress(stalled(skips=0), loss=np.nan)
    jaxmp.check_progress(stalled(skips=49))
    with pytest.raises(
        jaxmp.TrainingStalled,
        match=r"50 optimizer steps in a row were skipped.*loss scale is 1\. No loss scale cures "
        r"this\. If the loss itself is infinite or NaN, the forward pass is broken; look for "
        r"inputs and activations beyond 65504.*use 'mixed_bfloat16'.*lower the learning rate",
    ):
        jaxmp.check_progress(stalled())
    with pytest.raises(jaxmp.TrainingStalled, match="The loss itself is not finite"):
        jaxmp.check_progress(stalled().opt_state, loss=jnp.float32(jnp.nan))
    with pytest.raises(jaxmp.TrainingStalled, match="The loss is finite: the backward pass"):
        jaxmp.check_progress(stalled(), loss=2.0)
    ensemble = jax.tree.map(lambda x: jnp.stack([x, x]), stalled(skips=60).opt_state)
    with pytest.raises(jaxmp.TrainingStalled, match="60 optimizer steps"):
        jaxmp.check_progress(ensemble)
    with pytest.raises(jaxmp.TrainingStalled, match="7 optimizer steps"):
        jaxmp.check_progress(stalled(skips=7), limit=5)
    counts = {"a": 7, "b": {"w": 12000, "v": 0}, "c": 1, "d": 3, "e": 2}
    with pytest.raises(
        jaxmp.TrainingStalled,
        match=r"gradients: 'b/w' \(12,000\), 'a' \(7\), 'd' \(3\) and 2 more\. If the loss",
    ):
        jaxmp.check_progress(stalled(), nonfinite=jax.tree.map(jnp.uint32, counts))
