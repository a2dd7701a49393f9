"""Which tests run programs as users write them, where a warning is a false alarm."""

import pytest

_PLACES = (
    *("tests/hosts/", "tests/guides/", "tests/package/test_examples", "tests/package/test_docs"),
    "tests/training/test_other_products",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Makes the warning of gradients in other dtypes an error in these tests."""
    if item.nodeid.startswith(_PLACES):
        item.add_marker(pytest.mark.filterwarnings("error:the optimizer was wrapped for"))
