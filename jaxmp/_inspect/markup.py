"""Builds HTML from tags and texts; every text is escaped, so that no name can break a page."""

import html


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


# Elements without an end.
_VOID = ("br", "meta")


def tag(name: str, /, *children: str, **attributes: str | bool) -> Markup:
    """Returns an element.

    Args:
      name: the name of the element, such as `"td"`.
      *children: what is inside: texts, which are escaped, and `Markup`, which is not.
      **attributes: the attributes, without those that are False or empty. `_` stands for `-`, and
        is dropped at the end, as in `class_`.

    Returns:
      The element.

    >>> tag("td", "a < b", tag("br"), class_="number")
    '<td class="number">a &lt; b<br></td>'
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{html.escape(value)}"')
        for key, value in attributes.items()
        if value
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined_markup(*children)}</{name}>")


def joined_markup(*children: str) -> Markup:
    """Returns texts and elements one after the other.

    >>> joined_markup("R&D", tag("b", "!"))
    'R&amp;D<b>!</b>'
    """
    return Markup(
        "".join(child if isinstance(child, Markup) else html.escape(child) for child in children)
    )
