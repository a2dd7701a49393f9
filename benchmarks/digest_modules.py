"""Programs of linen, nnx and Equinox for the digests: models that know nothing of precision."""

import functools
from typing import Any, cast

import equinox as eqx
import flax_gpt
import jax
import jax.numpy as jnp
from digest_functions import SIZES
from digest_program import Make, Program, abstract, gradient, named
from flax import linen as nn, nnx
from jaxtyping import Array, PyTree

import jaxmp
import jaxmp.equinox
import jaxmp.linen
import jaxmp.nnx

_POLICY = "mixed_bfloat16"
_RULES = jaxmp.PolicyRules({"type:BatchNorm": "float32", "*head*": "float32"}, _POLICY)
_IMAGES = jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.float32)
_SEQUENCE = jax.ShapeDtypeStruct((4, 16, 32), jnp.float32)


def mean_square(x: Array) -> Array:
    """A loss in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


# --------------------------------------------------------------------------------------- linen


class LinenCNN(nn.Module):
    """Convolutions, batch norms and a head."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (8, 16):
            x = nn.Conv(width, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(16, name="head")(x.mean((1, 2)))


class _LinenLSTM(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(16)(nn.RNN(nn.LSTMCell(32))(x))


class _LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Array, _: None = None) -> tuple[Array, None]:
        h = nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h), None


class _LinenRemat(nn.Module):
    """A scan over checkpointed blocks."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        axes: dict[Any, Any] = {"params": 0}
        rngs: dict[Any, bool] = {"params": True}
        block = nn.remat(_LinenBlock, prevent_cse=False)
        x, _ = nn.scan(block, variable_axes=axes, split_rngs=rngs, length=3)()(x, None)
        return x


class _LinenEither(nn.Module):
    """A cond."""

    def setup(self) -> None:
        self.first, self.second = nn.Dense(32), nn.Dense(32)

    def __call__(self, x: Array) -> Array:
        if self.is_initializing():
            return self.first(x) + self.second(x)
        one: Any = lambda m, x: m.first(x)  # noqa: E731
        other: Any = lambda m, x: m.second(x) * 2  # noqa: E731
        return cast(Array, nn.cond(jnp.sum(x) > 0, one, other, self, x))


class _LinenLifted(nn.Module):
    """A vmap over experts, a cond and a jit."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        axes: dict[Any, Any] = {"params": 0}
        rngs: dict[Any, bool] = {"params": True}
        experts: Any = nn.vmap(
            nn.Dense, variable_axes=axes, split_rngs=rngs, in_axes=None, out_axes=0, axis_size=3
        )
        x = _LinenEither()(experts(32)(x).mean(0))
        return cast(Array, nn.jit(nn.Dense)(16)(x))


def linen_loss(module: nn.Module, inputs: Any) -> tuple[Any, PyTree, PyTree]:
    """A loss of params, statistics and inputs; it returns new statistics, too."""
    variables = dict(abstract(module.init, jax.random.key(0), inputs))
    params = variables.pop("params")

    def loss(params: PyTree, batch: Any) -> Any:
        x, rest = batch
        y, changed = module.apply({"params": params, **rest}, x, mutable=list(rest))
        return mean_square(y), changed

    return loss, params, variables


def _linen(module: nn.Module, inputs: Any, rules: Any = _POLICY) -> Program:
    loss, params, rest = linen_loss(jaxmp.linen.apply_policy(module, rules), inputs)
    batch = inputs, rest
    return gradient(loss, params, batch, dtype="bfloat16", has_aux=True)


# ----------------------------------------------------------------------------------------- nnx


class NnxCNN(nnx.Module):
    """Convolutions, batch norms and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convolutions = nnx.List(
            [nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.Conv(8, 16, (3, 3), rngs=rngs)]
        )
        self.norms = nnx.List([nnx.BatchNorm(n, rngs=rngs) for n in (8, 16)])
        self.head = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        for convolve, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.relu(norm(convolve(x)))
        return self.head(x.mean((1, 2)))


class _NnxLSTM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.LSTMCell(32, 32, rngs=rngs))
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.head(self.rnn(x, rngs=nnx.Rngs(0)))


class _NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def _call(module: Any, x: Array) -> Array:
    return cast(Array, module(x))


class _NnxRemat(nnx.Module):
    """A scan over checkpointed blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks: Any = nnx.split_rngs(splits=3)(nnx.vmap(_NnxBlock))(rngs)

    def __call__(self, x: Array) -> Array:
        step = nnx.remat(_call)
        return nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


