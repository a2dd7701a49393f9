"""Primitives that jaxmp adds to JAX, and products made of them.

A product of 16-bit or float8 operands is an ordinary equation without a derivative, and a second
equation that has all derivatives, with gradients in float32. Arrays flow through, as
`ProductOperand`s: with the scale of their codes and the wider array they were rounded from.

- `mixed_product`: 16-bit products with float32 gradients; read it first, then `bilinear`, which
  derives the maps of the backward pass and of batches from JAX's own rules.
- `float8_product`, `float8_encode`, `float8_dot`: the same in 8 bits; the rounding; the public
  `dot_general`, and which products are left out. `block_product`: MXFP8, which rounds by itself.
- `gathering`: gathers operands over devices. `float32_sums`, `gradient_of`: other gradients.
  `open_rounding`: operands that TPUs round, and that may be sums over devices.
- `primitive_rules`, `operands`, `varying`: parts of them all. A new primitive takes what it
  shares from the first, and is listed in `_program/op_classes.py`.
"""
