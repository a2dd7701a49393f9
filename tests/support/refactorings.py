# ruff: noqa: E501
"""A train step as a text, and changes of the text: some change dtypes, and others do not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxmp

SOURCE = """
def norm(x, scale):
    with jax.named_scope("norm"):
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean((wide - mean) ** 2, axis=-1, keepdims=True)
        normal = (wide - mean) * lax.rsqrt(variance + 1e-6)
        return normal * scale.astype(jnp.float32)


def attend(x, qkv, out):
    q, k, v = jnp.split(jnp.einsum("btd,de->bte", x, qkv), 3, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k).astype(jnp.float32) * 0.125
    weights = jax.nn.softmax(scores)
    return jnp.einsum("bqk,bkd->bqd", weights, v) @ out


def block(x, w):
    with jax.named_scope("attention"):
        x = x + attend(norm(x, w["scale"]), w["qkv"], w["out"])
    with jax.named_scope("mlp"):
        h = norm(x, w["scale_mlp"])
        gate = jax.nn.silu(h @ w["gate"])
        up = h @ w["up"]
        x = x + (gate * up) @ w["down"]
    return x, None


def loss(params, batch):
    tokens, labels = batch
    with jax.named_scope("net"):
        with jax.named_scope("embed"):
            x = params["embedding"][tokens]
        x, _ = lax.scan(block, x, params["blocks"])
        with jax.named_scope("head"):
            logits = norm(x, params["scale"]) @ params["embedding"].T
            logits = logits.astype(jnp.float32)
            total = jax.nn.logsumexp(logits, axis=-1)
            right = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
            return jnp.mean(total - right)


def make(layers, width, batch, length, classes):
    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)
    blocks = {
        "scale": array(layers, width), "qkv": array(layers, width, 3 * width),
        "out": array(layers, width, width), "scale_mlp": array(layers, width),
        "gate": array(layers, width, 2 * width), "up": array(layers, width, 2 * width),
        "down": array(layers, 2 * width, width),
    }
    params = {
        "embedding": array(classes, width), "blocks": blocks, "scale": array(width),
    }
    ids = array(batch, length, dtype=jnp.int32)
    return loss, params, (ids, ids)
"""
SIZES = {"layers": 2, "width": 32, "batch": 4, "length": 16, "classes": 64}


class Change(NamedTuple):
    """A change of the text, by what is replaced with what, and of the sizes."""

    name: str
    replaced: tuple[tuple[str, str], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()


def changed(name: str, *replaced: tuple[str, str], **sizes: int) -> Change:
    return Change(name, replaced, tuple(sizes.items()))


_NORM_OF_BLOCK = 'x = x + attend(norm(x, w["scale"]), w["qkv"], w["out"])'
_MLP = """        gate = jax.nn.silu(h @ w["gate"])
        up = h @ w["up"]
        x = x + (gate * up) @ w["down"]
