"""What tests of products share."""

import pytest

from jaxmp._primitives import block_product


@pytest.fixture
def blocks_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets MXFP8 run on a CPU, where XLA decodes the blocks; users get an error there."""
    monkeypatch.setattr(block_product, "check_device", lambda ctx: None)
