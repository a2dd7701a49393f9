"""Checks that a language model trains in float8 and int8, and that a failure would show.

The benchmark trains the GPT of `examples/train_lm.py` on Python's own manual. Its losses hardly
distinguish one recipe from another. So two changes are planted, each an identity in exact
arithmetic, and gradients are compared, which show at the first step what losses hide:

- an outlier: at the first position of each sequence, the input of the last product of a block is
  2**20 times as large, and its output is divided again;
- a million tokens: the loss is multiplied by 2**-10, as the mean over 1,024 times as many tokens
  multiplies the derivatives of each, and gradients are divided again.

The controls that must fail are float8 and int8 without scales: clipped to the range of the format,
and cast. Float8 trains with a loss 1,024 times as large: its derivatives underflow without.

    python benchmarks/bench_float8.py
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from measurement import RESULTS, Column, Report, Row

import jaxmp
from jaxmp._primitives import block_product

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import language_model as lm

_UNSCALED, _UNSCALED_INT8 = "no scales", "int8, no scales"
_RECIPES = ("tensorwise", "rowwise", "rowwise_hp", "int8", "int8:granularity=row", "mxfp8")
_PRODUCTS = ("float32", "bfloat16", *_RECIPES, _UNSCALED)
_TRAINED = ("float32", "bfloat16", "tensorwise", "int8", "mxfp8")
# The formats of the controls: for activations and weights, and for derivatives.
_UNSCALED_FORMATS = {
    _UNSCALED: ("float8_e4m3fn", "float8_e5m2"),
    _UNSCALED_INT8: ("int8", "int8"),
}
_OUTLIER, _WEIGHT = 2.0**20, 2.0**-10
# The factor of the outlier and the weight of the loss, by what the table calls them.
_CASES = {
    "gradients": (1.0, 1.0),
    "gradients, an outlier": (_OUTLIER, 1.0),
    "gradients, a million tokens": (1.0, _WEIGHT),
}
_LAST = 50  # steps over which the train loss is averaged

_COLUMNS = (
    Column("case", "case"),
    Column("products", "products"),
    Column("norm", "gradient norm", ".4f"),
    Column("norm_gap", "from bfloat16, %", "+.1f"),
    Column("error", "error of gradients, %", ".1f"),
    Column("train", "train loss", ".4f"),
    Column("valid", "validation", ".4f"),
    Column("valid_spread", "over seeds, +-", ".4f"),
    Column("valid_gap", "from float32, %", "+.2f"),
    Column("seeds", "seeds", "d"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    # A CPU decodes the blocks of MXFP8, which costs time alone. Users get an error there.
    block_product.check_device = lambda ctx: None
    rows = _gradient_rows(args) + _training_rows(args)
    report = Report(
        name="float8",
        title="A language model in 8 bits: gradients of the first step, and losses",
        command=" ".join(["python benchmarks/bench_float8.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=[
            f"A GPT, layers: {args.layers}, width {args.width}, {args.batch} x {args.context} "
            f"characters in a batch; {args.steps} steps, AdamW with b2 = 0.99, a cosine schedule "
            f"from {args.lr:g}, gradients clipped at 1.",
            "Gradients: mean over the seeds of the norm, and of the distance to float32's.",
            f"Losses: means over the seeds; train: over the last {_LAST} steps too. Each seed has "
            "its own params and batches, the same ones under all products, and is compared with "
            "float32's of these seeds. Validation runs in the products of the training. The spread "
            "is a standard deviation.",
            "Heads are left out of 8 bits, and so is attention between activations.",
            f"{_UNSCALED!r}: operands clipped to the range of e4m3fn and cast, derivatives of "
            "e5m2, in the same products; int8 likewise, rounded to integers.",
            "On a CPU, codes are those of any device; order and width of sums are not.",
        ],
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A language model in 8 bits.")
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model and a few steps, for tests")
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=500)
    add("--width", type=int, default=96)
    add("--layers", type=int, default=4)
    add("--context", type=int, default=64)
    add("--batch", type=int, default=16)
    add("--lr", type=float, default=3e-3)
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.steps, args.width, args.layers, args.context = 2, 40, 32, 1, 32
    return args


# --------------------------------------------------------------------------------------- model


def _policy(products: str) -> jaxmp.Policy:
    """The policy for a name of this table; small products are in 8 bits on a GPU, too."""
    if products == "float32":
        return jaxmp.get_policy("float32")
    recipe = f"{products}:minimum=none" if products in _RECIPES else None
    return jaxmp.get_policy("mixed_bfloat16").with_products(recipe)


def _model(seed: int, args: argparse.Namespace) -> tuple[Any, Any]:
    """The graph and the float32 params of a model; nothing is cast yet."""
    size = lm.Size(vocab=_corpus().vocab_size, context=args.context, layers=args.layers,
                   width=args.width, heads=4)  # fmt: skip
    return nnx.split(lm.GPT(size, nnx.Rngs(seed)), nnx.Param)


def _make_loss(products: str, args: argparse.Namespace) -> Callable[..., Any]:
    """The loss of the example under autocast, with an outlier if one is given."""
    graphdef, _ = _model(0, args)
    product: Callable[..., Any] = jax.lax.dot_general
    if products in _UNSCALED_FORMATS:
        product = functools.partial(_unscaled, _UNSCALED_FORMATS[products])

    def loss_fn(params: Any, tokens: Any, outlier: Any = None) -> Any:
        model = nnx.merge(graphdef, params)
        for block in model.blocks:
            for layer in (block.query_key_value, block.attention_out, block.mlp_in):
                layer.dot_general = product
            block.mlp_out.dot_general = _planted(product, outlier)
        return lm.make_loss(nnx.graphdef(model))(params, tokens)

    return jaxmp.autocast(loss_fn, _policy(products))


def _planted(product: Callable[..., Any], outlier: Any) -> Callable[..., Any]:
    """A product whose left operand is larger at the first position, and whose result is not."""
    if outlier is None:
        return product

    def planted(x: Any, w: Any, dimensions: Any, **options: Any) -> Any:
        # A power of two: multiplying and dividing by it rounds nothing.
        first = jnp.arange(x.shape[1])[:, None] == 0
        factor = jnp.where(first, outlier, 1.0).astype(x.dtype)
        return product(x * factor, w, dimensions, **options) / factor

    return planted


def _unscaled(formats: tuple[str, str], x: Any, w: Any, dimensions: Any, **options: Any) -> Any:
    """The product of a layer in 8 bits without scales; in place of `jax.lax.dot_general`."""
    del dimensions, options
    return _unscaled_product(formats, x, w)


# Integers are multiplied as float32: autocast need not warn of it.
_times = jaxmp.full_precision(
    functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unscaled_product(formats: tuple[str, str], x: Any, w: Any) -> Any:
    return _unscaled_forward(formats, x, w)[0]


def _unscaled_forward(formats: tuple[str, str], x: Any, w: Any) -> tuple[Any, Any]:
    codes = _clipped(x, formats[0]), _clipped(w, formats[0])
    out = _times(*codes, (((x.ndim - 1,), (0,)), ((), ())))
    return out.astype(x.dtype), (codes, jnp.zeros(0, x.dtype), jnp.zeros(0, w.dtype))


def _unscaled_backward(formats: tuple[str, str], kept: Any, g: Any) -> tuple[Any, Any]:
    (x, w), like_x, like_w = kept
    rows, g = x.reshape(-1, x.shape[-1]), _clipped(g, formats[1])
    flat = g.reshape(-1, g.shape[-1])
    dx = _times(flat, w, (((1,), (1,)), ((), ()))).reshape(x.shape)
    dw = _times(rows, flat, (((0,), (0,)), ((), ())))
    return dx.astype(like_x.dtype), dw.astype(like_w.dtype)


_unscaled_product.defvjp(_unscaled_forward, _unscaled_backward)


def _clipped(x: Any, dtype: str) -> Any:
    x = x.astype(jnp.float32)
    if dtype == "int8":
        return jnp.clip(jnp.round(x), -127, 127)  # as float32: products are exact
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


@functools.cache
def _corpus() -> lm.Corpus:
    return lm.Corpus.load()


# ----------------------------------------------------------------------------------- gradients


def _gradient_rows(args: argparse.Namespace) -> list[Row]:
    """A row for each case and product: norms of gradients, and their distance to float32's."""
    rows: dict[tuple[str, str], Row] = {}
    exact = _gradients("float32", args)["gradients"]
    for products in _PRODUCTS:
        for case, found in _gradients(products, args).items():
            norms = np.linalg.norm(found, axis=1)
            errors = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
            rows[case, products] = {
                "case": case,
                "products": products,
                "norm": float(norms.mean()),
                "norm_of_seeds": norms.tolist(),
                "error": 100 * float(errors.mean()),
            }
            print(rows[case, products], file=sys.stderr, flush=True)
    for (case, _), row in rows.items():
        row["norm_gap"] = 100 * (row["norm"] / rows[case, "bfloat16"]["norm"] - 1)
    return [rows[case, products] for case in _CASES for products in _PRODUCTS]


