"""`assert_reduced_in` where a program sums activations over devices, too."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jaxmp
from tests.support.collective_programs import array

BF16, F32 = jnp.bfloat16, jnp.float32


def mesh_of(*sizes: int) -> Any:
    return jax.make_mesh(
        sizes, ("data", "model")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes)
    )


def graph(w: Any, nodes: Any, source: Any, target: Any) -> Any:
    """Edges are split over devices: messages are added up over them, forward and backward."""
    with jax.named_scope("aggregate"):
        messages = (nodes @ w).astype(BF16)[source]
        got = jax.ops.segment_sum(messages, target, num_segments=64)
    return jnp.mean(jnp.tanh(got.astype(F32) @ w) ** 2)


def layers(params: Any, x: Any) -> Any:
    """Tensor parallelism: partial sums over `model`, backward as well; gradients in bfloat16."""
    for up, down in params:
        x = jax.nn.relu(x.astype(BF16) @ up.astype(BF16)) @ down.astype(BF16)
    return jnp.mean(x.astype(F32) ** 2)


def fused(w: Any, x: Any) -> Any:
    """A loss that computes its gradients in the forward pass, as fused losses do."""

    @jax.custom_vjp
    def loss(w: Any, x: Any) -> Any:
        return forward(w, x)[0]

    def forward(w: Any, x: Any) -> Any:
        y = x.astype(BF16) @ w.astype(BF16)
        return jnp.sum(y.astype(F32) ** 2), (x.T.astype(BF16) @ y).astype(F32)

    loss.defvjp(forward, lambda dw, g: (2 * g * dw, None))
    return loss(w, x)


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(jaxmp.AuditError) as caught:
        jaxmp.assert_reduced_in(*args, **kwargs)
    return str(caught.value)


def graph_arguments() -> tuple[Any, ...]:
    mesh = mesh_of(8)
    edges = array(mesh, (512,), "data", dtype=jnp.int32)
    return array(mesh, (16, 16)), array(mesh, (64, 16)), edges, edges


@pytest.mark.parametrize(
    "names",
    ["aggregate", ["graph"], ("test_collectives_activations.py",), "scatter-add", ("agg*", "none")],
)
def test_sums_of_a_graph_can_be_named(names: Any) -> None:
    fn, args = jax.value_and_grad(graph), graph_arguments()
    told = message(fn, F32, *args)
    assert "bfloat16  all-reduce over data" in told
    assert "A program does not say which sums are of activations" in told
    assert "activations=('a scope, module, function, file, primitive, or pass',)" in told
    # All sums of this program are of nodes: nothing else is left to look at.
    assert "so this check sees nothing" in message(fn, F32, *args, activations=names)


def with_gradients(w: Any, nodes: Any, source: Any, target: Any) -> Any:
    """The same, with weights that multiply what is split: their gradients are summed in float32."""
    scores = jnp.tanh(nodes[source] @ w)
    return graph(w, nodes, source, target) + jnp.mean(scores)


def test_what_is_not_named_is_checked_still() -> None:
    fn, args = jax.value_and_grad(with_gradients), graph_arguments()
    assert "bfloat16" in message(fn, F32, *args)
    jaxmp.assert_reduced_in(fn, F32, *args, activations="aggregate")
    low = jax.value_and_grad(lambda w, *rest: with_gradients(w.astype(BF16).astype(F32), *rest))
    jaxmp.assert_reduced_in(low, F32, *args, activations="aggregate")

    def narrow(w: Any, nodes: Any, source: Any, target: Any) -> Any:
        scores = jnp.tanh(nodes.astype(BF16)[source] @ w.astype(BF16))  # narrow
        return graph(w, nodes, source, target) + jnp.mean(scores.astype(F32))

    told = message(jax.value_and_grad(narrow), F32, *args, activations="aggregate")
    assert "narrow), backward" in told
    assert "(graph)" not in told


def test_partial_sums_of_tensor_parallelism_are_those_of_another_axis() -> None:
    mesh = mesh_of(4, 2)
    pair = array(mesh, (16, 32), None, "model"), array(mesh, (32, 16), "model")
    args = (pair, pair), array(mesh, (64, 16), "data")
    told = message(jax.grad(layers), F32, *args, activations="forward")
    assert "forward" not in told.partition("A program does not say")[0]
    assert "over model" in told  # in the backward pass
    assert "over model" not in message(jax.grad(layers), F32, *args, axis="data")


def test_gradients_in_a_forward_pass_are_seen() -> None:
    """Why sums of the forward pass are not left out unless somebody says so."""
    mesh = mesh_of(8)
    args = array(mesh, (16, 32)), array(mesh, (64, 16), "data")
    assert "fused.forward), forward" in message(jax.grad(fused), F32, *args)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("activations", [True, 3, (1,), None])
def test_names_are_names(activations: Any) -> None:
    with pytest.raises(TypeError, match=r"activations are names of scopes, .* got"):
        jaxmp.assert_reduced_in("ENTRY", F32, activations=activations)
