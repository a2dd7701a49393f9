"""Tables of JAX's operations: the precision of each, the cost to run it twice, and sets.

Every primitive of JAX is listed here; a test names the primitives that a new JAX adds. The classes
are those of `torch.autocast` on CUDA, but for what docs/from/torch_amp.md explains. No other file
of the package has sets of primitives; a test checks that too.
"""

import enum


class OpClass(enum.Enum):
    """The treatment of an operation by autocast."""

    LOWER = "runs in the compute dtype: matrix products and convolutions"
    FLOAT32 = "runs in float32, and its result is high: overflows or cancels in 16 bits"
    SUM = "makes one number of many, in float32: sums, products, extremes, collective sums"
    RANGE = "leaves the range of float16: float32 there, else follows its operands"
    PROMOTE = "follows its operands: their strengths decide"
    MOVE = "moves data: its result has the dtype of its operand"
    UPDATE = "writes into an array: has its dtype, float32 if it adds, and fills zeros of any"
    CONTROL = "contains programs, which are treated in turn"
    ALONE = "left as it was traced: exact bits, linear algebra, kernels, callbacks"


# Names that stand in more than one list below.
_COLLECTIVE_SUMS = (
    "psum psum2 psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter"
)
_TRANSFERS = (
    "all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute "
    "pbroadcast pbroadcast_dynamic unreduced_pmax unreduced_pmin pmax pmin"
)
_REDUCED_CASTS = (
    "preduced reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p"
)
_PLACEMENTS = (
    "sharding_constraint layout_constraint relayout reshard mesh_cast device_put "
    "with_memory_space_constraint"
)
_SPECIAL_FUNCTIONS = (
    "lgamma digamma polygamma igamma igammac igamma_grad_a random_gamma_grad zeta "
    "bessel_i0e bessel_i1e regularized_incomplete_beta"
)
_LINEAR_ALGEBRA = (
    "cholesky cholesky_update eig eigh hessenberg householder_product lu qr ormqr geqrf geqp3 "
    "schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve"
)
_SCALED_PRODUCTS = "scaled_dot scaled_matmul scaled_matmul_wrapper"
_WITH_FUNCTIONS = (
    "linear_call custom_lin call_hi_primitive composite pallas_call mpmd_map ffi_call "
    "run_state run_scoped core_map custom_partitioning masked_load masked_swap "
    "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper"
)
_OUTSIDE = (
    "debug_callback debug_print pure_callback io_callback inspect_sharding infeed outfeed "
    "check xla_metadata_call xla_metadata_value"
)
_IN_PLACE = (
    "get swap addupdate accum_grad_in_ref new_ref empty_ref free_ref freeze get_global box_get "
    "box_set get_variable set_variable new_variable host_local_array_to_global_array "
    "global_array_to_host_local_array new_box new_log log_extend log_read create_token "
    "after_all dce_sink"
)
# A comment before each line gives the reason.
_TABLE: dict[OpClass, tuple[str, ...]] = {
    OpClass.LOWER: (
        # Tensor cores multiply 16-bit numbers exactly and add in float32.
        "dot_general conv_general_dilated ragged_dot ragged_dot_general",
    ),
    OpClass.FLOAT32: (
        # The exponent grows: exp overflows float16 at 11.1, and log(sum(exp)) cancels.
        "exp exp2 expm1 log log1p log2 log10 pow cbrt rsqrt sinh cosh tan",
        # They read the last bits of phases and coordinates.
        "sin cos floor ceil round",
        # Their slopes are unbounded near the ends of their domain.
        "asin acos erf_inv",
        # Special functions: sums of many terms.
        _SPECIAL_FUNCTIONS,
        # The error of a running sum grows with its length.
        "cumsum cumprod cumlogsumexp",
        # A remainder cancels.
        "rem polynomial one_minus_square",
    ),
    OpClass.SUM: (
        # 16-bit sums stick: 256 + 1 is 256 in bfloat16.
        "reduce_sum reduce_prod reduce_window_sum",
        # A sum of exponentials is taken relative to the largest.
        "reduce_max reduce_min",
        # Over devices too.
        _COLLECTIVE_SUMS,
    ),
    # Squares leave the range of float16 at 256.
    OpClass.RANGE: ("integer_pow square",),
    OpClass.PROMOTE: (
        # The error of one such operation is about that of its operands.
        "add sub mul div neg add_any",
        "max min abs sign clamp select_n",
        "sqrt tanh logistic erf erfc atan atan2 asinh acosh atanh",
        # They round nothing: comparisons, and operands side by side.
        "eq ne lt le gt ge eq_to lt_to le_to is_finite",
        "concatenate pad stack tie",
    ),
    OpClass.MOVE: (
        # They round nothing.
        "reshape transpose squeeze expand_dims broadcast_in_dim rev slice dynamic_slice gather "
        "split unstack tile copy copy_p stop_gradient optimization_barrier name stage",
        "argmax argmin cummax cummin reduce_window_max reduce_window_min sort top_k",
        # Collectives send 16 bits. A value is widened after it was sent.
        *(_PLACEMENTS, _TRANSFERS, _REDUCED_CASTS, "pvary pcast"),
    ),
    OpClass.UPDATE: (
        "dynamic_update_slice scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max",
    ),
    OpClass.CONTROL: (
        "jit pjit closed_call core_call call scan while cond remat2 checkpoint remat_opt "
        "custom_jvp_call custom_vjp_call custom_vmap_call shard_map eval_jaxpr",
    ),
    OpClass.ALONE: (
        # Used for their exact bits.
        "bitcast_convert_type reduce_precision nextafter iota empty empty2 random_bits random_seed "
        "random_split random_fold_in random_wrap random_unwrap random_clone random_gamma "
        "rng_bit_generator rng_uniform threefry2x32 to_edtype from_edtype",
        # Integers and logic.
        "and or xor not shift_left shift_right_logical shift_right_arithmetic population_count clz "
        "mulhi reduce_and reduce_or reduce_xor reduce_and_p",
        # Complex numbers and transforms.
        "complex real imag conj fft",
        # Linear algebra: backward-stable only in full precision.
        *(_LINEAR_ALGEBRA, "lu_pivots_to_permutation custom_linear_solve linear_solve"),
        # They contain functions, which no table can know.
        "reduce reduce_window select_and_scatter select_and_scatter_add select_and_gather_add "
        "approx_top_k",
        *(_WITH_FUNCTIONS, _SCALED_PRODUCTS),
        # Primitives that jaxmp itself adds.
        "float32_gradient gradient_of low_precision_product held tied at_label open_rounding "
        "float8_encode float8_scale_back mxfp8_encode",
        # Effects outside of the program, memory that is written in place, positions.
        *(_OUTSIDE, _IN_PLACE, "axis_index axis_size platform_index"),
    ),
}
CLASSES: dict[str, OpClass] = {
    name: op_class for op_class, lines in _TABLE.items() for line in lines for name in line.split()
}


