"""Every layer of Flax under every policy: its params, its dots, what it returns, its gradient.

`python -m tests.flax.test_layers` writes the table into docs/flax.md, best with the newest Flax.
"""

import functools
import pathlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jaxmp
from tests.support.dots import count_dots
from tests.support.layer_cases import (
    CASES,
    NAMESPACES,
    WITHOUT_A_CASE,
    Case,
    dots_of,
    dtype_of,
    exported_layers,
    is_of_another_flax,
    table_lines,
)

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    # Both are Flax's own business: its SelfAttention, and its RoPE of 0.12.12.
    pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning"),
]

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "flax.md"
TABLE = "| layer | API "  # how it begins; it ends the page
# In every preset params and outputs have one dtype; the last policy tells all three apart.
POLICIES = (
    *("float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16"),
    "params=float16,compute=bfloat16,output=float32",
)
SETTINGS = [*((policy, "float32") for policy in POLICIES), ("mixed_bfloat16", "float16")]
# Programs this small run once: most of their time would go into optimising them.
UNOPTIMISED: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Subject(NamedTuple):
    """A layer, or a model around it, to be traced; variables are params, statistics, others."""

    call: Callable[..., Any]
    gradient: Callable[..., Any]
    variables: tuple[Any, Any, Any]


class Measured(NamedTuple):
    """The dtypes that were found; those of variables before and after the call."""

    params: str
    statistics: str
    dots: dict[str, int]  # how many have which operands
    output: str  # what the layer returned
    carry: str  # the carry that it returned
    model: str  # what the model around it returned, if there was one


