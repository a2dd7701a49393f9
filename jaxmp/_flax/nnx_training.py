"""Computes scaled gradients of live nnx modules; has an optimizer that can skip a step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, PyTree

from jaxmp._flax.nnx_modules import call_pure, is_node, pure, with_transform
from jaxmp._float32_reduction.api import GradientReduction, gradient_reduction, reduce_in_float32
from jaxmp._mesh.fsdp import FSDP
from jaxmp._mesh.placement import placed_beside
from jaxmp._numerics.dtypes import is_floating, is_narrow
from jaxmp._numerics.loss_scale import LossScaleState
from jaxmp._numerics.tree import all_finite, cast_floating, same_structure, select, stays_finite
from jaxmp._recompute.api import Recompute, apply_recompute, check_recompute
from jaxmp._training.gradient_options import (
    GradientKeywords,
    GradientOptions,
    LossScaleLike,
    check_positions,
)
from jaxmp._training.gradients import scaled_evaluation, warn_of_float16, without_value
from jaxmp._training.microbatch import Evaluation, sum_over_microbatches
from jaxmp._training.optimizer import MixedPrecision, check_wrapped

# Always use graph mode, whatever the context says: arguments may share modules.
_grad = functools.partial(nnx.grad, graph=True, graph_updates=True)
_REDUCTION = "jaxmp.reduction"

Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScaleLike = None,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduce_dtype: Any = None,
    fsdp: FSDP | None = None,
    recompute: Recompute = "never",
) -> Callable[..., Any]:
    """Returns a function like `nnx.value_and_grad` with unscaled float32 loss and gradients.

    It is `jaxmp.value_and_grad` for live modules: changes that the loss function makes to them,
    such as batch statistics and RNG counters, are kept. If the evaluation is not finite, every
    variable of every module in the arguments keeps its old value instead: one overflowed batch
    would leave infinite statistics forever, and the optimizer will skip the step anyway.

    Args:
      loss_fn: a function of modules and arrays that returns a scalar float loss, or `(loss, aux)`.
      argnums: which positional arguments to differentiate, by their params, `nnx.Param`; or
        `nnx.DiffState(argnum, filter)` for other variables.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      loss_scale: as for `jaxmp.value_and_grad`; here it is `optimizer.loss_scale`.
      microbatches: as there. Each part starts with the module state that the part before it left.
      batch_argnums: the positional arguments to split; by default those that are not
        differentiated and hold no modules.
      reduce_dtype: as there.
      fsdp: as there, with shardings such as `fully_sharded(nnx.state(model, nnx.Param), mesh)`.
      recompute: as there.

    Returns:
      A function with the arguments of `loss_fn` that returns `(loss, grads)`, or
      `((loss, aux), grads)`. The gradients are an `nnx.State`, or a tuple of them, in float32 if
      the params are narrower. They are not finite if the computation overflowed. If the loss or
      the state of a module became infinite or NaN, all gradients are NaN, so that every optimizer
      of `jaxmp.mixed_precision` skips the step.

    Raises:
      TypeError: if the loss is not a float scalar.
      ValueError: if `microbatches` does not divide the batch, or if the loss function adds
        variables to a module, which microbatches cannot pass on.

    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss, grads = value_and_grad(lambda model, x: model(x).sum(), loss_scale=1024.0)(
    ...     model, jnp.ones((4, 2))
    ... )
    >>> grads["bias"].get_value()
    Array([4.], dtype=float32)
    """
    several = isinstance(argnums, Sequence)
    if fsdp is not None and several:
        raise ValueError("fsdp is for the params of one module: give argnums as one number")
    reduction = gradient_reduction(reduce_dtype, fsdp)
    options = GradientOptions(
        argnums=argnums,
        several=several,
        has_aux=has_aux,
        loss_scale=loss_scale,
        microbatches=microbatches,
        batch_argnums=batch_argnums,
        reduction=None if reduction is None else _ModuleReduction(*reduction),
    )
    check_recompute(recompute)

    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        count, names = len(args), tuple(kwargs)
        wrt = tuple(_diff_state(x, count) for x in options.argnums)

        def call(*args: Any) -> Any:
            return loss_fn(*args[:count], **dict(zip(names, args[count:], strict=True)))

        if recompute != "never":
            transform = functools.partial(apply_recompute, recompute_as=recompute)
            call = with_transform(call, transform, "jaxmp.recompute")
        # Pass keyword arguments by position, so that modules among them can change too.
        nodes = (*args, *kwargs.values())
        evaluate = scaled_evaluation(call, wrt, options, _grad)
        state = _State(nodes)
        if options.loss_scale is None:
            _warn_of_float16(nodes)
        if microbatches == 1:
            loss, grads, aux = evaluate(*nodes)
        else:
            loss, grads, aux = _over_microbatches(evaluate, wrt, options, args, kwargs)
        return options.result(Evaluation(loss, state.keep_unless_finite(loss, grads), aux))

    return value_and_grad_fun


def grad(
    loss_fn: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    **options: Unpack[GradientKeywords],
) -> Callable[..., Any]:
    """Differentiates like `value_and_grad`, but does not return the value; see there.

    Args:
      loss_fn: a function of modules and arrays that returns a scalar float loss, or `(loss, aux)`.
      argnums: which positional arguments to differentiate.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      **options: the keyword arguments of `value_and_grad`.

    Returns:
      A function that returns `grads`, or `(grads, aux)`.

    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> grads = grad(lambda model, x: model(x).sum(), loss_scale=8.0)(model, jnp.ones((4, 2)))
    >>> grads["bias"].get_value()
    Array([4.], dtype=float32)
    """
    return without_value(value_and_grad(loss_fn, argnums, has_aux, **options), has_aux)


class _ModuleReduction(GradientReduction):
    """A `GradientReduction` for functions of modules."""

    def rewrite(
        self, fun: Callable[..., Any], args: Sequence[Any], argnums: Sequence[Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Rewrites a function of modules so that gradients of its params are reduced this way."""
        pure_fun = pure(fun, _REDUCTION)
        filters = [(x.argnum, nnx.filterlib.to_predicate(x.filter)) for x in argnums]

        def is_param(path: Any, value: Any) -> bool:
            return any(path[0] == i and matches(path[1:], value) for i, matches in filters)

        def rewritten(params: Any, others: Any, graphdef: Any) -> Any:
            self.check()
            # The params of each argument, in the structure of their gradients.
            own = [nnx.State(params.raw_mapping.get(x.argnum, {})) for x in argnums]
            trees = (params, others, graphdef)
            call, operands = reduce_in_float32(pure_fun, trees, (0,), self.layouts(own))
            return call(*operands)

        return lambda *nodes: call_pure(rewritten, _REDUCTION, nodes, is_param), tuple(args)


