"""What a linen module carries beside its fields survives a policy.

Every Flax model of diffusers and of MaxDiffusion has an `__init__` that keeps its arguments in
`config`, which `setup` reads.
"""

import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jaxmp
from tests.support.dots import count_dots

X, KEY = jnp.ones((2, 4)), jax.random.key(0)


def keeps_config(cls: Any) -> Any:
    """A class decorator as libraries write it: `__init__` sets more than the fields."""
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        defaults = {
            field.name: getattr(self, field.name, None) for field in dataclasses.fields(self)
        }
        object.__setattr__(self, "config", defaults | kwargs)
        original(self, *args, **kwargs)

    cls.__init__ = init
    return cls


class Net(nn.Module):
    width: int = 8

    def setup(self) -> None:
        self.dense = nn.Dense(self.config["width"])

    def __call__(self, x: Any) -> Any:
        return self.dense(x)


def net() -> Any:
    """A class of its own for each test, as decorators change it."""
    return keeps_config(type(Net)("Net", (Net,), {"__module__": __name__, "__qualname__": "Net"}))


def check(module: Any, dtype: str = "bfloat16") -> None:
    variables = jax.eval_shape(module.init, KEY, X)
    assert {x.dtype.name for x in jax.tree.leaves(variables)} == {"float32"}
    assert set(count_dots(module.apply, variables, X)) == {dtype}
    assert jax.eval_shape(module.apply, variables, X).shape == (2, 6)


def test_at_the_root() -> None:
    module = net()(width=6)
    check(module, "float32")  # control: Flax alone
    check(jaxmp.linen.apply_policy(module, "mixed_bfloat16"))
    again = jaxmp.linen.apply_policy(jaxmp.linen.apply_policy(module, "float16"), "mixed_bfloat16")
    check(again)
    check(again.clone())
    check(jaxmp.linen.remove_policy(again), "float32")


def test_as_a_part() -> None:
    cls = net()

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return cls(width=6, name="net")(x)

    check(jaxmp.linen.apply_policy(Model(), "mixed_bfloat16"))


@pytest.mark.parametrize("outer", ["config", "policy"])
def test_with_policy(outer: str) -> None:
    plain = type(Net)("Net", (Net,), {"__module__": __name__, "__qualname__": "Net"})
    under = jaxmp.linen.with_policy("mixed_bfloat16")
    module = (keeps_config(under(plain)) if outer == "config" else under(keeps_config(plain)))(
        width=6
    )
    check(module)
    check(jaxmp.linen.apply_policy(module, jaxmp.PolicyRules([("dense", "mixed_bfloat16")])))


def test_what_is_set_from_outside() -> None:
    """By a loader, say. Flax's clones lose it, and so it must not be needed in `setup`."""
    module = nn.Dense(6)
    object.__setattr__(module, "source", "a checkpoint")
    under = jaxmp.linen.apply_policy(module, "mixed_bfloat16")
    assert under.source == "a checkpoint"  # type: ignore[attr-defined]
    assert jaxmp.linen.remove_policy(under).source == "a checkpoint"  # type: ignore[attr-defined]
    check(under)


class Cached(nn.Module):
    """Keeps a compiled function, of itself as it is."""

    @functools.cached_property
    def compiled(self) -> Any:
        return jax.jit(self.apply)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(6)(x)


def test_what_the_class_computes_once_is_computed_anew() -> None:
    module = Cached()
    variables = jax.eval_shape(module.init, KEY, X)
    assert set(count_dots(module.compiled, variables, X)) == {"float32"}
    under = jaxmp.linen.apply_policy(module, "mixed_bfloat16")
    assert set(count_dots(under.compiled, variables, X)) == {"bfloat16"}
    assert set(count_dots(jaxmp.linen.remove_policy(under).compiled, variables, X)) == {"float32"}


@keeps_config
class Found(Net):
    """A class that pickle finds by its name."""


def test_pickle() -> None:
    module = jaxmp.linen.apply_policy(Found(width=6), "mixed_bfloat16")
    check(pickle.loads(pickle.dumps(module)))
