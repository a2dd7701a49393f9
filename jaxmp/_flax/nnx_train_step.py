"""The train step for live nnx modules, which walks a model once, and then looks for changes."""

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401 (for the doctest)
import jmp
from flax import nnx
from jaxtyping import PyTree

from jaxmp._flax.nnx_modules import is_node
from jaxmp._flax.nnx_scopes import open_scopes, warn_unused_rules
from jaxmp._flax.nnx_training import Optimizer
from jaxmp._flax.nnx_walk import (
    Structure,
    Walk,
    are_equal,
    is_variable,
    name_of,
    variables_in,
)
from jaxmp._float32_reduction.api import check_fsdp
from jaxmp._mesh.fsdp import FSDP
from jaxmp._mesh.placement import placed_beside
from jaxmp._modules.decisions import kind_text
from jaxmp._numerics.tree import copied
from jaxmp._numerics.user_warnings import first_few
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._program import compat
from jaxmp._recompute.api import Recompute
from jaxmp._training.jitted_step import explain_refused_donation, raise_for_several_batches
from jaxmp._training.loss_under_policy import Cast
from jaxmp._training.progress import warn_of_foreign_scale
from jaxmp._training.step_metrics import Metrics
from jaxmp._training.train_step import Gradients, StepOptions, check_takes, unpack
from jaxmp._training.whole_batch import warn_of_whole_batch


def make_train_step(
    loss_fn: Callable[..., Any],
    policy: str | jmp.Policy | PolicyRules | None = None,
    *,
    has_aux: bool = False,
    microbatches: int = 1,
    cast: Cast = "products",
    donate: bool = True,
    fsdp: FSDP | None = None,
    recompute: Recompute = "loops",
    gradients: Gradients = "buffered",
    count_overflows: bool = False,
    histograms_every: int | None = None,
) -> "ModuleStep":
    """Makes a jitted train step of a live module: what `jaxmp.make_train_step` is for params.

    The step changes model and optimizer in place, as a function under `nnx.jit` does, which walks
    through both in each call. This one walks once, and then looks whether something is replaced:
    with a hundred small layers a call takes 0.09 of the time (`benchmarks/bench_nnx_step.py`).

    Args:
      loss_fn: `loss_fn(model, batch) -> loss`, a float scalar, or `(loss, aux)`. What it changes in
        the model, such as batch statistics and the counts of dropout, is kept if the step is taken.
        It may not add variables. What it writes into a trained param, as `nnx.SpectralNorm` does,
        holds inside of the call: the optimizer alone changes these.
      policy: by default the policy, or the rules, for which the optimizer was wrapped: the loss
        runs under it, and rules match the modules of the model. `"none"` leaves the dtypes to a
        model that casts by itself, as under `jaxmp.nnx.apply_policy`.
      has_aux: whether `loss_fn` returns `(loss, aux)`; the step returns `metrics["aux"]`.
      microbatches: as for `jaxmp.make_train_step`. Each part of the batch starts with the state
        that the part before it left.
      cast: as there.
      donate: whether to reuse the buffers of the old arrays, so that one state is in memory. Arrays
        that you took out of the model are then gone after the next step. `nnx.state(model)` and
        `nnx.clone(model)` share theirs: copy them, `jax.tree.map(jnp.copy, nnx.state(model))`, or
        give False. Arrays that you put into the model are copied first.
      fsdp: as there, with shardings such as `fully_sharded(nnx.state(model, nnx.Param), mesh)`. All
        arrays stay where they lie.
      recompute: as there.
      gradients: as there.
      count_overflows: as there.
      histograms_every: as there.

    Returns:
      A `step(model, optimizer, batch) -> metrics`, with the metrics of `jaxmp.make_train_step`. In
      a step that is skipped every variable of the model keeps every bit. It can be traced and
      lowered like a function from `jax.jit`.

    Raises:
      ValueError: for an unknown option, as `jaxmp.make_train_step`. In the first step, if `loss_fn`
        changes the structure of the model.
      TypeError: if `loss_fn` is not callable, or a step gets anything but a model, its
        `jaxmp.nnx.Optimizer` and one batch of arrays.

    >>> import jaxmp, optax
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16"))
    >>> step = make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
    >>> metrics = step(model, optimizer, jnp.ones((4, 2)))
    >>> int(optimizer.step[...]), metrics["loss"].dtype.name
    (1, 'float32')
    """
    if fsdp is not None:
        check_fsdp(fsdp)
        fsdp = dataclasses.replace(fsdp, shardings=nnx.as_pure(fsdp.shardings))
    options = StepOptions(
        policy=policy,
        has_aux=has_aux,
        microbatches=microbatches,
        cast=cast,
        fsdp=fsdp,
        recompute=recompute,
        gradients=gradients,
        count_overflows=count_overflows,
        histograms_every=histograms_every,
    )
    return ModuleStep(loss_fn, options, donates=donate)