def _warn_of_float16(args: tuple[Any, ...]) -> None:
    """Warns if the `dtype` of any module is float16; operations are not inspected."""
    paths = [
        "/".join(map(str, path[1:]))
        for path, node in nnx.iter_graph(args, graph=True)
        if isinstance(node, nnx.Module) and getattr(node, "dtype", None) == jnp.float16
    ]
    if paths:
        warn_of_float16(paths)


class Optimizer(nnx.Optimizer):
    """An `nnx.Optimizer` for `jaxmp.mixed_precision` that does not count skipped steps.

    Flax's own optimizer adds updates to the params, and its `step` also counts skipped calls. With
    this optimizer, the new params equal the rounded masters to the last bit, and a skipped call
    leaves `step` unchanged.

    Args:
      model: an nnx module. Under a policy that stores params in 16 bits, such as `"bfloat16"`, its
        params are cast, and the masters keep their values. Under rules, and in a model that has a
        policy of its own, all keep their dtypes.
      tx: the result of `jaxmp.mixed_precision`.
      wrt: a filter for the variables to train.

    Raises:
      TypeError: if `tx` is not wrapped in `mixed_precision`.

    >>> import jaxmp, optax
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16"))
    >>> loss, grads = value_and_grad(lambda m: m(jnp.ones((1, 2))).sum(), loss_scale=1.0)(model)
    >>> bool(optimizer.update(model, grads)), int(optimizer.step[...])
    (True, 1)
    """

    def __init__(self, model: Any, tx: MixedPrecision, *, wrt: Any = nnx.Param) -> None:
        check_wrapped(tx)
        params, opt_state = nnx.as_pure(nnx.state(model, wrt)), None
        nodes = (x for _, x in nnx.iter_graph(model, graph=True) if isinstance(x, nnx.Module))
        keeps = tx.rules.rules or any("_jaxmp" in vars(x) for x in nodes)
        if is_narrow(tx.policy.param_dtype) and not keeps:
            params, opt_state = tx.init_params(params)
            nnx.update(model, params)
        super().__init__(model, tx, wrt=wrt)
        if opt_state is not None:  # its masters are not rounded
            nnx.update(self.opt_state, nnx.state(opt_state))
        # A jit takes no arrays on different devices: the counter goes where the params are.
        self.step.set_raw_value(placed_beside(params, self.step[...]))

    @property
    def loss_scale(self) -> LossScaleState:
        """The loss scale for the next loss."""
        return nnx.as_pure(self.opt_state.loss_scale)

    def update(
        self, model: Any, grads: Any, /, *, finite: Bool[Array, ""] | None = None, **extra: Any
    ) -> Bool[Array, ""]:
        """Takes an optimizer step, or skips it.

        Args:
          model: the module that the optimizer was made for. Its params are changed in place.
          grads: the gradients from `jaxmp.nnx.value_and_grad`.
          finite: whether to take the step; by default `jaxmp.numbers.all_finite(grads)`.
          **extra: further arguments of the optimizer, such as `value=loss`.

        Returns:
          Whether the step was taken.

        Raises:
          TypeError: if `model` and `grads` are swapped: gradients would be written into.
        """
        if isinstance(model, nnx.State) and isinstance(grads, nnx.Module):
            raise TypeError(
                "update takes the model and then its gradients: optimizer.update(model, grads); "
                "got a State as the model, and a module as its gradients"
            )
        # Flax's own update would add to the params, which are the masters, rounded.
        params = nnx.as_pure(nnx.state(model, self.wrt))
        params, opt_state = self.tx.apply_gradients(
            nnx.as_pure(nnx.state(grads, self.wrt)),
            nnx.as_pure(self.opt_state),
            params,
            finite=finite,
            **nnx.as_pure(extra),
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state))
        self.step[...] += opt_state.grads_finite.astype(self.step.dtype)
        return opt_state.grads_finite


