"""Programs that train, for the digests: gradients over eight devices, optimizers, train steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from digest_functions import SIZES, mlp
from digest_modules import LinenCNN, NnxCNN, linen_loss, mean_square
from digest_program import POLICIES, Make, Program, abstract, named, under_autocast
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array, PyTree
from sharded_lm import Placement, ShardedLM, place, place_on
from stacked_models import GPT

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from jaxmp.sharding import FSDP, gather_params, per_shard, state_shardings

_LM = ShardedLM(layers=2, width=64, heads=4, vocab=128, context=16)
_MIN_SIZE = 2048  # of params that are split
_ADAMW = optax.adamw(1e-3)
_STORAGES = ("float32", "remainder", "remainder8", "kahan", "stochastic", "none")
# What a train step is told of a model that casts by itself.
MODEL_CASTS = "none"


# ------------------------------------------------------------------------------- eight devices


def _placed(tree: PyTree, shardings: PyTree) -> PyTree:
    def put(x: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(put, tree, shardings)


def _tokens(placement: Placement) -> tuple[Any, Any]:
    tokens = jax.ShapeDtypeStruct((16, 16), jnp.int32, sharding=placement.batch)
    return tokens, tokens


def _fsdp_of(placement: Placement) -> FSDP | None:
    return FSDP(shardings=placement.stored, axis="data") if placement.gathers else None


def _placement(mode: Any) -> Placement:
    return place(mode, _LM.params(), jax.devices()[:8], _MIN_SIZE)


def _over_devices(placement: Placement, evaluate: Callable[..., Any], loss: Any = None) -> Program:
    args = _placed(_LM.params(), placement.stored), _tokens(placement)
    run = jax.jit(evaluate, out_shardings=(None, placement.stored))
    return Program(run, args, loss)


def _float32_sums(mode: Any, **options: Any) -> Program:
    placement = _placement(mode)
    options = {"reduce_dtype": jnp.float32, "fsdp": _fsdp_of(placement), **options}
    loss = under_autocast(_LM.loss, "bfloat16")
    return _over_devices(placement, jaxmp.value_and_grad(loss, **options), loss)


def _explicit_axes(mode: str) -> Program:
    """The mesh that `jax.make_mesh` makes by default."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:8])
    placement = place_on(mesh, mode, _LM.params(), _MIN_SIZE)
    loss = under_autocast(_LM.loss, "bfloat16")
    run = jaxmp.value_and_grad(loss, reduce_dtype=jnp.float32, fsdp=_fsdp_of(placement))
    return Program(run, (_placed(_LM.params(), placement.stored), _tokens(placement)))


def _per_shard(mode: Any, comm_dtype: Any) -> Program:
    placement = _placement(mode)
    loss = functools.partial(_LM.loss, dtype=jnp.bfloat16)
    options = {"specs": placement.specs, "dtype": jnp.bfloat16, "comm_dtype": comm_dtype}
    return _over_devices(placement, per_shard(loss, mesh=placement.mesh, **options))


def _shard_map(comm_dtype: Any) -> Program:
    placement = _placement("fsdp")
    specs = placement.specs

    def use(name: str, weights: PyTree) -> PyTree:
        spec = specs[name]
        if name == "layers":
            spec = {key: P(*each[1:]) for key, each in spec.items()}
        return gather_params(weights, spec, "data", dtype=jnp.bfloat16, comm_dtype=comm_dtype)

    def evaluate(params: PyTree, batch: Any) -> tuple[Array, PyTree]:
        loss, grads = jax.value_and_grad(functools.partial(_LM.loss, use=use))(params, batch)
        return jax.lax.pmean(loss, "data"), grads

    given = specs, P("data")
    mapped = jax.shard_map(evaluate, mesh=placement.mesh, in_specs=given, out_specs=(P(), specs))
    return _over_devices(placement, mapped)


# ---------------------------------------------------------------------------------- optimizers


def _optimizer(tx: jaxmp.MixedPrecision) -> Program:
    """One step with given gradients."""
    shapes = {"w": (128, 64), "b": (64,)}
    wide = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    params, state = jax.eval_shape(tx.init_params, wide)
    return Program(tx.apply_gradients, (wide, state, params))


def _wrapped(policy: str = "bfloat16", **options: Any) -> Program:
    return _optimizer(jaxmp.mixed_precision(_ADAMW, policy, **options))


# --------------------------------------------------------------------------------- train steps


