"""The train step for live nnx modules, which walks a model once, and then looks for changes."""

import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
from flax import nnx
from jaxtyping import PyTree

from jaxmp._flax.nnx_modules import is_node
from jaxmp._flax.nnx_scopes import open_scopes, warn_unused_rules
from jaxmp._flax.nnx_training import Optimizer
from jaxmp._float32_reduction.api import check_fsdp
from jaxmp._mesh.fsdp import FSDP
from jaxmp._mesh.placement import placed_beside
from jaxmp._modules.decisions import kind_text
from jaxmp._numerics.tree import copied
from jaxmp._numerics.user_warnings import first_few
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._program import compat
from jaxmp._recompute.api import Recompute
from jaxmp._training.jitted_step import (
    explain_refused_donation,
    raise_for_several_batches,
    warn_of_float32_products,
)
from jaxmp._training.optimizer import MixedPrecision
from jaxmp._training.optimizer_checks import check_same_params
from jaxmp._training.progress import warn_of_foreign_scale
from jaxmp._training.step_metrics import Metrics
from jaxmp._training.train_state import TrainState
from jaxmp._training.train_step import Cast, Gradients, StepOptions, check_takes


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
    a model of a hundred small layers takes a twentieth of the time on the host.

    Args:
      loss_fn: `loss_fn(model, batch) -> loss`, a float scalar, or `(loss, aux)`. What it changes in
        the model, such as batch statistics and the counts of dropout, is kept if the step is taken.
        It may not add variables, or change params that are trained.
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
        changes a trained param or the structure of the model.
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
        # By optimizer, which a plan does not hold, and so may be freed.
        self._plans: weakref.WeakKeyDictionary[Optimizer, _Plan] = weakref.WeakKeyDictionary()
        self._programs: dict[_Structure, dict[Any, jax.stages.Wrapped]] = {}

    def __call__(self, model: Any, optimizer: Optimizer, batch: PyTree, *others: Any) -> Metrics:
        """Runs one step; see `make_train_step`."""
        if others:
            raise_for_several_batches(others, "(model, optimizer, (x, y))", "(model, batch)")
        plan = self._plan(model, optimizer, batch)
        values, program = self._ready(plan, batch)
        try:
            new, metrics = program(values, batch)
        except (RuntimeError, ValueError) as error:
            explain_refused_donation(error)
            raise
        plan.put(new)
        return metrics

    def trace(self, model: Any, optimizer: Optimizer, batch: PyTree) -> Any:
        """Traces the step, as a function from `jax.jit` does."""
        program, arrays = self.on_arrays(model, optimizer, batch)
        return program.trace(*arrays)

    def lower(self, model: Any, optimizer: Optimizer, batch: PyTree) -> Any:
        """Lowers the step, as a function from `jax.jit` does."""
        program, arrays = self.on_arrays(model, optimizer, batch)
        return program.lower(*arrays)

    def on_arrays(
        self, model: Any, optimizer: Optimizer, batch: PyTree
    ) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
        """Returns the jitted function of arrays that a call runs, and its arguments."""
        values, program = self._ready(self._plan(model, optimizer, batch), batch)
        return program, (values, batch)

    def _plan(self, model: Any, optimizer: Optimizer, batch: PyTree) -> "_Plan":
        known = self._plans.get(optimizer) if isinstance(optimizer, Optimizer) else None
        if known is None or known.model is not model or not known.is_current():
            _check_modules_given(model, optimizer, batch)
            known = _Plan(model, optimizer)
            self._plans[optimizer] = known
        return known

    def _ready(self, plan: "_Plan", batch: PyTree) -> tuple[list[Any], jax.stages.Wrapped]:
        """Returns the values of all variables, owned by the step, and the program for them."""
        values = plan.values()
        if plan.program is not None and all(map(operator.is_, values, plan.latest)):
            return values, plan.program
        is_traced = any(map(compat.is_traced, jax.tree.leaves(values)))
        if not is_traced:
            if any(map(_was_donated, jax.tree.leaves(values))):
                raise ValueError(
                    "an array of this model, or of its optimizer, was donated to a step of another "
                    "one, which shared it: nnx.clone(model) and nnx.state(model) share all arrays. "
                    "Copy them, jax.tree.map(jnp.copy, nnx.state(model)), or make that step with "
                    "donate=False"
                )
            # Whoever put an array into the model may use it elsewhere.
            own = [x if x is y else copied(x) for x, y in zip(values, plan.latest, strict=True)]
            values = placed_beside(values, own if self._donates else values)
            plan.put(values)
        shardings = None if is_traced else _shardings_to_keep(values)
        programs = self._programs.setdefault(plan.structure, {})
        key = None if shardings is None else tuple(jax.tree.leaves(shardings))
        if key not in programs:
            programs[key] = self._program(plan.structure, shardings)
            if not is_traced:
                self._warn(programs[key], plan.structure.state(values), values, batch)
        plan.program = programs[key]
        return values, plan.program

    def _program(self, structure: "_Structure", shardings: Any) -> jax.stages.Wrapped:
        options, loss_fn = self._options, self._loss_fn

        def under_rules(rules: PolicyRules) -> Callable[..., Any]:
            return structure.pure(_in_scopes(loss_fn, rules), options.has_aux)

        one_step = options.step(structure.pure(loss_fn, options.has_aux), under_rules)

        def train_step(values: list[Any], batch: PyTree) -> tuple[list[Any], Metrics]:
            _check_batch(batch)
            new, metrics = one_step(structure.state(values), batch)
            return structure.values(new, values), metrics

        return jax.jit(
            options.released(train_step),
            donate_argnums=(0,) * self._donates,
            out_shardings=None if shardings is None else (shardings, None),
        )

    def _warn(
        self, program: jax.stages.Wrapped, state: TrainState, values: list[Any], batch: PyTree
    ) -> None:
        warn_of_foreign_scale(state)
        if self._options.model_casts:  # traces the step once more
            warn_of_float32_products(state.tx, program.trace(values, batch).jaxpr)


