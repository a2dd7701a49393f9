"""The base of all reports that print as tables."""


class TableReport:
    """A report that prints as the tables that its `__rich__` returns."""

    def __str__(self) -> str:
        # Rich is imported here: most reports are checked in a test and never drawn.
        from jaxmp._tools.inspect.tables import as_text

        return as_text(self)
