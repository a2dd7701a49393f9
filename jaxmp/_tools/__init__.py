"""Tools that import the core and that the core never imports: they load when first used."""