class LinenHost(nn.Module):
    """A model with one layer in it, that tells what the layer returns to it."""

    layer: nn.Module
    method: str
    tell: Callable[[Any], None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = getattr(self.layer, self.method)(*args, **kwargs)
        self.tell(out)
        return out


class NnxHost(nnx.Module):
    def __init__(self, layer: nnx.Module, method: str, tell: Callable[[Any], None]) -> None:
        self.layer, self.method, self.tell = layer, method, tell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = getattr(self.layer, self.method)(*args, **kwargs)
        self.tell(out)
        return out


def linen_subject(module: nn.Module, method: str, case: Case, inputs: Any) -> Subject:
    options = {"method": method, **case.options}
    init = functools.partial(module.init, **options)
    statistics = dict(jax.eval_shape(init, jax.random.key(0), *inputs))
    params = statistics.pop("params", {})

    def call(variables: Any, *inputs: Any) -> Any:
        params, statistics, _ = variables
        given = {"params": params, **statistics}
        out, updates = module.apply(given, *inputs, mutable=list(statistics), **options)
        return out, (params, {**statistics, **updates}, {})

    def gradient(variables: Any, *inputs: Any) -> Any:
        def loss(params: Any, *inputs: Any) -> jax.Array:
            return total(call((params, *variables[1:]), *inputs)[0])

        return jax.grad(loss, floating_arguments(inputs))(variables[0], *inputs)

    return Subject(call, gradient, (params, statistics, {}))


def nnx_subject(model: nnx.Module, method: str, case: Case, inputs: Any) -> Subject:
    del inputs  # nnx modules know their shapes
    kinds = (nnx.Param, nnx.BatchStat, ...)
    graphdef, *variables = nnx.split(model, *kinds)

    def call(variables: Any, *inputs: Any) -> Any:
        model = nnx.merge(graphdef, *variables)
        out = getattr(model, method)(*inputs, **case.options)
        return out, nnx.state(model, *kinds)

    def gradient(variables: Any, *inputs: Any) -> Any:
        def loss(model: nnx.Module, *inputs: Any) -> jax.Array:
            return total(getattr(model, method)(*inputs, **case.options))

        model = nnx.merge(graphdef, *variables)
        return nnx.grad(loss, argnums=floating_arguments(inputs))(model, *inputs)

    return Subject(call, gradient, tuple(variables))


def floating_arguments(inputs: Any) -> tuple[int, ...]:
    """Where the params and the floating inputs stand among the arguments of a loss."""
    return (0, *(i for i, given in enumerate(inputs, start=1) if floating(given)))


def total(outputs: Any) -> jax.Array:
    return sum((jnp.sum(x.astype(jnp.float32)) for x in floating(outputs)), jnp.float32(0))


def floating(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def dtypes(*trees: Any) -> str:
    return ", ".join(sorted({str(x.dtype) for x in floating(trees)}))


def given_to(case: Case, dtype: str) -> Any:
    """The arguments of the call, floating ones in a dtype."""

    def as_given(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x.update(dtype=jnp.dtype(dtype)) if floating(x) else x

    return jax.tree.map(as_given, case.inputs)


def make_subject(
    case: Case, policy: str | None, inputs: Any, tell: Any = None, **by_hand: Any
) -> Subject:
    """A layer, or a model with it if there is someone to `tell`, under a policy if one is named."""
    layer, method = case.build(**by_hand), case.method
    assert type(layer).__name__ == case.name
    host, adapter, subject = {
        "linen": (LinenHost, jaxmp.linen, linen_subject),
        "nnx": (NnxHost, jaxmp.nnx, nnx_subject),
    }[case.api]
    if tell is not None:
        layer, method = host(layer, method, tell), "__call__"
    if policy is not None:
        layer = adapter.apply_policy(layer, policy)
    return subject(layer, method, case, inputs)


def measure(
    case: Case, policy: str | None, given: str = "float32", *, inside: bool = False, **by_hand: Any
) -> Measured:
    """Traces a layer, as the model or inside of one, and says which dtypes it has."""
    told: list[Any] = []
    inputs = given_to(case, given)
    tell = told.append if inside else None
    call, _, variables = make_subject(case, policy, inputs, tell, **by_hand)
    after: list[Any] = []

    def observed(*args: Any) -> Any:
        out, new_variables = call(*args)
        after.append((out, new_variables))
        return out, new_variables

    dots = count_dots(observed, variables, *inputs)
    out, new = after[-1]
    assert dtypes(variables[2], new[2]) in ("", "float32"), "no policy is about other variables"
    returned = told[-1] if inside else out
    carry, returned = returned if case.carry else ((), returned)
    return Measured(
        params=dtypes(variables[0], new[0]),
        statistics=dtypes(variables[1], new[1]),
        dots=dots,
        output=dtypes(returned),
        carry=dtypes(carry),
        model=dtypes(out) if inside else "",
    )


def expected(case: Case, policy: str, given: str = "float32", *, inside: bool) -> Measured:
    """What `measure` is to find."""
    checked = jaxmp.get_policy(policy)
    named = functools.partial(dtype_of, checked, given=given)
    carry = case.carry[not inside] if case.carry else ""
    return Measured(
        params=named("param") if case.params else "",
        statistics="float32" if case.statistics else "",
        dots=dots_of(checked, case.dots),
        output=named(case.inside if inside else case.output),
        carry=named(carry),
        model=named("output") if inside else "",
    )


@pytest.mark.parametrize(("policy", "given"), SETTINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_as_the_model(case: Case, policy: str, given: str) -> None:
    assert measure(case, policy, given) == expected(case, policy, given, inside=False)


@pytest.mark.parametrize(("policy", "given"), SETTINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_inside_a_model(case: Case, policy: str, given: str) -> None:
    found = measure(case, policy, given, inside=True)
    assert found == expected(case, policy, given, inside=True)


def measure_gradient(case: Case, policy: str | None, **by_hand: Any) -> tuple[str, str, Any]:
    """The dtypes of the gradient by params and by inputs, and the dots that compute it."""
    subject = make_subject(case, policy, case.inputs, None, **by_hand)
    found: list[Any] = []

    def observed(*args: Any) -> Any:
        found.append(subject.gradient(*args))
        return found[-1]

    dots = count_dots(observed, subject.variables, *case.inputs)
    of_params, *of_inputs = found[-1]
    return dtypes(of_params), dtypes(of_inputs), dots


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_a_layer(case: Case) -> None:
    policy = jaxmp.get_policy("mixed_float16")
    of_params, of_inputs, dots = measure_gradient(case, "mixed_float16")
    assert of_params == ("float32" if case.params else "")
    assert of_inputs == dtypes(case.inputs)
    # In the compute dtype: those of the call itself, and as many again at least.
    assert dots.pop("float16", 0) >= 2 * case.dots.get("compute", 0)
    assert dots == dots_of(policy, case.float32_gradient)


def by_name(api: str, name: str) -> Case:
    """The first case of a class."""
    return next(case for case in CASES if (case.api, case.name) == (api, name))


CELLS = [by_name(api, name) for api in ("linen", "nnx") for name in ("LSTMCell", "GRUCell")]
DENSE = [by_name("linen", "Dense"), by_name("nnx", "Linear")]


@pytest.mark.every_case
@pytest.mark.parametrize("case", CELLS, ids=str)
def test_cells_return_their_compute_dtype(case: Case) -> None:
    """They mix in their float32 carry, and would return float32; of all layers, always run."""
    found = measure(case, "mixed_bfloat16", inside=True)
    assert found == expected(case, "mixed_bfloat16", inside=True)
    assert (found.output, found.carry) == ("bfloat16", "float32")


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_plain_layers_without_a_dtype_multiply_in_float32(case: Case) -> None:
    assert measure(case, None, "bfloat16").dots == {"float32": 1}
    assert measure_gradient(case, None) == ("float32", "float32", {"float32": 3})
    assert measure_gradient(case, None, param_dtype=jnp.float16)[0] == "float16"


def test_no_dot_is_hidden() -> None:
    @jax.custom_vjp
    def product(x: jax.Array) -> jax.Array:
        return x @ x

    product.defvjp(lambda x: (product(x), None), lambda _, g: (g,))

    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.cond(True, jax.checkpoint(jax.jit(product)), lambda x: x, x), None

    def function(x: jax.Array) -> jax.Array:
        return jax.lax.scan(body, x, None, length=2)[0]

    assert count_dots(function, jnp.ones((2, 2))) == {"float32": 1}


def filled(tree: Any, low: float, high: float) -> Any:
    """Values for what is abstract."""
    draw = np.random.default_rng(0).uniform

    def fill(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        values = draw(low, high, x.shape) if floating(x) else np.ones(x.shape)
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(fill, tree)


@functools.cache
def run(case: Case, policy: str, *, scale: float = 1.0, jit: bool = True) -> list[np.ndarray]:
    """Computes a layer inside of a model, and returns its outputs."""
    call, _, kinds = make_subject(case, policy, case.inputs, lambda out: None)
    ranges = [(-0.5, 0.5), (0.5, 1.0), (0.0, 1.0)]
    variables = [filled(kind, *ends) for kind, ends in zip(kinds, ranges, strict=True)]
    inputs = filled(case.inputs, -scale, scale)
    if jit:
        call = jax.jit(call, compiler_options=UNOPTIMISED)
    return [np.asarray(x, np.float32) for x in floating(call(variables, *inputs)[0])]


@pytest.mark.programs(60, reason="what no CPU runs under jit runs without it")
@pytest.mark.parametrize(("policy", "close"), [("bfloat16", 0.03), ("float16", 0.003)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_runs(case: Case, policy: str, close: float) -> None:
    jit = jax.default_backend() != "cpu" or policy not in case.not_on_cpus
    if not jit:
        with pytest.raises(ValueError, match="not supported by dot_general on CPU"):
            run(case, policy)
    for x, y in zip(run(case, policy, jit=jit), run(case, "float32"), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, atol=close * np.abs(y).max())


def test_the_run_sees_an_overflow() -> None:
    assert not np.isfinite(run(DENSE[0], "float16", scale=1e6)[0]).all()
    assert np.isfinite(run(DENSE[0], "bfloat16", scale=1e6)[0]).all()


def test_decoding_in_nnx_needs_a_cache_in_the_compute_dtype() -> None:
    layer = nnx.jit(lambda: nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0)))()
    x, call = np.ones((2, 1, 4), np.float32), nnx.jit(lambda layer, x: layer(x))
    layer = jaxmp.nnx.apply_policy(layer, "mixed_bfloat16")
    layer.init_cache((2, 4, 4), dtype=jnp.bfloat16)
    assert call(layer, x).dtype == jnp.float32
    layer.init_cache((2, 4, 4))
    with pytest.raises(TypeError, match="float32, bfloat16"):
        call(layer, x)


def test_every_class_has_a_case() -> None:
    exported = exported_layers(NAMESPACES)
    in_cases = {f"{case.api}.{case.name}" for case in CASES}
    assert exported == in_cases | set(WITHOUT_A_CASE), "a class of Flax that is new here, or gone"
    assert not in_cases & set(WITHOUT_A_CASE)
    newer = types.SimpleNamespace(**vars(nnx), NewLayer=NnxHost)
    assert exported_layers(NAMESPACES | {"nnx": newer}) - exported == {"nnx.NewLayer"}


def committed_lines(page: str) -> list[str]:
    table = page[page.index(TABLE) :]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return lines[:2] + [line for line in lines[2:] if not is_of_another_flax(line)]


def test_the_page_has_this_table() -> None:
    page, lines = PAGE.read_text(), table_lines(CASES)
    assert committed_lines(page) == lines, "python -m tests.flax.test_layers"
    assert committed_lines(page.replace(lines[2], "")) != lines
    assert committed_lines(page + lines[2]) != lines


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(TABLE)] + "\n".join(table_lines(CASES)) + "\n")
