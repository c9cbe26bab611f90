"""Settings of the documentation's site: `make docs` builds it into build/docs."""

import logging
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "spottrain"
author = "The spottrain authors"
copyright = "The spottrain authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_design",
    "docs.reference_pages",
]
exclude_patterns = ["reference_pages"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

# Every name in the Python API leads somewhere; those of other projects can't be looked up without a network.
nitpicky = True
A_TYPE_VARIABLE = ("py:class", r"spottrain\.loop\.session\.Model")
nitpick_ignore_regex = [("py:.*", r"(?!spottrain\.).*"), A_TYPE_VARIABLE]
default_role = "code"
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
# For signatures, Sphinx imports the modules of base classes, such as transformers' Trainer. With it comes
# bitsandbytes, which warns on some processors that it lacks a kernel.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "spottrain"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options: dict[str, list[str]] = {"top_of_page_buttons": []}


def setup(app: Sphinx) -> None:
    """Let Sphinx show the help of commands as the terminal does."""
    app.connect("sphinx-click-process-description", _as_in_the_terminal)


def _as_in_the_terminal(_: Sphinx, __: object, lines: list[str]) -> None:
    """An asterisk is one, and no emphasis."""
    lines[:] = [line.replace("*", r"\*") for line in lines]