def _gradients(products: str, args: argparse.Namespace) -> dict[str, Any]:
    """The gradients of the first step by case: one after another, in a row for each seed."""
    loss_fn = _make_loss(products, args)

    @jax.jit
    def grad(params: Any, tokens: Any, outlier: Any, weight: Any) -> Any:
        return jax.vjp(lambda params: loss_fn(params, tokens, outlier), params)[1](weight)

    found = {}
    for case, (outlier, weight) in _CASES.items():
        rows = []
        for seed in range(args.seeds):
            params = _model(seed, args)[1]
            tokens = _corpus().batch(seed, 1, size=args.batch, context=args.context)
            leaves = jax.tree.leaves(
                grad(params, tokens, jnp.float32(outlier), jnp.float32(weight))
            )
            rows.append(np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(np.float64))
        found[case] = np.stack(rows) / weight
    return found


# ------------------------------------------------------------------------------------ training


def _training_rows(args: argparse.Namespace) -> list[Row]:
    """Losses of each product over the seeds, and of the control, of one seed."""
    cases = [("training", products, 1.0, args.seeds) for products in _TRAINED]
    cases += [
        ("training", _UNSCALED, 1.0, 1),
        ("training", _UNSCALED_INT8, 1.0, 1),
        ("training, a million tokens", "tensorwise", _WEIGHT, 1),
        ("training, a million tokens", _UNSCALED, _WEIGHT, 1),
        ("training, 1,024 times the loss", _UNSCALED, 1 / _WEIGHT, 1),
    ]
    rows = [_trained(*case, args) for case in cases]
    base = np.array(rows[0]["valid_of_seeds"])
    for row in rows:
        valid = np.array(row["valid_of_seeds"])
        row["valid_gap"] = 100 * float(valid.mean() / base[: len(valid)].mean() - 1)
    return rows


