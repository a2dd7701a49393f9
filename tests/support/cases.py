"""Tables for products: every optimizer of optax, and trees of params."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Optimizers that need more than gradients, by the extra argument that they want.
_ALIASES = [
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamaxw",
    "adamw",
    "adan",
    "amsgrad",
    "fromage",
    "lamb",
    "lars",
    "lbfgs",
    "lion",
    "nadam",
    "nadamw",
    "novograd",
    "optimistic_gradient_descent",
    "polyak_sgd",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
    "sign_sgd",
    "sm3",
    "yogi",
]
_CONTRIB = [
    "acprop",
    "ademamix",
    "adopt",
    "cocob",
    "dadapt_adamw",
    "dog",
    "dowg",
    "galore",
    "momo",
    "momo_adam",
    "muon",
    "prodigy",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "simplified_ademamix",
]
_NO_RATE = {"cocob": {}, "polyak_sgd": {}, "prodigy": {}}


def _wrapped() -> dict[str, Callable[[], Any]]:
    schedule = optax.cosine_decay_schedule(1e-2, 10)
    group = {"low": "a", "wide": "b"}
    return {
        "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        "schedule": lambda: optax.adamw(schedule),
        "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=schedule),
        "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
        "masked": lambda: optax.masked(optax.adam(1e-2), {"low": True, "wide": False}),
        "multi_transform": lambda: optax.multi_transform(
            {"a": optax.adam(1e-2), "b": optax.set_to_zero()}, group
        ),
        "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.99)),
        "add_noise": lambda: optax.chain(
            optax.add_noise(0.1, 0.1, key=jax.random.key(0)), optax.sgd(1e-2)
        ),
        "lookahead_free": lambda: optax.chain(optax.scale_by_adam(), optax.scale(-1e-2)),
        "plateau": lambda: optax.chain(
            optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)
        ),
        "mechanize": lambda: optax.contrib.mechanize(optax.adam(1e-2)),
    }


OPTIMIZERS: dict[str, Callable[[], Any]] = (
    {name: lambda n=name: getattr(optax, n)(**_NO_RATE.get(n, {"learning_rate": 1e-2}))
     for name in _ALIASES}
    | {name: lambda n=name: getattr(optax.contrib, n)(**_NO_RATE.get(n, {"learning_rate": 1e-2}))
       for name in _CONTRIB}
    | _wrapped()
)  # fmt: skip


def mixed_tree(dtype: str = "bfloat16") -> dict[str, jax.Array]:
    """Params of which one is narrow and one is its own master."""
    low = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)
    wide = np.linspace(0.5, 1.5, 3, dtype=np.float32)
    return jax.device_put({"low": low.astype(jnp.dtype(dtype)), "wide": wide})