"""
_JITTED = """@jax.jit
def feed(h, w):
    return (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def block("""
NONE = Change("")
# None of these changes a dtype.
REFACTORINGS = (
    changed("root scope renamed", ('named_scope("net")', 'named_scope("Model")')),
    changed("all scopes renamed", ('scope("attention")', 'scope("mixer")'), ('scope("mlp")', 'scope("ffn")'), ('scope("head")', 'scope("lm_head")')),
    changed("one scope renamed", ('scope("norm")', 'scope("layer_norm")')),
    changed("params renamed", ('"qkv"', '"in_proj"'), ('"scale_mlp"', '"a_scale"'), ('"embedding"', '"wte"')),
    changed("functions renamed", ("attend(", "mix_tokens("), ("block", "layer"), ("norm(x", "rms(x")),
    changed("functions moved", ("\ndef norm(", "\n\n\n# moved here\n\n\ndef norm(")),
    changed("lines in another order", (_MLP.splitlines(True)[0] + _MLP.splitlines(True)[1], _MLP.splitlines(True)[1] + _MLP.splitlines(True)[0])),
    changed("another order in the head", ("            total = jax.nn.logsumexp(logits, axis=-1)\n", ""), ("            return jnp.mean(total", "            total = jax.nn.logsumexp(logits, axis=-1)\n            return jnp.mean(total")),
    changed("larger batch", batch=8),
    changed("longer sequences", length=32),
    changed("more layers in the scan", layers=6),
    changed("another width and vocabulary", width=64, classes=128),
    changed("norm jitted", ("def norm(", "@jax.jit\ndef norm(")),
    changed("attention jitted", ("def attend(", "@jax.jit\ndef attend(")),
    changed("block jitted", ("def block(", "@jax.jit\ndef block(")),
    changed("mlp extracted and jitted", (_MLP, '        x = x + feed(h, w)\n'), ("def block(", _JITTED)),
    changed("mlp extracted", (_MLP, '        x = x + feed(h, w)\n'), ("def block(", _JITTED.removeprefix("@jax.jit\n"))),
    changed("loss jitted", ("def loss(", "@jax.jit\ndef loss(")),
    changed("arguments in another order", ("def attend(x, qkv, out)", "def attend(qkv, out, x)"), (_NORM_OF_BLOCK, 'x = x + attend(w["qkv"], w["out"], norm(x, w["scale"]))')),
    changed("letters of an einsum", ("bqk,bkd->bqd", "bij,bjd->bid")),
    changed("a product as an operator", ('jnp.einsum("btd,de->bte", x, qkv)', "x @ qkv")),
    changed("operands of a sum exchanged", ("x = x + (gate * up)", "x = (gate * up)"), ('@ w["down"]', '@ w["down"] + x')),
    changed("factors exchanged", ("gate * up", "up * gate")),
    changed("labels and tokens exchanged", ("tokens, labels = batch", "labels, tokens = batch")),
)  # fmt: skip
# Each of these changes what runs in which dtype; the name begins with the module that says so.
CHANGES = (
    changed("attention: softmax", ("jax.nn.softmax(scores)", "jax.nn.softmax(scores.astype(jnp.bfloat16))")),
    changed("attention: scores", ("q, k).astype(jnp.float32)", "q, k, preferred_element_type=jnp.float32)")),
    changed("attention: precision", ('"bqd,bkd->bqk", q, k)', '"bqd,bkd->bqk", q.astype(jnp.float32), k.astype(jnp.float32), precision="highest")')),
    changed("norm: statistics", ("wide = x.astype(jnp.float32)", "wide = x.astype(jnp.bfloat16)"), ("* scale.astype(jnp.float32)", "* scale.astype(jnp.bfloat16)")),
    changed("norm: rounded", ("return normal * ", "return lax.reduce_precision(normal, 8, 7) * ")),
    changed("norm: rounded and widened", ("return normal * ", "return normal.astype(jnp.bfloat16).astype(jnp.float32) * ")),
    changed("mlp: gate", ('jax.nn.silu(h @ w["gate"])', 'jax.nn.silu((h @ w["gate"]).astype(jnp.float32))')),
    changed("head: logits", ("logits = logits.astype(jnp.float32)", "logits = logits.astype(jnp.float8_e5m2).astype(jnp.float32)")),
    changed("head: mean", ("return jnp.mean(total - right)", "return jnp.mean((total - right).astype(jnp.bfloat16)).astype(jnp.float32)")),
    changed("head: float16", ("logits = logits.astype(jnp.float32)", "logits = logits.astype(jnp.float16).astype(jnp.float32)")),
    changed("embed: rounded", ('params["embedding"][tokens]', 'params["embedding"][tokens].astype(jnp.float8_e4m3fn).astype(jnp.float32)')),
)  # fmt: skip


def built(change: Change = NONE, file: str = "net.py") -> tuple[Any, Any, Any]:
    """The loss, the params and the batch of the text with a change.

    Raises:
      ValueError: if the text has not what a change replaces.
    """
    source = SOURCE
    for old, new in change.replaced:
        if old not in source:
            raise ValueError(f"{change.name}: the text has no {old!r}")
        source = source.replace(old, new)
    namespace: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": jax.lax}
    exec(compile(source, file, "exec"), namespace)
    return namespace["make"](**SIZES | dict(change.sizes))


def gradient(policy: str, change: Change = NONE, file: str = "net.py") -> Any:
    """The audit of the gradient of a loss under autocast."""
    loss, params, batch = built(change, file)
    return jaxmp.audit(jax.value_and_grad(jaxmp.autocast(loss, policy)), params, batch)


def train_step(change: Change = NONE, file: str = "net.py", **options: Any) -> Any:
    """The audit of a train step with master params."""
    loss, params, batch = built(change, file)
    policy = options.pop("policy", "mixed_bfloat16")
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), policy, **options)
    state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), params)
    return jaxmp.audit(jaxmp.make_train_step(loss), state, batch)
