"""Runs two programs of one function side by side, and says where they part."""

import collections
import difflib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._numerics.dtypes import is_inexact
from jaxmp._program.tracing import combine, partition
from jaxmp._tools.diagnostics.comparison import Comparison, Difference, Unmatched
from jaxmp._tools.diagnostics.inputs import check_numbers
from jaxmp._tools.diagnostics.log_probs import log_prob_gap
from jaxmp._tools.diagnostics.scope_values import (
    Caught,
    ScopeValue,
    scope_of_line,
    scope_of_module,
    scope_values,
)
from jaxmp._tools.inspect.equations import all_sites, walk

By = Literal["scope", "line"]


def compare(
    f: Callable[..., Any],
    g: Callable[..., Any],
    *args: Any,
    g_args: Sequence[Any] | None = None,
    by: By | None = None,
    tolerance: float | int = 1.0,
    log_probs: Callable[[Any], Any] | None = None,
    band: tuple[float | int, float | int] = (0.5, 2.0),
) -> Comparison:
    """Says where two programs of one function part: under two policies, on two meshes, two codes.

    Both run once, compiled, and hand out the values that leave their modules. These are matched by
    the path of the module and their order, and compared in units of the last place of the coarsest
    dtype among them. A difference of one unit is a rounding; where it jumps, the programs do
    different things.

    Args:
      f: a function.
      g: the same function in another way; where dtypes are the same, the reference.
      *args: their arguments.
      g_args: the arguments of `g`, if they are others: sharded otherwise, or padded.
      by: how to name values: by `"scope"` (linen modules, `jax.named_scope`,
        `jaxmp.nnx.with_scopes`), or by the `"line"` of the code that makes them. None takes scopes
        where both programs have some. Values named by `jax.ad_checkpoint.checkpoint_name` are
        matched by these names.
      tolerance: what `first` looks for: a root mean square difference above this many units of the
        last place.
      log_probs: takes the result of a function, and returns the log-probability of each token; then
        the gap is reported too.
      band: see `jaxmp.diagnostics.log_prob_gap`.

    Returns:
      The comparison: `rows`, `results`, `first`, `unmatched`, `log_probs`.

    Raises:
      TypeError: for arrays without numbers, as under `jit`.
      ValueError: for an unknown option.

    >>> def net(w, x):
    ...     with jax.named_scope("up"):
    ...         h = jnp.tanh(x @ w)
    ...     with jax.named_scope("down"):
    ...         return jnp.sum(h @ w)
    >>> from jaxmp import autocast
    >>> w, x = jnp.full((4, 4), 0.3), jnp.ones((2, 4))
    >>> found = compare(autocast(net, "mixed_bfloat16"), net, w, x)
    >>> [(row.path, row.dtypes) for row in found.rows]
    [('up', ('bfloat16', 'float32')), ('down', ('float32', 'float32'))]
    >>> found.unit, found.first, 0 < found.results[0].ulps < 1
    ('bfloat16', None, True)
    """
    if by not in (None, "scope", "line"):
        raise ValueError(f"by must be 'scope', 'line' or None, got {by!r}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance!r}")
    check_numbers((args, g_args), "compare")
    given = args if g_args is None else tuple(g_args)
    widths: set[str] = set()
    one, two = (_caught(*each, by or "scope", widths) for each in ((f, args), (g, given)))
    if by is None and not (one.values and two.values):
        one, two = (_caught(*each, "line", widths) for each in ((f, args), (g, given)))
    pairs, unmatched = _matched(one, two)
    ours, theirs = _result_leaves(one.out), _result_leaves(two.out)
    unit = _coarsest(widths)
    rows = [row for pair in pairs for row in _differences(*pair, unit)]
    rows.sort(key=lambda pair: pair[0])
    results, others = _results(ours, theirs, unit)
    gap = None
    if log_probs is not None:
        gap = log_prob_gap(log_probs(one.out), log_probs(two.out), band=band)
    values = tuple(row for _, row in rows)
    alone = (*unmatched, *others)
    return Comparison(values, results, alone, unit, float(tolerance), gap)


