"""The numerics of a program as a file: what is computed in which dtype, module by module."""

import collections
import functools
import json
import operator
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp
from jaxmp._numerics.dtypes import code_kind, is_inexact
from jaxmp._numerics.precision import name_of_param
from jaxmp._program.facts import ForwardAnalysis, operations_read, propagate
from jaxmp._program.op_classes import CASTS, COLLECTIVES, IDENTITIES, PASSED_ON, PRODUCTS, TOTALS
from jaxmp._program.program import Program
from jaxmp._tools.inspect.equations import Site
from jaxmp._tools.inspect.rows import Numerics
from jaxmp._tools.inspect.summarize import Tally

# Of each value that another is made of: the narrowest dtypes that it had since.
_Origins = frozenset[frozenset[str]]
# Of a module: pass and kind -> operation -> how often.
_Content = dict[str, dict[str, int]]
# The "module" of arguments and results, whose names may change.
_PROGRAM = "(program)"
_MOST_LINES = 20


def numerics_rows(tally: Tally, program: Program) -> tuple[Numerics, ...]:
    """Returns the operations on floats by module, pass and dtypes.

    Moves and casts get no row; the operand that reads the value shows its narrowest dtype:
    `float32 (bfloat16)` was computed in bfloat16 or rounded to it, and widened.
    """
    operations: dict[Site, tuple[str, str]] = {}
    rule = functools.partial(_origins_of_results, operations)
    analysis = ForwardAnalysis[_Origins](bottom=frozenset(), join=operator.or_, transfer=rule)
    avals = [program.avals[number] for number in program.inputs]
    results = propagate(program, list(map(_origin_of, avals)), analysis, lambda site: site.bodies)
    lines: dict[Any, str] = {}
    counts = collections.Counter[tuple[str, Any, str, str]]()
    # JAX drops what nothing reads from jitted functions, and from others not.
    for site in operations_read(program, lambda site: site.bodies):
        if site not in operations:
            continue
        kind, text = operations[site]
        place = _module_of(tally.where(site).path), tally.where(site).direction
        counts[*place, kind, text] += 1
        lines.setdefault((*place, kind, text), tally.where(site).line)
    counts.update((_PROGRAM, "", "arguments", str(aval.dtype)) for aval in avals)
    for atom, sources in zip(program.outputs, results, strict=True):
        aval = program.avals[atom] if isinstance(atom, int) else atom.aval
        counts[_PROGRAM, "", "results", _operand_text(aval, sources)] += 1
    return tuple(Numerics(*key, n, lines.get(key, "")) for key, n in sorted(counts.items()))


def _module_of(path: str) -> str:
    # An einsum is a scope for JAX, whose letters may change.
    return "/".join(name for name in path.split("/") if "->" not in name)


def _origin_of(aval: Any) -> _Origins:
    return frozenset([frozenset([str(aval.dtype)])] if is_inexact(aval) else [])


def _origins_of_results(
    operations: dict[Site, tuple[str, str]], site: Site, origins: Sequence[_Origins]
) -> list[_Origins]:
    if site.name == "optimization_barrier":
        return list(origins)
    kind = _kind_of(site)
    # Operands of sums and elementwise operations may change places; those of products have roles.
    operands = [
        _operand_text(aval, sources)
        for aval, sources in zip(site.in_avals, origins, strict=True)
        if _is_number(aval)
    ]
    operands = operands if site.name in PRODUCTS else sorted(set(operands))
    dtypes = dict.fromkeys(str(getattr(aval, "dtype", "none")) for aval in site.out_avals)
    text = f"{_operation_name(site)} {' x '.join(operands)} -> {', '.join(dtypes)}"
    if kind:
        operations[site] = kind, text
    # Gradients are added in the order of the program's lines, which may change.
    if kind and site.name != "add_any":
        return [_origin_of(aval) for aval in site.out_avals]
    sources = _Origins().union(*origins[:1] if site.name in IDENTITIES else origins)
    return [_passed_on(site, sources, aval) for aval in site.out_avals]