class Cost(enum.Enum):
    """The cost of computing the result of an operation a second time, for a backward pass."""

    CHEAP = "reads and writes memory once: may be computed again"
    EXPENSIVE = "is never computed again; its derivative does not ask for its result"
    SEPARATE = "is never computed again, and its derivative decides what is kept for it"


# Operations of the table above that are not listed here are cheap. Reasons come first.
_COSTS: dict[Cost, tuple[str, ...]] = {
    Cost.EXPENSIVE: (
        # Linear in each operand: products, also those of jaxmp,
        *_TABLE[OpClass.LOWER],
        "low_precision_product float32_gradient",
        # running and windowed sums; windowed maxima, whose derivatives go back to the operand,
        "cumsum reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add "
        "select_and_gather_add fft",
        # random access to tables,
        "gather scatter-add scatter-sub",
        # transfers between devices or memories.
        *(_COLLECTIVE_SUMS, _PLACEMENTS, "optimization_barrier", _TRANSFERS, _REDUCED_CASTS),
        # Integers, which have no derivative.
        "random_bits random_seed random_split random_fold_in random_clone rng_bit_generator "
        "rng_uniform threefry2x32 lu_pivots_to_permutation",
    ),
    Cost.SEPARATE: (
        # Their derivatives need permutations, or results.
        "sort top_k approx_top_k cumprod cumlogsumexp cummax cummin reduce_prod "
        "scatter scatter-mul scatter-min scatter-max reduce_window reduce",
        *(_LINEAR_ALGEBRA, "custom_linear_solve linear_solve"),
        # Sums of many terms.
        *(_SPECIAL_FUNCTIONS, "random_gamma erf_inv polynomial"),
        # Programs, kernels and functions that no table can know.
        *(*_TABLE[OpClass.CONTROL], _WITH_FUNCTIONS, _SCALED_PRODUCTS),
        # Effects outside of the program, and memory that is written in place.
        *(_OUTSIDE, _IN_PLACE),
    ),
}
COSTS: dict[str, Cost] = dict.fromkeys([*CLASSES, "convert_element_type"], Cost.CHEAP) | {
    name: cost for cost, lines in _COSTS.items() for line in lines for name in line.split()
}