def _caught(fun: Callable[..., Any], args: Sequence[Any], by: By, dtypes: set[str]) -> Caught:
    """Runs a function, compiled, with the values that leave its scopes.

    It adds the float dtypes of the program to `dtypes`: a program may round inside of a scope, and
    hand out float32.
    """
    static, arrays = partition(tuple(args))
    catching = scope_values(fun, scope_of=scope_of_module if by == "scope" else scope_of_line())
    returned: list[Any] = []

    @jax.jit
    def run(*arrays: Any) -> Any:
        caught = catching(*combine(static, arrays))
        rest, results = partition(caught.out)
        returned[:] = [rest, caught.values, caught.not_entered]
        return results, caught.kept

    traced = run.trace(*arrays)
    made = (x.aval for site in all_sites(walk(traced.jaxpr)) for x in site.equation.outvars)
    dtypes |= {aval.dtype.name for aval in made if is_inexact(aval)}
    results, kept = traced.lower().compile()(*arrays)
    rest, values, not_entered = returned
    return Caught(combine(rest, results), kept, values, not_entered)


class _Value(NamedTuple):
    """A value, where it is, and which of its scope it is."""

    about: ScopeValue
    array: Any
    number: int


# Values of one name are matched in their order: of a path and a direction, or of an anchor.
_Name = tuple[str, str]


def _by_name(caught: Caught, path: Callable[[str], str]) -> dict[_Name, list[_Value]]:
    found: dict[_Name, list[_Value]] = collections.defaultdict(list)
    for about, array in zip(caught.values, caught.kept, strict=True):
        name = about.anchor or path(about.path)
        group = found[("anchor" if about.anchor else about.direction, name)]
        group.append(_Value(about, array, len(group)))
    return found


def _matched(one: Caught, two: Caught) -> tuple[list[tuple[_Value, _Value]], list[Unmatched]]:
    """Pairs the values of two programs; the rest is listed."""
    ways = [(a, b) for a in (_whole, _without_root) for b in (_whole, _without_root)]
    named = [(_by_name(one, a), _by_name(two, b)) for a, b in ways]
    # One program may have the name of the model in front of all paths.
    first, second = max(named, key=lambda both: len(both[0].keys() & both[1].keys()))
    pairs: list[tuple[_Value, _Value]] = []
    alone: list[Unmatched] = [
        Unmatched(i, x.path, x.line, f"nothing is seen inside of this {x.operation}")
        for i, caught in ((1, one), (2, two))
        for x in caught.not_entered
    ]
    for name in dict.fromkeys([*first, *second]):
        ours, theirs = first.get(name, []), second.get(name, [])
        matched, rest = _aligned(ours, theirs)
        pairs += matched
        alone += rest
    return pairs, alone


def _whole(path: str) -> str:
    return path


def _without_root(path: str) -> str:
    return path.partition("/")[2] or path


def _aligned(
    ours: list[_Value], theirs: list[_Value]
) -> tuple[list[tuple[_Value, _Value]], list[Unmatched]]:
    """Pairs values of one name in their order, leaving out those whose shapes have no partner."""
    a, b = ([(x.about.shape, x.about.turns) for x in side] for side in (ours, theirs))
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    pairs = [
        (ours[block.a + i], theirs[block.b + i]) for block in blocks for i in range(block.size)
    ]
    paired = {id(x) for pair in pairs for x in pair}
    sides = ((1, ours, theirs), (2, theirs, ours))
    rest = [
        Unmatched(program, value.about.path, value.about.line, _why(value, other))
        for program, side, other in sides
        for value in side
        if id(value) not in paired
    ]
    return pairs, rest