class ModuleStep:
    """A jitted step of live modules, as `make_train_step` returns it.

    Args:
      loss_fn: the loss of a model and a batch.
      options: the options of the step.
      donates: whether the old arrays are donated.
    """

    def __init__(self, loss_fn: Callable[..., Any], options: StepOptions, *, donates: bool) -> None:
        options.step(loss_fn)  # what is no function is an error here, and not in the first step
        self._loss_fn = loss_fn
        self._options = options
        self._donates = donates
        # By optimizer, which a walk does not hold, and so may be freed.
        self._walks: weakref.WeakKeyDictionary[Optimizer, Walk] = weakref.WeakKeyDictionary()
        self._programs: list[tuple[Structure, Any, jax.stages.Wrapped]] = []
        self._called: set[int] = set()

    def __call__(self, model: Any, optimizer: Optimizer, batch: PyTree, *others: Any) -> Metrics:
        """Runs one step; see `make_train_step`."""
        if others:
            raise_for_several_batches(others, "(model, optimizer, (x, y))", "(model, batch)")
        walk, run, arrays = self._ready(model, optimizer)
        if id(run) not in self._called:  # they stay alive, in `_programs`
            self._warn_of_whole_batch(walk.structure, arrays, batch)
            self._called.add(id(run))
        ids = set(map(id, jax.tree.leaves(batch)))
        if self._donates and not ids.isdisjoint(map(id, arrays)):
            batch = jax.tree.map(lambda x: copied(x) if isinstance(x, jax.Array) else x, batch)
        try:
            new, metrics = run(arrays, batch)
        except (RuntimeError, ValueError) as error:
            _check_alive(arrays, error)
            explain_refused_donation(error)
            raise
        walk.put(new)
        return metrics

    def trace(self, model: Any, optimizer: Optimizer, batch: PyTree) -> Any:
        """Traces the step, as a function from `jax.jit` does."""
        run, arguments = self.on_arrays(model, optimizer, batch)
        return run.trace(*arguments)

    def lower(self, model: Any, optimizer: Optimizer, batch: PyTree) -> Any:
        """Lowers the step, as a function from `jax.jit` does."""
        run, arguments = self.on_arrays(model, optimizer, batch)
        return run.lower(*arguments)

    def on_arrays(
        self, model: Any, optimizer: Optimizer, batch: PyTree
    ) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
        """Returns the jitted function of arrays that a call runs, and its arguments."""
        _, run, arrays = self._ready(model, optimizer)
        return run, (arrays, batch)

    def _ready(
        self, model: Any, optimizer: Optimizer
    ) -> tuple[Walk, jax.stages.Wrapped, list[Any]]:
        """Returns the walk through the model, the jitted step for it, and the arrays to give it."""
        known = self._walks.get(optimizer) if isinstance(optimizer, Optimizer) else None
        arrays = None if known is None or known.model is not model else known.arrays()
        latest = [] if known is None else known.latest()
        if known and arrays and known.run and latest and all(map(operator.is_, arrays, latest)):
            return known, known.run, arrays
        walk = known
        if walk is None or arrays is None:
            _check_modules_given(model, optimizer)
            walk = Walk(model, optimizer)
        arrays = walk.arrays() or []
        _check_alive(arrays)
        is_abstract = any(map(_is_abstract, arrays))
        if not is_abstract:
            del arrays
            self._own(walk, set(map(id, latest)))
            arrays = walk.arrays() or []
        shardings = None if is_abstract else _shardings_of(arrays)
        walk.run = next(
            (
                run
                for structure, places, run in self._programs
                if places == shardings and are_equal(structure, walk.structure)
            ),
            None,
        )
        if walk.run is None:
            walk.run = self._jitted(walk.structure, shardings)
            self._programs.append((walk.structure, shardings, walk.run))
            if not is_abstract:
                warn_of_foreign_scale(walk.structure.state(arrays))
        self._walks[optimizer] = walk
        return walk, walk.run, arrays

    def _warn_of_whole_batch(self, structure: Structure, arrays: list[Any], batch: PyTree) -> None:
        if not any(map(_is_abstract, arrays)):
            loss_fn = _pure(structure, self._loss_fn, self._options.has_aux)
            warn_of_whole_batch(loss_fn, structure.state(arrays), batch, self._options.fsdp)

    def _own(self, walk: Walk, own: set[int]) -> None:
        """Copies the arrays that others may use too, and puts counters beside the params."""

        def own_array(x: Any) -> Any:
            if isinstance(x, jax.Array) and (id(x) in own or not self._donates):
                own.discard(id(x))  # at a second place it is not its own
                return x
            return copied(x)

        walk.replace(own_array)
        arrays = walk.arrays() or []
        walk.put(placed_beside(arrays, arrays))

    def _jitted(self, structure: Structure, shardings: Any) -> jax.stages.Wrapped:
        options, loss_fn = self._options, self._loss_fn

        def under_rules(rules: PolicyRules) -> Callable[..., Any]:
            return _pure(structure, _in_scopes(loss_fn, rules), options.has_aux)

        one_step = options.step(_pure(structure, loss_fn, options.has_aux), under_rules)

        def train_step(arrays: list[Any], batch: PyTree) -> tuple[list[Any], Metrics]:
            _check_batch(batch)
            new, metrics = one_step(structure.state(arrays), batch)
            return structure.arrays(new, arrays[-1].dtype), metrics

        return jax.jit(
            options.released(train_step),
            donate_argnums=(0,) * self._donates,
            out_shardings=(shardings, None) if shardings else None,
        )


