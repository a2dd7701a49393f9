"""What `jaxmp doctor` measures is what it says: the product of a dtype runs in that dtype."""

import jax
import pytest

import jaxmp
from jaxmp._command.rates import timed_product
from tests.aot.conftest import Compiler

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize(("platform", "ran"), [("gpu", "float8"), ("any other", "not known")])
def test_the_float8_product_of_a_gpu_is_not_widened(gpu: Compiler, platform: str, ran: str) -> None:
    operand = jax.ShapeDtypeStruct(
        (1024, 1024),
        "float8_e4m3fn",
        sharding=jax.sharding.SingleDeviceSharding(gpu.devices[0]),
    )
    compiled = timed_product("float8_e4m3fn", "", platform).lower(operand, operand).compile()
    assert [row.ran for row in jaxmp.collectives(compiled).float8_products] == [ran]