def _why(value: _Value, others: list[_Value]) -> str:
    form = f"{value.about.dtype}{list(value.about.shape)} from {value.about.operation}"
    if value.about.turns:
        form += f", in scans of {', '.join(map(str, value.about.turns))} turns"
    shapes = ", ".join(dict.fromkeys(str(list(x.about.shape)) for x in others))
    return f"{form}; the other program has " + (f"{shapes} here" if shapes else "nothing here")


def _coarsest(dtypes: set[str]) -> str:
    """Returns the float dtype with the fewest bits."""
    return max(sorted(dtypes | {"float32"}), key=lambda name: float(jnp.finfo(name).eps))


def _differences(ours: _Value, theirs: _Value, unit: str) -> list[tuple[Any, Difference]]:
    """Returns a row for each turn of the loops around a value, and what to sort it by."""
    about = ours.about
    a, b = _on_host(ours.array), _on_host(theirs.array)
    dtypes = (about.dtype, theirs.about.dtype)
    rows = []
    for turns in np.ndindex(*about.turns):
        numbers = iter(turns)
        order = [next(numbers) if x is None else x for x in about.order]
        row = Difference(
            about.anchor or about.path,
            ours.number,
            about.direction,
            about.line,
            tuple(map(int, turns)),
            about.shape,
            dtypes,
            *_apart(a[turns], b[turns], unit),
        )
        rows.append((order, row))
    return rows


def _apart(a: Any, b: Any, dtype: str) -> tuple[float, float, float]:
    """Returns how far numbers are apart: rms and largest in units of the last place, relative."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities of masks are equal
    if same.all():
        return 0.0, 0.0, 0.0
    finite = np.isfinite(a) & np.isfinite(b)
    size = _rms(np.where(finite, b, 0))
    if not (same | finite).all() or not size or a.dtype.kind in "biu":
        return float("inf"), float("inf"), float("inf")
    off = np.abs(np.where(same, 0, np.where(finite, a, 0) - np.where(finite, b, 0)))
    info = jnp.finfo(dtype)
    unit = float(info.eps) * 2.0 ** np.floor(np.log2(max(size, float(info.tiny))))
    return float(_rms(off) / unit), float(off.max() / unit), float(_rms(off) / size)


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.abs(x) ** 2))) if x.size else 0.0


def _on_host(array: Any) -> Any:
    host = np.asarray(jax.device_get(array))
    if host.dtype.kind in "biu":
        return host
    return host.astype(np.complex128 if jnp.iscomplexobj(array) else np.float64)


def _results(
    ours: dict[str, Any], theirs: dict[str, Any], unit: str
) -> tuple[tuple[Difference, ...], list[Unmatched]]:
    """Compares the results of two programs, by their paths."""
    rows, alone = [], []
    for path in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(path), theirs.get(path)
        if a is None or b is None or a.shape != b.shape:
            has = [None if x is None else list(x.shape) for x in (a, b)]
            why = f"the results have {has[0] or 'nothing'} and {has[1] or 'nothing'} here"
            alone.append(Unmatched(2 if a is None else 1, path, "", why))
            continue
        dtypes = (a.dtype.name, b.dtype.name)
        apart = _apart(_on_host(a), _on_host(b), unit)
        rows.append(Difference(path, 0, "", "", (), tuple(a.shape), dtypes, *apart))
    return tuple(rows), alone


def _result_leaves(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        f"result/{jax.tree_util.keystr(path, simple=True, separator='/')}".rstrip("/"): array
        for path, leaf in leaves
        if (array := _as_numbers(leaf)) is not None
    }


def _as_numbers(leaf: Any) -> Any:
    """Returns an array of numbers or bools; None for what has none, such as text and keys."""
    if isinstance(leaf, (bool, int, float, complex)):
        return jnp.asarray(leaf)
    counted = (jnp.number, jnp.bool_)
    is_array = hasattr(leaf, "dtype") and any(jnp.issubdtype(leaf.dtype, x) for x in counted)
    return jnp.asarray(leaf) if is_array else None
