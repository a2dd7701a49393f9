"""Runs two programs of one function, and finds the first value in which they differ."""

import collections
import difflib
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._numerics.dtypes import is_inexact
from jaxmp._numerics.tree import leaf_names
from jaxmp._program.tracing import combine, partition, trace_call
from jaxmp._tools.diagnostics.comparison import Comparison, Difference, Gap, Unmatched
from jaxmp._tools.diagnostics.first_order import FirstOrder, Target
from jaxmp._tools.diagnostics.inputs import check_numbers
from jaxmp._tools.diagnostics.log_probs import log_prob_gap
from jaxmp._tools.diagnostics.roundings import in_float32, uncounted_in
from jaxmp._tools.diagnostics.scope_values import (
    Capture,
    ScopeValue,
    scope_of_line,
    scope_of_module,
    scope_values,
)
from jaxmp._tools.inspect.equations import all_sites, walk
from jaxmp._tools.inspect.lines import line_of

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
    error_bar: bool = True,
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
      error_bar: whether to predict what roundings do to the results, from a backward pass through
        each program. It is compiled for that a second time.

    Returns:
      The comparison: `rows`, `results`, `first`, `gap`, `unmatched`, `log_probs`.

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
    >>> comparison = compare(autocast(net, "mixed_bfloat16"), net, w, x)
    >>> [(row.path, row.dtypes) for row in comparison.rows]
    [('up', ('bfloat16', 'float32')), ('down', ('float32', 'float32'))]
    >>> comparison.unit, comparison.first, 0 < comparison.results[0].ulps < 1
    ('bfloat16', None, True)
    >>> comparison.gap.is_rounding
    True
    """
    if by not in (None, "scope", "line"):
        raise ValueError(f"by must be 'scope', 'line' or None, got {by!r}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance!r}")
    check_numbers((args, g_args), "compare")
    calls = ((f, args), (g, args if g_args is None else tuple(g_args)))
    dtypes: set[str] = set()
    one, two = (_run(*call, by or "scope", dtypes) for call in calls)
    # If one of the programs has no scopes, nothing would match: lines name the values then.
    if by is None and not (one.values and two.values):
        one, two = (_run(*call, "line", dtypes) for call in calls)
    pairs, unmatched = _match_values(one, two)
    # The coarsest dtype, in whose units one rounding is about 1.
    unit = max(sorted(dtypes | {"float32"}), key=lambda name: float(jnp.finfo(name).eps))
    rows = [row for pair in pairs for row in _differences(*pair, unit)]
    rows.sort(key=lambda pair: pair[0])
    results, others = _compare_results(_result_leaves(one.out), _result_leaves(two.out), unit)
    of_tokens = None
    if log_probs is not None:
        of_tokens = log_prob_gap(log_probs(one.out), log_probs(two.out), band=band)
    values = tuple(row for _, row in rows)
    gap = None
    if error_bar:
        gap = _gap(results, others, [_rounding_of(*call) for call in calls])
    unmatched += others
    return Comparison(values, results, tuple(unmatched), unit, float(tolerance), gap, of_tokens)


def _rounding_of(fun: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, list[str]]:
    """Returns the relative variance that roundings add to each result, and what is not counted."""

    def floats(*args: Any) -> dict[str, Any]:
        leaves = {path: x for path, x in _result_leaves(fun(*args)).items() if is_inexact(x)}
        pairs = {k: jnp.stack([x.real, x.imag]) for k, x in leaves.items() if jnp.iscomplexobj(x)}
        return jax.tree.map(in_float32, leaves | pairs)

    static, arrays = partition((tuple(args), {}))
    try:
        traced = trace_call(floats, static, arrays)
        counts = [True] * len(traced.closed.out_avals)
        uncounted = uncounted_in(traced.closed, counts, float32=True)
        first_order = FirstOrder(
            traced,
            lambda site: (line_of(site), site.name),
            [Target(slice(None), is_smooth=True, each=True)],
            float32=True,
        )
        variances = combine(traced.returned, first_order(arrays)[0].sum((1, 2)).tolist())
        return collections.defaultdict(float, variances), list(uncounted)
    except Exception as error:  # whatever has no derivative: the comparison itself needs none
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        unknown: Any = collections.defaultdict(lambda: math.nan)
        return unknown, [f"anything, as there is no derivative: {reason}"]


def _gap(results: Sequence[Any], alone: Sequence[Any], roundings: Sequence[Any]) -> Gap:
    # A difference of integers is no rounding, and infinite. So is a result without a partner.
    floats = [row for row in results if row.relative or "float" in row.dtypes[1]]
    pairs = [(x.relative**2, sum(of[x.path] for of, _ in roundings)) for x in floats]
    count = max(len(floats), 1)
    # One result is within three standard deviations in 99.7 % of cases. More are wider, so that
    # 99.95 % leave none out, however they are correlated (Sidak, 1967; Royen, 2014, for norms).
    chance = math.erf((3.0 if count == 1 else 3.5) / 2**0.5) ** (1 / count)
    bar = statistics.NormalDist().inv_cdf((1 + chance) / 2) ** 2
    unexplained = [x for x, (a, b) in zip(floats, pairs, strict=True) if not a <= bar * b]
    paths = tuple(x.path for x in (*alone, *unexplained))
    distance, deviation = (math.sqrt(sum(pair[i] for pair in pairs) / count) for i in (0, 1))
    uncounted = dict.fromkeys(line for _, lines in roundings for line in lines)
    return Gap(math.inf if alone else distance, deviation, paths, tuple(uncounted))


def _run(fun: Callable[..., Any], args: Sequence[Any], by: By, dtypes: set[str]) -> Capture:
    """Runs a function, compiled, with the values that leave its scopes; adds to `dtypes`."""
    # Functions and flags among the arguments are no arguments of the compiled program.
    static, arrays = partition(tuple(args))
    catching = scope_values(fun, scope_of=scope_of_module if by == "scope" else scope_of_line)
    returned: list[Any] = []

    @jax.jit
    def run(*arrays: Any) -> Any:
        capture = catching(*combine(static, arrays))
        # A result may hold text or functions, which a jitted function cannot return.
        structure, results = partition(capture.out)
        returned[:] = [structure, capture.values, capture.not_entered]
        return results, capture.saved

    traced = run.trace(*arrays)
    # All dtypes of the program: it may round inside of a scope, and hand out float32.
    avals = (x.aval for site in all_sites(walk(traced.jaxpr)) for x in site.equation.outvars)
    dtypes |= {aval.dtype.name for aval in avals if is_inexact(aval)}
    results, saved = traced.lower().compile()(*arrays)
    structure, values, not_entered = returned
    return Capture(combine(structure, results), saved, values, not_entered)


# Programs are matched by names: by place they would part at the first additional operation.
class _Value(NamedTuple):
    """A value, its place, and its number among the values of its scope."""

    about: ScopeValue
    array: Any
    number: int


# Values of one name are matched in their order: of a path and a direction, or of an anchor.
_Name = tuple[str, str]


def _by_name(capture: Capture, without_root: bool) -> dict[_Name, list[_Value]]:
    values: dict[_Name, list[_Value]] = collections.defaultdict(list)
    for about, array in zip(capture.values, capture.saved, strict=True):
        path = (without_root and about.path.partition("/")[2]) or about.path
        name = ("anchor", about.anchor) if about.anchor else (about.direction, path)
        values[name].append(_Value(about, array, len(values[name])))
    return values


def _match_values(
    one: Capture, two: Capture
) -> tuple[list[tuple[_Value, _Value]], list[Unmatched]]:
    """Pairs the values of two programs, and lists those without a partner."""
    # One program may have the name of the model in front of all paths: linen against plain JAX.
    ways = itertools.product((False, True), repeat=2)
    candidates = [(_by_name(one, a), _by_name(two, b)) for a, b in ways]
    first, second = max(candidates, key=lambda both: len(both[0].keys() & both[1].keys()))
    pairs: list[tuple[_Value, _Value]] = []
    alone: list[Unmatched] = [
        Unmatched(i, x.path, x.line, f"nothing is seen inside of this {x.operation}")
        for i, capture in ((1, one), (2, two))
        for x in capture.not_entered
    ]
    for name in dict.fromkeys([*first, *second]):
        ours, theirs = first.get(name, []), second.get(name, [])
        aligned, unmatched = _align(ours, theirs)
        pairs += aligned
        alone += unmatched
    return pairs, alone


def _align(
    ours: list[_Value], theirs: list[_Value]
) -> tuple[list[tuple[_Value, _Value]], list[Unmatched]]:
    """Pairs values of one name in their order, leaving out those whose shapes have no partner."""
    # As a diff of their shapes: one program may have a value more, such as a cast in its module.
    a, b = ([(x.about.shape, x.about.turns) for x in side] for side in (ours, theirs))
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    pairs = [
        (ours[block.a + i], theirs[block.b + i]) for block in blocks for i in range(block.size)
    ]
    paired = {id(x) for pair in pairs for x in pair}
    sides = ((1, ours, theirs), (2, theirs, ours))
    unmatched = [
        Unmatched(program, value.about.path, value.about.line, _reason(value, other))
        for program, side, other in sides
        for value in side
        if id(value) not in paired
    ]
    return pairs, unmatched


def _reason(value: _Value, others: list[_Value]) -> str:
    form = f"{value.about.dtype}{list(value.about.shape)} from {value.about.operation}"
    if value.about.turns:
        form += f", in scans of {', '.join(map(str, value.about.turns))} turns"
    shapes = ", ".join(dict.fromkeys(str(list(x.about.shape)) for x in others))
    return f"{form}; the other program has " + (f"{shapes} here" if shapes else "nothing here")


def _differences(ours: _Value, theirs: _Value, unit: str) -> list[tuple[Any, Difference]]:
    """Returns a row for each turn of the scans around a value, with the key to sort it by."""
    about = ours.about
    a, b = _on_host(ours.array), _on_host(theirs.array)
    dtypes = (about.dtype, theirs.about.dtype)
    rows = []
    for turns in np.ndindex(*about.turns):
        # All values of a turn come before those of the next, as a loop computes them.
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
            *_distances(a[turns], b[turns], unit),
        )
        rows.append((order, row))
    return rows


def _distances(a: Any, b: Any, dtype: str) -> tuple[float, float, float]:
    """Returns `ulps`, `largest` and `relative` of a `Difference`."""
    # Infinities of masks are equal, and so is NaN where both programs have it.
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0, 0.0, 0.0
    finite = np.isfinite(a) & np.isfinite(b)
    size = _rms(np.where(finite, b, 0))
    # Integers that differ are infinitely apart: token 5000 is not near token 5001.
    if not (same | finite).all() or not size or a.dtype.kind in "biu":
        return float("inf"), float("inf"), float("inf")
    off = np.abs(np.where(same, 0, np.where(finite, a, 0) - np.where(finite, b, 0)))
    # At the root mean square: near zero the units of single numbers would be tiny.
    info = jnp.finfo(dtype)
    unit = float(info.eps) * 2.0 ** np.floor(np.log2(max(size, float(info.tiny))))
    return float(_rms(off) / unit), float(off.max() / unit), float(_rms(off) / size)


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.abs(x) ** 2))) if x.size else 0.0


def _on_host(array: Any) -> Any:
    # Differences of 16-bit numbers would be rounded in 16 bits.
    host = np.asarray(jax.device_get(array))
    if host.dtype.kind in "biu":
        return host
    return host.astype(np.complex128 if jnp.iscomplexobj(array) else np.float64)


def _compare_results(
    ours: dict[str, Any], theirs: dict[str, Any], unit: str
) -> tuple[tuple[Difference, ...], list[Unmatched]]:
    # By their paths: results have names in both programs, whatever their order.
    rows, alone = [], []
    for path in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(path), theirs.get(path)
        if a is None or b is None or a.shape != b.shape:
            has = [None if x is None else list(x.shape) for x in (a, b)]
            reason = f"the results have {has[0] or 'nothing'} and {has[1] or 'nothing'} here"
            alone.append(Unmatched(2 if a is None else 1, path, "", reason))
            continue
        dtypes = (a.dtype.name, b.dtype.name)
        distances = _distances(_on_host(a), _on_host(b), unit)
        rows.append(Difference(path, 0, "", "", (), tuple(a.shape), dtypes, *distances))
    return tuple(rows), alone


def _result_leaves(tree: Any) -> dict[str, Any]:
    """Returns the arrays of numbers or bools in a result, by path; text and keys have none."""
    arrays: dict[str, Any] = {}
    for path, leaf in zip(leaf_names({"result": tree}), jax.tree.leaves(tree), strict=True):
        dtype = getattr(leaf, "dtype", None)
        has_numbers = isinstance(leaf, (bool, int, float, complex)) or (
            dtype is not None
            and (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))
        )
        if has_numbers:
            arrays[path] = jnp.asarray(leaf)
    return arrays