def _trained(case: str, products: str, weight: float, seeds: int, args: argparse.Namespace) -> Row:
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 10, args.steps + 1)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99))
    # The scale multiplies the loss, and divides gradients before anything reads them.
    scale = jaxmp.StaticLossScale(weight)
    tx = jaxmp.mixed_precision(inner, _policy(products), loss_scale=scale)
    loss_fn = _make_loss(products, args)
    step = jaxmp.make_train_step(loss_fn, "none")

    def one(state: Any, batch: Any) -> Any:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    several = jax.jit(functools.partial(jax.lax.scan, one), donate_argnums=0)
    evaluate = jax.jit(loss_fn)
    curves, valid = [], []
    for seed in range(seeds):
        params = _model(seed, args)[1]
        state = jaxmp.TrainState.create(params=params, tx=tx)
        losses = []
        for batches in _batches(seed, args):
            state, loss = several(state, batches)
            losses.append(loss)
        curves.append(np.concatenate(losses))
        windows = _corpus().validation(windows=128, context=args.context)
        valid.append(float(evaluate(state.params, windows)))
        print(case, products, seed, curves[-1][-_LAST:].mean(), valid[-1], file=sys.stderr)
    return _loss_row(case, products, np.stack(curves), valid)


def _batches(seed: int, args: argparse.Namespace) -> Any:
    """Those of the example, as many at a time as one call runs."""
    for start in range(0, args.steps, _LAST):
        several = range(start, min(start + _LAST, args.steps))
        batch = functools.partial(_corpus().batch, seed, size=args.batch, context=args.context)
        yield np.stack([batch(i + 1) for i in several])


def _loss_row(case: str, products: str, curves: Any, valid: list[float]) -> Row:
    whole = curves.shape[1] // 10 * 10
    return {
        "case": case,
        "products": products,
        "train": float(curves[:, -_LAST:].mean()),
        "valid": float(np.mean(valid)),
        "valid_spread": float(np.std(valid, ddof=1)) if len(valid) > 1 else None,
        "valid_of_seeds": valid,
        "seeds": len(valid),
        "curve": curves.mean(0)[:whole].reshape(-1, 10).mean(1).tolist(),  # by ten steps
    }


if __name__ == "__main__":
    main()