class _State:
    """The values in all modules of a tree before a loss function may change them."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        # By path, not by variable: modules may replace variables or hold plain arrays.
        self.values = {path: _value(node) for path, node in _leaf_nodes(tree)}

    def keep_unless_finite(self, loss: Any, grads: PyTree) -> PyTree:
        """Restores old values if anything is not finite.

        Returns:
          The gradients; NaN if the loss or a new value is not finite.
        """
        nodes = dict(nnx.iter_graph(self.tree, graph=True))
        places, new, old = [], [], []
        for path, node in _leaf_nodes(self.tree):
            before, after = self.values.get(path), _value(node)
            if before is None or after is before or not same_structure(after, before):
                continue
            # A value of another shape cannot go back to the old one.
            leaves = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
            if all(jnp.shape(x) == jnp.shape(y) for x, y in leaves):
                places.append((path, node))
                new.append(_like(after, before))
                old.append(before)
        is_finite = all_finite(loss) & stays_finite(new, old)
        # So that the optimizer skips the step too, by its own look at the gradients.
        grads = jax.tree.map(lambda g: jnp.where(is_finite, g, jnp.nan).astype(g.dtype), grads)
        values = select(all_finite(grads), new, old)
        for (path, node), value in zip(places, values, strict=True):
            if isinstance(node, nnx.Variable):
                node.set_raw_value(value)
            else:
                setattr(nodes[path[:-1]], str(path[-1]), value)
        return grads


def _leaf_nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Returns the variables in a tree, and the plain arrays in modules, with their paths."""
    nodes = dict(nnx.iter_graph(tree, graph=True))
    return [
        (path, node)
        for path, node in nodes.items()
        if isinstance(node, nnx.Variable)
        or (isinstance(node, jax.Array) and isinstance(nodes.get(path[:-1]), nnx.Pytree))
    ]