class _Structure(NamedTuple):
    """What a step is traced for: a model and an optimizer, but for the values of variables.

    Values are one list: of trained variables, of all others, of the state of the optimizer, and the
    number of steps.
    """

    graphdef: Any
    trained: tuple[Any, ...]  # the paths of variables
    others: tuple[Any, ...]
    variables: Any  # tree structures: of both, and of the values of trained ones
    params: Any
    opt_state: Any
    tx: MixedPrecision

    def state(self, values: list[Any]) -> TrainState:
        """Returns the train state that has these values."""
        first, second = len(self.trained), len(self.trained) + len(self.others)
        return TrainState(
            step=jnp.asarray(values[-1], jnp.int32),
            params=self.params.unflatten(jax.tree.leaves(values[:first])),
            opt_state=self.opt_state.unflatten(jax.tree.leaves(values[second:-1])),
            collections=dict(zip(map(_keystr, self.others), values[first:second], strict=True)),
            tx=self.tx,
        )

    def values(self, state: TrainState, like: list[Any]) -> list[Any]:
        """Returns the values of a train state, in the containers of others."""
        others = [state.collections[_keystr(path)] for path in self.others]
        leaves = jax.tree.leaves((state.params, others, state.opt_state))
        step = jnp.asarray(state.step, like[-1].dtype)
        return jax.tree.unflatten(jax.tree.structure(like), [*leaves, step])

    def pure(self, loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        """Turns a loss of a module into one of params, of a batch, and of the other variables."""

        @functools.wraps(loss_fn, assigned=("__name__", "__qualname__"), updated=())
        def pure_loss(params: PyTree, batch: PyTree, **others: PyTree) -> Any:
            leaves = jax.tree.leaves((params, [others[_keystr(path)] for path in self.others]))
            model = nnx.merge(self.graphdef, *jax.tree.unflatten(self.variables, leaves))
            before = _raw_values(nnx.state(model, graph=True))
            check_takes(loss_fn, "(model, batch)", model, batch)
            loss, *aux = _loss_and_aux(loss_fn(model, batch), has_aux)
            graphdef, state = nnx.split(model, graph=True)
            after = _raw_values(state)
            _check_changes(self, graphdef, before, after)
            changed = {_keystr(x): after[x] for x in self.others if after[x] is not before[x]}
            out = [loss, *[changed] * bool(others), *aux]
            return tuple(out) if len(out) > 1 else loss

        return pure_loss


class _Plan:
    """The variables of a model and its optimizer, found once, and what shows that they changed."""

    def __init__(self, model: Any, optimizer: Optimizer) -> None:
        self.model = model
        self.program: jax.stages.Wrapped | None = None
        nodes = dict(nnx.iter_graph(model, graph=True))
        graphdef, *states = nnx.split(model, optimizer.wrt, ..., graph=True)
        trained, others = ([path for path, _ in _flat(state)] for state in states)
        places = [
            nodes[path]
            if _is_variable(nodes[path])
            else _ArrayAttribute(nodes[path[:-1]], path[-1])
            for path in (*trained, *others)
        ]
        state = jax.tree.leaves(optimizer.opt_state, is_leaf=_is_variable)
        self.structure = _Structure(
            graphdef,
            tuple(trained),
            tuple(others),
            jax.tree.structure(states),
            jax.tree.structure(nnx.as_pure(states[0])),
            jax.tree.structure(nnx.as_pure(optimizer.opt_state)),
            optimizer.tx,
        )
        check_same_params(nnx.as_pure(states[0]), nnx.as_pure(optimizer.opt_state).master)
        self._places = [*places, *state, optimizer.step]
        # The attributes of a module are looked at in each call, in one pass that runs in C.
        self._attributes = [vars(x) for x in nodes.values() if isinstance(x, nnx.Pytree)]
        self._attributes.append(vars(optimizer))
        self._containers = [x for path, x in nodes.items() if _is_container(path, x)]
        self._variables = list(filter(_is_variable, places))
        self._has_array_attributes = len(self._variables) < len(places)
        self._seen: Any = self._look()
        self.latest: list[Any] = [None] * len(self._places)

    def is_current(self) -> bool:
        """Whether nothing in the model or the optimizer was replaced."""
        objects, others = self._look()
        seen, others_seen = self._seen
        return (
            len(objects) == len(seen)
            and all(map(operator.is_, objects, seen))
            and bool(others == others_seen)
        )

    def _look(self) -> tuple[list[Any], Any]:
        attributes = itertools.chain.from_iterable(map(dict.values, self._attributes))
        inside = list(map(_children, self._containers))
        objects = itertools.chain(attributes, *[children for children, _ in inside])
        metadata = list(map(_metadata_of, self._variables))
        return list(objects), ([structure for _, structure in inside], metadata)

    def values(self) -> list[Any]:
        """Returns the values of all variables."""
        return list(map(_raw_value_of, self._places))

    def put(self, values: list[Any]) -> None:
        """Gives all variables new values."""
        if compat.is_traced(values[-1]):
            for place, value in zip(self._places, values, strict=True):
                place.set_raw_value(value)
        else:
            # What `set_raw_value` does after tests of the trace, which take 20 times as long.
            for place, value in zip(self._places, values, strict=True):
                object.__setattr__(place, "_raw_value", value)
        self.latest = values
        if self._has_array_attributes:
            self._seen = self._look()


class _ArrayAttribute:
    """An array that is an attribute of a module, with the methods of a variable."""

    def __init__(self, owner: Any, name: Any) -> None:
        self._owner = owner
        self._name = name

    def get_raw_value(self) -> Any:
        return getattr(self._owner, self._name)

    def set_raw_value(self, value: Any) -> None:
        setattr(self._owner, self._name, value)

    _raw_value = property(get_raw_value, set_raw_value)


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


def _loss_and_aux(out: Any, has_aux: bool) -> tuple[Any, ...]:
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        got = jax.typeof(out) if isinstance(out, jax.Array) else kind_text(out)
        raise TypeError(f"with has_aux=True the loss function must return (loss, aux), got {got}")
    if not has_aux and isinstance(out, tuple):
        raise TypeError(
            f"the loss function must return a float scalar, got a tuple of {len(out)}. For another "
            "output beside the loss, give has_aux=True. Changes to the model are kept by themselves"
        )
    return out if has_aux else (out,)


def _check_changes(structure: _Structure, graphdef: Any, before: Any, after: Any) -> None:
    """Raises if a loss changed more than the values of variables that are not trained."""
    new = [_keystr(path) for path in after if path not in before]
    gone = [_keystr(path) for path in before if path not in after]
    if new or gone or graphdef != structure.graphdef:
        what = "replaces a module, or an attribute that is no array, as train() and eval() do"
        what = f"removes {first_few(gone)}" if gone else what
        what = f"adds {first_few(new)}" if new else what
        raise ValueError(
            f"the loss function {what}, and a step keeps the structure of the model. Do it before "
            "the step: call the model once, or model.train(). nnx.pop(model, nnx.Intermediate), in "
            "the loss, takes sown values out, which it can return as aux"
        )
    if trained := [_keystr(x) for x in structure.trained if after[x] is not before[x]]:
        raise ValueError(
            f"the loss function changes {first_few(trained)}, which the optimizer trains: one of "
            "the two changes would be lost. Leave such variables out of the optimizer by wrt=..., "
            "or write the step with jaxmp.nnx.value_and_grad"
        )


def _check_modules_given(model: Any, optimizer: Any, batch: Any) -> None:
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


def _check_batch(batch: PyTree) -> None:
    for x in jax.tree.leaves(batch, is_leaf=is_node):
        if is_node(x):
            raise TypeError(
                f"the batch holds {kind_text(x)}, whose changes would be lost: give it to the "
                "model, as an attribute, and leave it out of the optimizer by wrt=..."
            )


def _shardings_to_keep(values: list[Any]) -> Any:
    """Returns the shardings of values, to keep; None if they all lie on one device."""
    shardings = jax.tree.map(lambda x: getattr(x, "sharding", None), values)
    alone = (type(None), jax.sharding.SingleDeviceSharding)
    is_alone = all(isinstance(x, alone) for x in jax.tree.leaves(shardings))
    return None if is_alone else shardings


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _is_container(path: tuple[Any, ...], x: Any) -> bool:
    """Whether a node is a list, a dictionary or another tree that is no module of nnx."""
    own = path and str(path[-1]).startswith("_pytree__")
    return not (own or x is None or is_node(x) or jax.tree_util.all_leaves([x]))


def _children(container: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(container, is_leaf=lambda x: x is not container)


def _was_donated(x: Any) -> bool:
    return isinstance(x, jax.Array) and not compat.is_traced(x) and x.is_deleted()


def _flat(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns paths and variables of a state, or its arrays, in the order of JAX's leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable)
    return [(tuple(entry.key for entry in path), x) for path, x in leaves]


def _raw_values(state: Any) -> dict[Any, Any]:
    return {path: x.get_raw_value() if _is_variable(x) else x for path, x in _flat(state)}


def _keystr(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)


_raw_value_of = operator.methodcaller("get_raw_value")
_metadata_of = operator.methodcaller("get_metadata")