def _pure(structure: Structure, loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Turns a loss of a module into one of params, of a batch, and of the other variables."""

    @functools.wraps(loss_fn, assigned=("__name__", "__qualname__"), updated=())
    def pure_loss(params: PyTree, batch: PyTree, **others: PyTree) -> Any:
        model = structure.model(params, others)
        before = _flat_values(nnx.state(model, graph=True))
        check_takes(loss_fn, "(model, batch)", model, batch)
        loss, _, aux = unpack(loss_fn(model, batch), has_collections=False, has_aux=has_aux)
        graphdef, state = nnx.split(model, graph=True)
        after = _flat_values(state)
        _check_structure(structure, graphdef, before, after)
        # What it writes into trained params holds inside of this call: the optimizer changes them.
        changed = {
            name_of(path): jax.tree.unflatten(after[path][1], after[path][0])
            for path in structure.others
            if not _are_same(before[path], after[path])
        }
        out = [loss, *[changed] * bool(others), *[aux] * has_aux]
        return tuple(out) if len(out) > 1 else loss

    return pure_loss


def _flat_values(state: Any) -> dict[Any, tuple[list[Any], Any]]:
    """Returns leaves and structure of each variable, also of one whose items may be written."""
    return {
        path: jax.tree.flatten(x.get_raw_value() if is_variable(x) else x)
        for path, x in variables_in(state)
    }


def _are_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    return bool(one[1] == other[1]) and all(map(operator.is_, one[0], other[0]))


def _in_scopes(loss_fn: Callable[..., Any], rules: PolicyRules) -> Callable[..., Any]:
    """Runs the modules in scopes that name what rules decide, where one policy does not say it."""
    policy = rules.default
    if not rules.rules and (policy is None or policy.products is None):
        return loss_fn

    @functools.wraps(loss_fn, updated=())
    def loss_in_scopes(model: Any, batch: PyTree) -> Any:
        warn_unused_rules(model, rules)
        with open_scopes(model, rules):
            return loss_fn(model, batch)

    return loss_in_scopes


def _check_structure(structure: Structure, graphdef: Any, before: Any, after: Any) -> None:
    """Raises ValueError if a loss changed more than the values of variables."""
    new = [name_of(path) for path in after if path not in before]
    gone = [name_of(path) for path in before if path not in after]
    if new or gone or not are_equal(structure.graphdef, graphdef):
        what = "replaces a module, or an attribute that is no array, as train() and eval() do"
        what = f"removes {first_few(gone)}" if gone else what
        what = f"adds {first_few(new)}" if new else what
        raise ValueError(
            f"the loss function {what}, and a step keeps the structure of the model. Do it before "
            "the step: call the model once, or model.train(). nnx.pop(model, nnx.Intermediate), in "
            "the loss, takes sown values out, which it can return as aux"
        )


def _check_modules_given(model: Any, optimizer: Any) -> None:
    if isinstance(model, nnx.Optimizer) and isinstance(optimizer, nnx.Module):
        raise TypeError("a step takes the model, then its optimizer: step(model, optimizer, batch)")
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"a step takes a live nnx module as its model, got {kind_text(model)}. Put several in "
            "one: nnx.List([...]), nnx.Dict(...). For params alone, use jaxmp.make_train_step"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "a step takes jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optimizer, policy)), "
            f"got {kind_text(optimizer)}"
        )
    if type(optimizer).update is not Optimizer.update:
        raise TypeError(
            f"{type(optimizer).__name__} has an update of its own, which a step does not call: "
            "write the step with jaxmp.nnx.value_and_grad and optimizer.update"
        )


def _check_batch(batch: PyTree) -> None:
    for x in jax.tree.leaves(batch, is_leaf=is_node):
        if is_node(x):
            raise TypeError(
                f"the batch holds {kind_text(x)}, whose changes would be lost: make it a part of "
                "the model, and leave it out of the optimizer by wrt=...; of a state that does not "
                "change, give the arrays, nnx.as_pure(nnx.state(teacher))"
            )


def _check_alive(arrays: list[Any], cause: Exception | None = None) -> None:
    """Raises ValueError if an array was donated to another call."""
    if any(isinstance(x, jax.Array) and not compat.is_traced(x) and x.is_deleted() for x in arrays):
        raise ValueError(
            "arrays of this model, or of its optimizer, are gone: they were donated to a call that "
            "failed, or to a step of another model that shares them, as nnx.clone(model) and "
            "nnx.state(model) do. Copy those, jax.tree.map(jnp.copy, nnx.state(model)). Get the "
            "arrays back from a checkpoint, or make steps with donate=False"
        ) from cause


def _is_abstract(x: Any) -> bool:
    return compat.is_traced(x) or isinstance(x, jax.ShapeDtypeStruct)


def _shardings_of(arrays: list[Any]) -> list[Any]:
    """Returns the shardings that arrays keep; none of arrays on one device."""
    shardings = [x.sharding for x in arrays]
    alone = all(isinstance(x, jax.sharding.SingleDeviceSharding) for x in shardings)
    return [] if alone else shardings