def _passed_on(site: Site, origins: _Origins, aval: Any) -> _Origins:
    """Returns the origins of a value that was moved or cast: a cast may have rounded it."""
    if not is_inexact(aval):
        return frozenset()
    origins = origins or _origin_of(next(filter(is_inexact, site.in_avals), aval))
    return frozenset(_rounded_by(passed, str(aval.dtype)) for passed in origins)


@functools.cache
def _rounded_by(passed: frozenset[str], dtype: str) -> frozenset[str]:
    """Returns the dtypes that round a value most, once it has one more dtype."""
    if any(_is_exact(dtype, other) for other in passed):
        return passed
    return frozenset([dtype, *(other for other in passed if not _is_exact(other, dtype))])


def _is_exact(dtype: str, other: str) -> bool:
    wide, narrow = jnp.finfo(dtype), jnp.finfo(other)
    return bool(wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp)


def _is_number(aval: Any) -> bool:
    return is_inexact(aval) or bool(code_kind(str(getattr(aval, "dtype", ""))))


def _operand_text(aval: Any, origins: _Origins) -> str:
    dtype = str(getattr(aval, "dtype", "none"))
    narrow = sorted(frozenset[str]().union(*origins) - {dtype})
    return f"{dtype} ({', '.join(narrow)})" if narrow and is_inexact(aval) else dtype


def _kind_of(site: Site) -> str:
    """Returns the kind of an operation; `""` if it only moves or casts, or has no floats."""
    avals = [*site.in_avals, *site.out_avals]
    if not any(map(_is_number, avals)):
        return ""
    is_code = any(code_kind(str(getattr(aval, "dtype", ""))) for aval in site.out_avals)
    if site.name in PRODUCTS or (site.name in CASTS and is_code):
        return "products"
    if site.name.removesuffix("_start") in COLLECTIVES:
        return "collectives"
    if site.name in TOTALS:
        return "sums"
    # A number that becomes an integer ends here: what reads the integer does not know of it.
    is_passed_on = site.name in PASSED_ON and (not site.outputs or is_inexact(site.out_avals[0]))
    return "" if is_passed_on else "arithmetic"


def _operation_name(site: Site) -> str:
    name, params = site.name, site.params
    if name in PRODUCTS and any(str(aval.dtype) == "float32" for aval in site.in_avals[:2]):
        precision = name_of_param(params.get("precision"))
        name += "" if precision == "default" else f" ({precision})"
    if "mantissa_bits" in params:
        name += f" (e{params['exponent_bits']}m{params['mantissa_bits']})"
    return name


def write_lock_file(report: Any, path: Any) -> None:
    """Implements `AuditReport.write_lock`."""
    groups: dict[str, dict[str, Any]] = {}
    for module, content in sorted(_content_of_modules(report).items()):
        entry = groups.setdefault(json.dumps(content), {"modules": [], **content})
        entry["modules"].append(module)
    lock = {**_settings(report), "numerics": list(groups.values())}
    pathlib.Path(path).write_text(json.dumps(lock, indent=1) + "\n", encoding="utf-8")


def _settings(report: Any) -> dict[str, Any]:
    compiled = report.compiled is not None
    return {"jaxmp": jaxmp.__version__, "jax": jax.__version__, "compiled": compiled}


def _content_of_modules(report: Any) -> dict[str, _Content]:
    rows = [(x.path, f"{x.direction} {x.kind}", x.operation, x.count) for x in report.numerics]
    # How many arrays are kept depends on what is jitted; their dtypes do not.
    rows += {(_module_of(x.path), "forward kept", x.dtype, 1) for x in report.residuals or ()}
    for x in report.compiled or ():
        text = f"{x.kind} ({x.reducer}) {x.dtype}"
        rows.append((_module_of(x.path), f"{x.direction} compiled collectives", text, x.arrays))
    contents: dict[str, _Content] = {}
    for path, kind, text, count in sorted(rows):
        counts = contents.setdefault(path, {}).setdefault(kind.strip(), {})
        counts[text] = counts.get(text, 0) + count
    return contents