def _names_of(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


# Round an array to codes of 8 bits: read it twice, for the largest magnitudes and to round it.
ENCODES = _names_of("float8_encode mxfp8_encode")
# Run before a loop that would run them again on the same arrays: they read much, and keep little.
HOISTED = ENCODES

# Products, and kernels.

# The product of two arrays; and of two numbers, where it adds nothing up.
DOT, TIMES = "dot_general", "mul"
# Products that autocast runs in 16 bits.
CONTRACTIONS = _names_of(*_TABLE[OpClass.LOWER])
# For these JAX has levels of precision, but its compilers drop an algorithm without a word.
WITHOUT_ALGORITHMS = _names_of("conv_general_dilated ragged_dot ragged_dot_general")
# All products, also those of scaled operands, which autocast leaves alone.
PRODUCTS = CONTRACTIONS | _names_of(_SCALED_PRODUCTS)
# Products, and what jaxmp puts around their operands: a param is gathered once for all of them.
MULTIPLIES = CONTRACTIONS | ENCODES | _names_of("held float32_gradient")
# Their authors made them for the dtypes of their operands.
KERNELS = _names_of(
    "custom_vjp_call pallas_call mpmd_map ffi_call composite custom_partitioning",
    "call_hi_primitive core_map run_state linear_call",
    "dot_product_attention_fwd_wrapper scaled_matmul_wrapper",
)
# Kernels with a program that runs on blocks: nobody looks into it.
OPAQUE = _names_of("pallas_call core_map mpmd_map tpu_custom_call")
# Calls into code that another library or compiler made.
FOREIGN_CALLS = _names_of("ffi_call custom_call triton_kernel_call cudnn_fusion call_exported")
# Factorizations and solvers. They multiply matrices, out of sight.
LINEAR_ALGEBRA = _names_of(_LINEAR_ALGEBRA)
EFFECTS = _names_of(_OUTSIDE)

# Calls, and operations with a program.

# JAX's jit: `pjit` until 0.7.
JITS = _names_of("jit pjit")
# `jax.checkpoint`, by its names in several versions of JAX.
CHECKPOINTS = _names_of("remat2 checkpoint")
# Functions whose author wrote their derivative.
CUSTOM_DERIVATIVES = _names_of("custom_jvp_call custom_vjp_call")
# Control flow that can run again around other programs.
CONTROL_FLOW = JITS | CHECKPOINTS | _names_of("scan while cond shard_map")
# They run one program once, and return its results as they are.
CALLS = JITS | CHECKPOINTS | CUSTOM_DERIVATIVES
# Their program combines two numbers, and does not run on arrays. So do scatters.
COMBINERS = _names_of("reduce reduce_window select_and_scatter select_and_gather_add")
# A helper such as `jnp.where` may hold these in spite of their class.
IN_HELPERS = JITS | _names_of("custom_jvp_call convert_element_type iota and or not")
# Operations over mesh axes. Casts between kinds of variation are none: they send nothing.
COLLECTIVES = _names_of(_COLLECTIVE_SUMS, _TRANSFERS, "psend")

# Of zero they are -inf, as masks are made.
LOGARITHMS = _names_of("log log2 log10")
# Give an array a sharding, or a type that says more of it, and change no number. The first two may
# gather it.
PLACINGS = _names_of("sharding_constraint reshard")
LAYINGS = PLACINGS | _names_of(_REDUCED_CASTS, "pvary pcast mesh_cast")

# Casts.
CASTS = ENCODES | _names_of("convert_element_type")

# Moves of data.

# Add or remove dimensions.
RESHAPES = _names_of("reshape squeeze expand_dims")
# Hold each number of the operand once.
REARRANGES = RESHAPES | _names_of("transpose rev")
# Hold each number once or more.
REPEATS = _names_of("broadcast_in_dim tile")
# Parts, copies and rearrangements of one array, or the array along new dimensions. The sets below
# add their own.
PLAIN_MOVES = REARRANGES | _names_of(
    "slice dynamic_slice split unstack copy copy_p broadcast_in_dim"
)
# Linear in their first operand, and move it. Other operands are integers.
LINEAR_MOVES = (PLAIN_MOVES | REPEATS) | _names_of(
    "gather sharding_constraint pcast all_gather all_gather_invariant",
    "ppermute all_to_all",
)
# Moves that run in float32 if only float32 operations read their results. Collectives are not among
# them: they carry 16 bits.
WIDENED = PLAIN_MOVES | REPEATS | _names_of("gather stop_gradient name")
# Leave the numbers unchanged, up to rounding. Gather is excluded: its rows are activations. A tiled
# array is as large as an activation, too.
SAME_NUMBERS = PLAIN_MOVES | _names_of(
    "convert_element_type reduce_precision held name stop_gradient concatenate stack",
    "sharding_constraint layout_constraint reshard mesh_cast device_put",
    "all_gather all_gather_invariant all_gather_reduced pvary pcast reduced_vary_cast",
)
# Cut a layer's params out of a stack, at places that are known before the program runs.
VIEWS = _names_of("slice squeeze reshape unstack split")
# Each dimension of the result comes from the one at its place: whole, in part, or reversed.
SAME_DIMENSIONS = _names_of("slice dynamic_slice rev optimization_barrier copy copy_p name")
# They put operands side by side, so that the result has another shape than the operands.
ARRANGEMENTS = _names_of("concatenate pad stack tie")

# Arithmetic.

# A sum or a difference of two. JAX adds gradients by `add_any`.
ADDS = _names_of("add add_any sub")
# A product or a quotient of two.
SCALES = _names_of("mul div")
# The operations of a norm after its statistics, and whole powers, which are products.
ARITHMETIC = ADDS | SCALES | _names_of("neg integer_pow square")
# Bend their operand, with a slope of about 1 at most: its rounding grows no further.
ACTIVATIONS = _names_of("max min clamp tanh logistic erf erfc atan asinh")
# Lay a mask over an array. Its numbers, such as -1e9, may be too large for 16 bits.
MASKS = _names_of("add sub mul select_n")
# Lay data over a param as a factor, a bound or a choice ...
LAID_SCALED = SCALES | _names_of("pow clamp select_n")
# ... and as a summand, or as what the param is compared with.
LAID_ADDED = ADDS | _names_of("max min")
# Their operands may differ in shape from the result without being broadcast.
MIXED_SHAPES = ARRANGEMENTS | _names_of("clamp select_n")
# Scatters that combine the new values with the old.
ACCUMULATES = _names_of("scatter-add scatter-sub scatter-mul")
# Add or multiply many numbers. JAX adds gradients by `add_any`.
TOTALS = ACCUMULATES | _names_of(
    "reduce_sum reduce_prod reduce_window_sum reduce reduce_window select_and_scatter_add",
    "cumsum cumprod cumlogsumexp add_any addupdate accum_grad_in_ref",
)
# Add up many numbers, which may be on many devices.
SUMS = TOTALS | CONTRACTIONS | _names_of(_COLLECTIVE_SUMS)
# Rounded before or after these, the result is the same.
ROUNDS_ALIKE = (SAME_NUMBERS | LINEAR_MOVES) | _names_of(
    "abs max min clamp select_n pad dynamic_update_slice scatter sort optimization_barrier",
    "reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min",
    "gradient_of float32_gradient",
) - _names_of("reduce_precision")
# Largest numbers, relative to which a softmax is computed.
MAXIMA = _names_of("reduce_max")
# Their results are places, and of rounded numbers the places may be others.
CHOICES = _names_of("argmax argmin")
# Jump where numbers change places: comparisons, with the sign of the difference, indices, choices.
ORDERINGS = {"lt": -1, "le": -1, "gt": 1, "ge": 1}
ORDERS = CHOICES | _names_of("sort top_k approx_top_k")
JUMPS = _names_of("round floor ceil select_and_scatter_add select_and_gather_add")
# Sums and extremes along one axis, of all numbers up to each.
RUNNING = _names_of("cumsum cumprod cumlogsumexp cummax cummin")
# Each number of the result is made of the numbers at its place.
ELEMENTWISE = (
    _names_of(*_TABLE[OpClass.PROMOTE], *_TABLE[OpClass.RANGE], *_TABLE[OpClass.FLOAT32])
    | _names_of(
        "convert_element_type reduce_precision bitcast_convert_type nextafter stop_gradient name",
        "copy copy_p and or xor not shift_left shift_right_logical shift_right_arithmetic",
        "population_count clz mulhi complex real imag conj",
    )
) - (ARRANGEMENTS | RUNNING | _names_of("polynomial"))
# Many numbers make one, which may be a statistic. Products are left out: they never run again.
REDUCTIONS = CHOICES | _names_of("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor")
# Linear in every operand, so that their derivatives need no operand. Gathers are left out: they
# are expensive.
LINEAR = (PLAIN_MOVES | ADDS) | _names_of(
    "neg convert_element_type reduce_sum real imag concatenate pad name pvary pcast",
    "float32_gradient sharding_constraint reshard",
)
# Operations between a gradient and the product that it comes from: moves, elementwise operations
# and sums.
AFTER_PRODUCTS = (LINEAR_MOVES | _names_of(*_TABLE[OpClass.PROMOTE])) | _names_of(
    "convert_element_type dynamic_update_slice scatter scatter-add reduce_sum cumsum",
    "psum psum_invariant reduce_scatter pvary optimization_barrier at_label",
)
# The identity on the first operand.
IDENTITIES = _names_of("held tied name gradient_of float32_gradient open_rounding")
# Hand on numbers of their operands, up to casts. No collectives: these may add them up.
PASSED_ON = SAME_NUMBERS | LINEAR_MOVES | IDENTITIES
PASSED_ON -= COLLECTIVES | _names_of("reduce_precision")
# Zero if all array operands are zero. Of such operations, those that optimizers use.
KEEPS_ZERO = (REARRANGES | ADDS) | _names_of(
    "neg sign abs sqrt convert_element_type copy copy_p broadcast_in_dim slice concatenate",
    "reduce_sum reduce_precision",
)


def may_be_sum(name: str, of_sum: bool) -> bool:
    """Whether the result of an operation may be a sum over devices, up to its rounding.

    Args:
      name: the name of its primitive.
      of_sum: whether one of its operands may be such a sum.

    >>> may_be_sum("reduce_sum", False), may_be_sum("transpose", True), may_be_sum("mul", True)
    (True, True, False)
    """
    return name in SUMS or (of_sum and name in ROUNDS_ALIKE)
