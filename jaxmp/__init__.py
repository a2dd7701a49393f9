"""Mixed-precision training for JAX, Flax and optax.

Low-precision compute, float32 where it matters, and proof of both. Start at `get_policy`,
`value_and_grad` and `mixed_precision`; `TrainState` and `make_train_step` put them together.
`PolicyRules` say which part of a model runs in which precision; `jaxmp.linen`, `jaxmp.nnx` and
`jaxmp.equinox` put modules under them, and import flax or equinox when they are first used.
`jaxmp.sharding`, `jaxmp.storage`, `jaxmp.numbers`, `jaxmp.float8`, `jaxmp.rules` and
`jaxmp.diagnostics` have the rest.

The folders, from the ground up. The `__init__.py` or README of each is its map.

- `_numerics`: dtypes, 8-bit codes, loss scales. `_program`: jaxprs, and the table of operations.
- `_policies`: policies, rules, float8 recipes. `_mesh`: sharded params, sums over devices.
- `_primitives`: products with float32 gradients, in 16 bits and float8.
- `_recompute`, `_gradient_release`, `_float32_reduction`, `_autocast`: transformations of any
  function.
- `_training`: gradients, the optimizer, the train step. `_modules`, `_flax`, `_equinox`: adapters.
- `_tools`: audit, diagnostics, the command.
"""

import importlib
import importlib.util
import types
import typing
import warnings

from jaxmp._autocast.api import autocast as autocast, full_precision as full_precision
from jaxmp._gradient_release.api import release_gradients as release_gradients
from jaxmp._numerics.loss_scale import (
    DynamicLossScale as DynamicLossScale,
    LossScale as LossScale,
    LossScaleState as LossScaleState,
    NoLossScale as NoLossScale,
    StaticLossScale as StaticLossScale,
)
from jaxmp._policies.policy import Policy as Policy, get_policy as get_policy
from jaxmp._policies.policy_rules import PolicyRules as PolicyRules
from jaxmp._recompute.api import recompute as recompute
from jaxmp._training.gradients import grad as grad, value_and_grad as value_and_grad
from jaxmp._training.optimizer import (
    MixedPrecision as MixedPrecision,
    mixed_precision as mixed_precision,
)
from jaxmp._training.optimizer_step import MixedPrecisionState as MixedPrecisionState
from jaxmp._training.progress import (
    TrainingStalled as TrainingStalled,
    check_progress as check_progress,
)
from jaxmp._training.train_state import TrainState as TrainState
from jaxmp._training.train_step import make_train_step as make_train_step

if typing.TYPE_CHECKING:
    from jaxmp import (
        diagnostics as diagnostics,
        equinox as equinox,
        float8 as float8,
        linen as linen,
        nnx as nnx,
        numbers as numbers,
        rules as rules,
        sharding as sharding,
        storage as storage,
    )
    from jaxmp._tools.inspect.api import (
        AuditError as AuditError,
        assert_reduced_in as assert_reduced_in,
        audit as audit,
    )

__version__ = "0.2.0"


# What loads when it is first used: modules, each with the library that it needs, and the audits.
_MODULES = {
    "diagnostics": "jax",
    "equinox": "equinox",
    "float8": "jax",
    "linen": "flax",
    "nnx": "flax",
    "numbers": "jax",
    "rules": "jax",
    "sharding": "jax",
    "storage": "jax",
}
_AUDITS = ("AuditError", "assert_reduced_in", "audit")
# Where names are that were here in version 0.1; the next one forgets them.
_MOVED = {
    **dict.fromkeys(
        ("all_finite", "merge_float32", "select", "split_float32", "stochastic_round"), "numbers"
    ),
    **dict.fromkeys(("compact_state", "convert_state", "expanded_state"), "storage"),
    "collectives": "sharding",
}


# A star import takes functions and classes, those that load later too, and no modules: `numbers`
# is one of Python's as well.
__all__ = sorted(
    {*_AUDITS}
    | {
        name
        for name, value in globals().items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
)


def __dir__() -> list[str]:
    """What is public: the names above, and the modules whose library is installed."""
    usable = [name for name, library in _MODULES.items() if importlib.util.find_spec(library)]
    return sorted({*__all__, *usable, "__version__"})


def __getattr__(name: str) -> typing.Any:
    if name in _MODULES:
        return importlib.import_module(f"jaxmp.{name}")
    if name in _AUDITS:
        value = getattr(importlib.import_module("jaxmp._tools.inspect.api"), name)
        globals()[name] = value
        return value
    if name in _MOVED:
        place = f"jaxmp.{_MOVED[name]}"
        warnings.warn(
            f"jaxmp.{name} is {place}.{name} now: the next version has it there alone",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(place), name)
    raise AttributeError(f"module 'jaxmp' has no attribute {name!r}")