def _state(params: PyTree, policy: Any, **collections: PyTree) -> jaxmp.TrainState:
    tx = jaxmp.mixed_precision(_ADAMW, policy)
    create = functools.partial(jaxmp.TrainState.create, tx=tx)
    made: jaxmp.TrainState = jax.eval_shape(create, params=params, **collections)
    return made


def _step(loss: Any, policy: Any, **options: Any) -> Any:
    return jaxmp.make_train_step(loss, policy, recompute="never", **options)


def _train(make: Any, dtype: str, **options: Any) -> Program:
    loss, params, batch = make()
    policy = POLICIES[dtype]
    return Program(_step(loss, policy, **options), (_state(params, policy), batch))


def _gpt() -> Any:
    model = GPT(SIZES)
    return model.loss, abstract(model.params), abstract(model.batch)


def _train_sharded(mode: Any) -> Program:
    placement = _placement(mode)
    state = _state(_LM.params(), "mixed_bfloat16")
    shardings = state_shardings(state, _LM.params(), placement.stored)
    options = {"fsdp": _fsdp_of(placement), "shardings": shardings}
    run = _step(_LM.loss, "mixed_bfloat16", **options)
    return Program(run, (_placed(state, shardings), _tokens(placement)))


def _train_linen() -> Program:
    """Batch statistics pass from step to step, and the model casts."""
    module = jaxmp.linen.apply_policy(LinenCNN(), "mixed_float16")
    x = jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.float32)
    evaluate, params, rest = linen_loss(module, x)

    def loss(params: PyTree, x: Array, batch_stats: PyTree) -> Any:
        return evaluate(params, (x, {"batch_stats": batch_stats}))

    return Program(_step(loss, MODEL_CASTS), (_state(params, "mixed_float16", **rest), x))


def _train_nnx(policy: str) -> Program:
    def make() -> tuple[nnx.Module, Any]:
        model = jaxmp.nnx.apply_policy(NnxCNN(nnx.Rngs(0)), policy)
        return model, jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(_ADAMW, policy))

    graphdef, state = nnx.split(nnx.eval_shape(make))

    def run(state: Any, x: Array) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        scale = optimizer.loss_scale if policy == "mixed_float16" else None
        evaluate = jaxmp.nnx.value_and_grad(lambda m, x: mean_square(m(x)), loss_scale=scale)
        loss, grads = evaluate(model, x)
        optimizer.update(model, grads)
        return loss, nnx.state((model, optimizer))

    return Program(run, (state, jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.float32)))


def _sharded() -> dict[str, Make]:
    programs: dict[str, Make] = {}
    for mode in ("dp", "fsdp", "fsdp+tp"):
        programs |= named(f"sums-{mode.replace('+', '_')}", _float32_sums, mode)
    programs |= named("sums-dp-microbatches", _float32_sums, "dp", microbatches=2)
    for mode in ("dp", "fsdp"):
        programs |= named(f"sums-{mode}-explicit", _explicit_axes, mode)
    programs |= named("sums-dp-per_shard", _per_shard, "dp", None)
    programs |= named("sums-fsdp-per_shard", _per_shard, "fsdp", jnp.bfloat16)
    programs |= named("sums-fsdp-shard_map", _shard_map, None)
    return programs


def _optimizers() -> dict[str, Make]:
    programs: dict[str, Make] = {}
    for master in _STORAGES:
        programs |= named(f"optimizer-master-{master}", _wrapped, master=master)
    for moments in ("bfloat16", "int8"):
        programs |= named(f"optimizer-moments-{moments}", _wrapped, moments=moments)
    for skip in ("cond", "select", "none"):
        programs |= named(f"optimizer-skip-{skip}", _wrapped, skip=skip)
    programs |= named("optimizer-float16", _wrapped, "float16", master="kahan")
    return programs


def _steps() -> dict[str, Make]:
    programs: dict[str, Make] = {}
    for dtype in ("bfloat16", "float16", "float8"):
        programs |= named(f"step-gpt-{dtype}", _train, _gpt, dtype)
    programs |= named("step-gpt-microbatches", _train, _gpt, "bfloat16", microbatches=2)
    programs |= named("step-mlp-float16-microbatches", _train, mlp, "float16", microbatches=4)
    programs |= named("step-sharded-fsdp", _train_sharded, "fsdp")
    programs |= named("step-linen-float16", _train_linen)
    programs |= named("step-nnx-bfloat16", _train_nnx, "mixed_bfloat16")
    programs |= named("step-nnx-float16", _train_nnx, "mixed_float16")
    return programs


TRAINING = {**_sharded(), **_optimizers(), **_steps()}
