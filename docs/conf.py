"""How the site is built: `make docs`. A public name that it lacks fails the build."""

import hashlib
import importlib
import os
import pathlib
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import jax
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

import jaxmp

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"][
    "Source"
]

project = "jaxmp"
author = "the jaxmp authors"
copyright = f"2026, {author}"
release = version = jaxmp.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
html_theme = "sphinx_book_theme"
html_title = f"jaxmp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "repository_url": SOURCE,
    "use_repository_button": True,
    "use_download_button": False,
    "navbar_persistent": [],  # the search of the sidebar is enough
}


myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3


def library_digest() -> str:
    """The version of the code that notebooks run."""
    folders = ROOT / "jaxmp", ROOT / "docs/tutorials"
    code = (
        path.read_bytes() for each in folders for path in sorted(each.rglob("*.py"))
    )
    return f"{jax.__version__}-{hashlib.sha256(b''.join(code)).hexdigest()[:12]}"


# Text notebooks run when the site is built, once for each version of their text and of
# the library. One that fails fails the build.
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build/site/notebooks" / library_digest())
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_output_stderr = "warn"  # what a notebook warns of fails the build too
# But for what the tests expect on some jaxlibs. Notebooks run on CPUs, anywhere.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PYTHONWARNINGS"] = "ignore:the CPU compiler of jaxlib"

# `name` in a docstring is code, and a link where that is the name of something.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say types, with dtypes and shapes
autosummary_generate = False
napoleon_use_ivar = True  # attributes are described with their class
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

MODULES = ["jaxmp", *(f"jaxmp.{n}" for n in ("diagnostics", "equinox", "float8"))]
MODULES += [
    f"jaxmp.{n}" for n in ("linen", "nnx", "numbers", "rules", "sharding", "storage")
]


# What functions return has a place in the reference, but no public name.
RESULTS = re.findall(
    r"autoclass:: jaxmp\._[\w.]+\.(\w+)",
    "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.rst")),
)


def public_names() -> Iterator[str]:
    """The names that the reference has to have."""
    for name in MODULES:
        module = importlib.import_module(name)
        for member in dir(module):
            full = f"{name}.{member}"
            if not member.startswith("_") and full not in MODULES:
                yield full


def check_reference(app: Sphinx, env: Any) -> None:
    """Warns of each public name without a place: for the build, warnings are errors."""
    placed = set(env.get_domain("py").objects)
    for name in public_names():
        if name not in placed:
            logging.getLogger(__name__).warning(
                "%s is public, and not in the reference", name
            )


def link_to_source(app: Sphinx, page: str, text: list[str]) -> None:
    """Files that are no pages of the site are linked to where the source is."""
    outside = rf"\]\((?:\.\./){{{page.count('/') + 1}}}([^)]*)\)"
    text[0] = re.sub(outside, rf"]({SOURCE}/blob/main/\1)", text[0])


def link_to_pages(
    app: Sphinx, kind: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings name pages as files, docs/memory.md, as a reader of the code has them.

    Types of attributes come with the private files that define them: nobody needs that.
    A result is linked to wherever it is.
    """
    lines[:] = [re.sub(r"`*docs/([\w-]+)\.md`*", r":doc:`/\1`", line) for line in lines]
    lines[:] = [re.sub(r"\bjaxmp\._[\w.]*\.(\w+)", r"\1", line) for line in lines]
    lines[:] = [line.replace("*shape", r"\*shape") for line in lines]
    results = rf"(?<!`)`({'|'.join(RESULTS)})`(?!`)"
    lines[:] = [re.sub(results, r":py:obj:`.\1`", line) for line in lines]


def hide_private_files(
    app: Sphinx, domain: str, kind: str, content: nodes.Element
) -> None:
    """Results are shown by their name alone."""
    for module in list(content.parent.findall(addnodes.desc_addname)):
        if module.astext().startswith("jaxmp._"):
            module.parent.remove(module)


def setup(app: Sphinx) -> None:
    """What sphinx calls."""
    app.connect("source-read", link_to_source)
    app.connect("autodoc-process-docstring", link_to_pages)
    app.connect("object-description-transform", hide_private_files)
    app.connect("env-check-consistency", check_reference)
