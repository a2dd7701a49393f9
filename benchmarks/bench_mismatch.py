"""The gap between a sampler and a trainer in the log-probabilities of the same tokens.

The GPT of `examples/language_model.py` learns Python's own manual. Then held-out text is scored
twice with the same params: by the trainer, all tokens of a sequence at once, and by a sampler,
token by token with a cache of keys and values. In exact arithmetic both are one function. verl's
issue 6280 has such a table for models on GPUs, where float16 leaves 0.00 to 0.47 % of tokens
outside of the band and bfloat16 8 to 34 %.

    python benchmarks/bench_mismatch.py
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from measurement import RESULTS, Column, Report, Row

import jaxmp
import jaxmp.nnx
from jaxmp.diagnostics import log_prob_gap

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import language_model as lm

# What the layers compute in, and what the logits do.
_WAYS = (
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("float16", "float32"),
    ("float32", "float32"),
)
_BAND = (0.99, 1.01)

_COLUMNS = (
    Column("compute", "layers"),
    Column("logits", "logits"),
    Column("rms", "rms, nats", ".1e"),
    Column("largest", "largest, nats", ".1e"),
    Column("outside", "ratio off by over 1 %", ".2%"),
    Column("k3", "KL (k3)", ".1e"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    corpus = lm.Corpus.load()
    size = lm.Size(vocab=corpus.vocab_size, context=args.context, layers=args.layers,
                   width=args.width, heads=4)  # fmt: skip
    params, loss = _trained(corpus, size, args)
    tokens = corpus.validation(windows=args.windows, context=args.context)
    rows: list[Row] = []
    for compute, logits in _WAYS:
        model = _under(size, params, compute, logits)
        gap = log_prob_gap(_by_trainer(model, tokens), _by_sampler(model, tokens), band=_BAND)
        found = {name: getattr(gap, name) for name in ("rms", "mean", "largest", "outside", "k3")}
        rows.append({"compute": compute, "logits": logits, **found, "tokens": gap.tokens})
        print(rows[-1], file=sys.stderr, flush=True)
    report = Report(
        name="mismatch",
        title="Log-probabilities of a trainer and of a sampler, by precision",
        command=" ".join(["python benchmarks/bench_mismatch.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=[
            f"A GPT of {args.layers} layers of width {args.width}, {args.steps} steps on Python's "
            f"manual, to a validation loss of {loss:.2f} nats a character; {rows[0]['tokens']:,} "
            "tokens of text that it was not trained on.",
            "Trainer: whole sequences. Sampler: token by token, keys and values cached in the "
            "dtype of the layers. The same params; norms in float32.",
            "Logits in float32: the product of the head, as rule for `head`.",
        ],
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sampler and trainer by precision.")
    add = parser.add_argument
    add("--steps", type=int, default=400)
    add("--width", type=int, default=96)
    add("--layers", type=int, default=4)
    add("--context", type=int, default=64)
    add("--batch", type=int, default=16)
    add("--windows", type=int, default=64)
    add("--lr", type=float, default=3e-3)
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    return parser.parse_args(argv)


def _trained(corpus: lm.Corpus, size: lm.Size, args: argparse.Namespace) -> tuple[Any, float]:
    graphdef, params = nnx.split(lm.GPT(size, nnx.Rngs(0)), nnx.Param)
    loss_fn = lm.make_loss(graphdef)
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 10, args.steps, 1e-5)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99))
    tx = jaxmp.mixed_precision(inner, "float32")
    state = jaxmp.TrainState.create(params=params, tx=tx)
    step = jaxmp.make_train_step(loss_fn, "none")
    for i in range(args.steps):
        state, _ = step(state, corpus.batch(0, i, size=args.batch, context=args.context))
    windows = corpus.validation(windows=args.windows, context=args.context)
    return state.params, float(jax.jit(loss_fn)(state.params, windows))


def _under(size: lm.Size, params: Any, compute: str, logits: str) -> lm.GPT:
    """The model with these params, its layers and its logits in these dtypes."""
    model = lm.GPT(size, nnx.Rngs(0))
    nnx.update(model, params)

    def policy(dtype: str) -> str:
        return f"params=float32,compute={dtype},output=float32"

    norms = f"params=float32,compute=float32,output={compute}"
    rules = jaxmp.PolicyRules({"*norm*": norms, "head": policy(logits)}, default=policy(compute))
    return jaxmp.nnx.apply_policy(model, rules)


def _chosen(logits: Any, targets: Any) -> Any:
    """The log-probabilities of the targets, in float32 from logits of any dtype."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]


def _by_trainer(model: lm.GPT, tokens: Any) -> Any:
    graphdef, params = nnx.split(model)

    @jax.jit
    def score(params: Any, tokens: Any) -> Any:
        return _chosen(nnx.merge(graphdef, params)(tokens[:, :-1]), tokens[:, 1:])

    return np.asarray(score(params, tokens))


def _by_sampler(model: lm.GPT, tokens: Any) -> Any:
    graphdef, params = nnx.split(model)

    @jax.jit
    def step(params: Any, cache: Any, place: Any, tokens: Any) -> Any:
        logits, cache = _next(nnx.merge(graphdef, params), cache, place, tokens[:, place])
        return _chosen(logits, tokens[:, place + 1]), cache

    cache, found = _empty_cache(model, tokens), []
    for place in range(tokens.shape[1] - 1):
        scores, cache = step(params, cache, jnp.int32(place), tokens)
        found.append(scores)
    return np.stack(found, 1)


def _empty_cache(model: lm.GPT, tokens: Any) -> list[Any]:
    """Keys and values of each block, (2, B, T, D)."""
    width = model.head.in_features
    dtype = model.blocks[0].query_key_value.dtype
    return [jnp.zeros((2, tokens.shape[0], tokens.shape[1], width), dtype) for _ in model.blocks]


def _next(model: lm.GPT, cache: list[Any], place: Any, ids: Any) -> tuple[Any, list[Any]]:
    """The logits after one more token of each sequence, and the cache with it: `GPT.__call__`."""
    x = model.tokens(ids[:, None]) + model.positions(place[None, None])  # (B, 1, D)
    new = []
    for block, kept in zip(model.blocks, cache, strict=True):
        mixed, kept = _attention(block, kept, place, block.attention_norm(x))
        x = x + mixed
        x = x + block.mlp_out(jax.nn.gelu(block.mlp_in(block.mlp_norm(x))))
        new.append(kept)
    return model.head(model.norm(x))[:, 0], new


def _attention(block: lm.Block, cache: Any, place: Any, x: Any) -> tuple[Any, Any]:
    """`Block.attention` of one token, to those in the cache."""
    b, _, d = x.shape
    size = d // block.heads
    q, k, v = jnp.split(block.query_key_value(x), 3, -1)  # (B, 1, D) each
    cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v]), (0, 0, place, 0))
    keys, values = (y.reshape(b, -1, block.heads, size) for y in cache)
    q = q.reshape(b, 1, block.heads, size) * jnp.asarray(size**-0.5, q.dtype)
    scores = jnp.einsum("bthd,bshd->bhts", q, keys).astype(jnp.float32)
    past = jnp.arange(keys.shape[1]) <= place
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf)).astype(values.dtype)
    mixed = jnp.einsum("bhts,bshd->bthd", weights, values).reshape(b, 1, d)
    return block.attention_out(mixed), cache


if __name__ == "__main__":
    main()