def lock_errors(report: Any, path: Any) -> list[str]:
    """Returns lines about how the numerics of a report differ from a lock file.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is no lock file, or is of a compiled program and the report is not.
    """
    file, settings = pathlib.Path(path), _settings(report)
    how = f"write it: report.write_lock({str(path)!r}), or jaxmp audit PROGRAM --lock {path}"
    if not file.is_file():
        raise FileNotFoundError(f"there is no lock file {str(path)!r}; {how}")
    try:
        lock = json.loads(file.read_text(encoding="utf-8"))
        old = {
            # Files of version 0.1 have hashes, too, named flow.
            name: {kind: dict(x) for kind, x in entry.items() if not kind.endswith("flow")}
            for entry in lock["numerics"]
            for name in entry.pop("modules")
        }
        before = {name: lock[name] for name in settings}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is no lock file; {how}") from error
    if before["compiled"] != settings["compiled"]:
        raise ValueError(
            f"{str(path)!r} was written with compiled={before['compiled']}, and this audit has "
            f"compiled={settings['compiled']}. Audit as then, or {how}"
        )
    groups = collections.defaultdict[tuple[str, ...], list[str]](list)
    for module, *change in _changes(old, _content_of_modules(report), report.numerics):
        groups[tuple(change)].append(module)
    lines = [
        "  "
        + ", ".join(filter(None, (modules[0], kind)))
        + (f" (and {len(modules) - 1} more modules)" if modules[1:] else "")
        + f":  {text}"
        + (f"  at {line}" if line else "")
        for (kind, text, line), modules in groups.items()
    ]
    if not lines:
        return []
    if lines[_MOST_LINES:]:
        lines[_MOST_LINES:] = [f"  ... and {len(lines) - _MOST_LINES} more"]
    if before != settings:
        versions = (f"jaxmp {x['jaxmp']} and jax {x['jax']}" for x in (before, settings))
        lines.append(
            f"It was written by {', and this is '.join(versions)}, whose operations may differ. If "
            "nothing else changed, write it again."
        )
    return [f"the numerics changed, compared with {path} (if this is meant, {how}):", *lines]


def _changes(
    old: dict[str, _Content], new: dict[str, _Content], rows: Sequence[Numerics]
) -> Iterator[tuple[str, str, str, str]]:
    """Yields the module, pass and kind, the change of counts, and the line of each difference."""
    lines = {(x.path, f"{x.direction} {x.kind}".strip(), x.operation): x.line for x in rows}
    names = {path: path for path in new if path in old}
    # Of the rest, modules with the same content are one with another name. For readers, those with
    # the same last name are one too: it shows a change in a renamed model.
    for is_by_name in (False, True):
        for path in [path for path in old if path not in names.values()]:
            for other in [other for other in new if other not in names]:
                ends = path.rpartition("/")[2], other.rpartition("/")[2]
                if ends[0] == ends[1] if is_by_name else old[path] == new[other]:
                    names[other] = path
                    break
    gone = [path for path in old if path not in names.values()]
    # The dtypes of the whole program follow from those of its modules.
    for module in sorted({*new, *gone}, key=lambda path: (path == _PROGRAM, path)):
        before, after = old.get(names.get(module, module), {}), new.get(module, {})
        for kind in sorted({*before, *after}):
            a, b = (collections.Counter(side.get(kind, {})) for side in (before, after))
            texts = sorted((a - b) | (b - a))
            if texts:
                at = [lines.get((module, kind, text), "") for text in sorted(b - a)]
                text = ";  ".join(f"{text}: {a[text]} -> {b[text]}" for text in texts)
                yield module, kind, text, next(filter(None, at), "")