class _NnxLifted(nnx.Module):
    """A vmap over experts, a cond and a jit."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = lambda r: nnx.Linear(32, 32, rngs=r)  # noqa: E731
        self.experts: Any = nnx.split_rngs(splits=3)(nnx.vmap(make))(rngs)
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.second = nnx.Linear(32, 32, rngs=rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.vmap(_call, in_axes=(0, None))(self.experts, x).mean(0)
        either = lambda m, x: m.first(x)  # noqa: E731
        other = lambda m, x: m.second(x) * 2  # noqa: E731
        y: Any = nnx.cond(jnp.sum(x) > 0, either, other, self, x)
        return nnx.jit(_call)(self.head, y)


def _nnx(kind: Any, inputs: Any, rules: Any = _POLICY) -> Program:
    model = nnx.eval_shape(lambda: kind(nnx.Rngs(0)))
    under = jaxmp.nnx.apply_policy(model, rules)
    run, args = _nnx_gradient(under, inputs)
    loss, loss_args = _nnx_loss(under, inputs)
    return Program(run, args, loss, loss_args)


def _nnx_gradient(model: Any, inputs: Any) -> tuple[Any, tuple[Any, ...]]:
    graphdef, state = nnx.split(model)

    def run(state: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        results = jaxmp.nnx.value_and_grad(lambda m, x: mean_square(m(x)))(model, x)
        return results, nnx.state(model)

    return run, (state, inputs)


def _nnx_loss(model: Any, inputs: Any) -> tuple[Any, tuple[Any, ...]]:
    parts: Any = nnx.split(model, nnx.Param, ...)
    graphdef, params, rest = parts

    def loss(params: Any, rest: Any, x: Any) -> Any:
        return mean_square(nnx.merge(graphdef, params, rest)(x))

    return loss, (params, rest, inputs)


# ------------------------------------------------------------------- the GPTs of flax_gpt, Equinox


def _flax_gpt(library: str, scan: bool, policy: Any = _POLICY, **options: Any) -> Program:
    loss, params = flax_gpt.PROGRAMS[library](SIZES, scan, policy)
    tokens = jax.ShapeDtypeStruct((SIZES.batch, SIZES.length + 1), jnp.int32)
    return gradient(loss, params, tokens, dtype="bfloat16", **options)


class _EquinoxCNN(eqx.Module):
    convolve: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    head: eqx.nn.MLP

    def __init__(self, key: Array) -> None:
        keys = jax.random.split(key)
        self.convolve = eqx.nn.Conv2d(3, 8, 3, key=keys[0])
        self.norm = eqx.nn.LayerNorm(8)
        self.head = eqx.nn.MLP(8, 16, 32, 2, key=keys[1])

    def __call__(self, x: Array) -> Array:
        return self.head(self.norm(jax.nn.relu(self.convolve(x)).mean((1, 2))))


class _EquinoxAttention(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm

    def __init__(self, key: Array) -> None:
        self.attention = eqx.nn.MultiheadAttention(4, 32, key=key)
        self.norm = eqx.nn.LayerNorm(32)

    def __call__(self, x: Array) -> Array:
        h = jax.vmap(self.norm)(x)
        return x + self.attention(h, h, h)


def _equinox(kind: Any, inputs: Any, **options: Any) -> Program:
    model = eqx.filter_eval_shape(
        lambda key: jaxmp.equinox.apply_policy(kind(key), _POLICY), jax.random.key(0)
    )
    value_and_grad: Any = functools.partial(jaxmp.equinox.filter_value_and_grad, **options)
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def run(params: Any, x: Any) -> Any:
        def loss(model: Any, x: Any) -> Any:
            return mean_square(jax.vmap(model)(x))

        return value_and_grad(loss)(eqx.combine(params, static), x)

    return Program(run, (params, inputs))


def _modules() -> dict[str, Make]:
    programs: dict[str, Make] = {}
    programs |= named("linen-cnn", _linen, LinenCNN(), _IMAGES, _RULES)
    programs |= named("linen-lstm", _linen, _LinenLSTM(), _SEQUENCE)
    programs |= named("linen-remat", _linen, _LinenRemat(), _SEQUENCE)
    programs |= named("linen-lifted", _linen, _LinenLifted(), _SEQUENCE)
    programs |= named("nnx-cnn", _nnx, NnxCNN, _IMAGES, _RULES)
    programs |= named("nnx-lstm", _nnx, _NnxLSTM, _SEQUENCE)
    programs |= named("nnx-remat", _nnx, _NnxRemat, _SEQUENCE)
    programs |= named("nnx-lifted", _nnx, _NnxLifted, _SEQUENCE)
    float8 = jaxmp.get_policy("mixed_float8")
    for library in ("linen", "nnx"):
        programs |= named(f"{library}-gpt-scan", _flax_gpt, library, True)
        programs |= named(f"{library}-gpt-unrolled", _flax_gpt, library, False)
        programs |= named(f"{library}-gpt-scan-float8", _flax_gpt, library, True, float8)
        programs |= named(
            f"{library}-gpt-scan-recompute", _flax_gpt, library, True, recompute="auto"
        )
    images = jax.ShapeDtypeStruct((4, 3, 8, 8), jnp.float32)
    programs |= named("equinox-cnn", _equinox, _EquinoxCNN, images)
    programs |= named("equinox-attention", _equinox, _EquinoxAttention, _SEQUENCE)
    programs |= named(
        "equinox-attention-recompute", _equinox, _EquinoxAttention, _SEQUENCE, recompute="auto"
    )
    return programs


MODULES = _modules()