def _value(node: Any) -> Any:
    # A read through the hooks of a variable, and a write of its result, would apply them twice.
    return node.get_raw_value() if isinstance(node, nnx.Variable) else node


def _like(new: PyTree, old: PyTree) -> PyTree:
    def cast(x: Any, y: Any) -> Any:
        return cast_floating(jnp.asarray(x), y.dtype) if is_floating(y) else x

    return jax.tree.map(cast, new, old)


def _holds_state(arg: Any) -> bool:
    """Whether an argument contains modules or variables; a tree of arrays is a batch instead."""
    if not any(is_node(x) for x in jax.tree.leaves(arg, is_leaf=is_node)):
        return False
    nodes = (nnx.Module, nnx.Variable)
    return any(isinstance(node, nodes) for _, node in nnx.iter_graph(arg, graph=True))


def _diff_state(argnum: int | nnx.DiffState, count: int) -> nnx.DiffState:
    state = argnum if isinstance(argnum, nnx.DiffState) else nnx.DiffState(argnum, nnx.Param)
    (position,) = check_positions((state.argnum,), count, "argnums")
    return nnx.DiffState(position, state.filter)


def _over_microbatches(
    evaluate: Callable[..., Evaluation],
    wrt: tuple[nnx.DiffState, ...],
    options: GradientOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Evaluation:
    """Scans over the parts of the batch."""
    batch = options.batch(args, [x.argnum for x in wrt], _holds_state)
    arrays = {name: x for name, x in kwargs.items() if not _holds_state(x)}
    args = (*args, *kwargs.values())
    # The other arguments are carried: each part starts with the state that the last one left.
    carried = {i: arg for i, arg in enumerate(args) if i not in batch}
    graphdef, state = nnx.split(carried, graph=True)
    leaves, treedef = jax.tree.flatten(state)
    structure: Any = treedef
    gradient_trees: list[Any] = []

    def evaluate_part(carry: list[Any], part: dict[int, Any]) -> tuple[list[Any], Evaluation]:
        nodes = nnx.merge(graphdef, jax.tree.unflatten(treedef, carry))
        loss, grads, aux = evaluate(*[part[i] if i in part else nodes[i] for i in range(len(args))])
        # A scan sums lists of arrays. The structure of gradients is known once it has traced them.
        grads, gradient_tree = jax.tree.flatten(grads)
        gradient_trees.append(gradient_tree)
        new, new_treedef = jax.tree.flatten(nnx.state(nodes, graph=True))
        if new_treedef != structure:
            raise ValueError(
                "the loss function adds or removes variables of a module. Such variables cannot "
                "pass from one microbatch to the next. Use microbatches=1, or return them as aux"
            )
        return [_like(x, y) for x, y in zip(new, carry, strict=True)], Evaluation(loss, grads, aux)

    carry, (loss, grads, aux) = sum_over_microbatches(
        evaluate_part, leaves, _differentiated(wrt, args), batch, options.microbatches, arrays
    )
    nnx.update(carried, jax.tree.unflatten(treedef, carry))
    return Evaluation(loss, jax.tree.unflatten(gradient_trees[0], grads), aux)


def _differentiated(wrt: tuple[nnx.DiffState, ...], args: tuple[Any, ...]) -> list[Any]:
    """Returns the arrays to differentiate, in the order of their gradients."""
    arrays: list[Any] = []
    ids: set[int] = set()
    for x in wrt:
        arg = args[x.argnum]
        if not _holds_state(arg):
            arrays += jax.tree.leaves(arg)
            continue
        state = nnx.state(arg, x.filter, graph=True)
        variables = jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
        for variable in variables:
            # A variable that two arguments share has one gradient, in the first of them.
            if id(variable) not in ids:
                ids.add(id(variable))
                arrays += jax.tree.leaves(variable.get_raw_value())
    return arrays
