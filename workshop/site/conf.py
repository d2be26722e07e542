"""The settings of Sphinx. `python -m workshop.site` copies this file next to the documents and sets BOOK_REPOSITORY."""

import os
from typing import Any

project = "Sharded training, one idea at a time"
author = "The sharded-nanogpt contributors"
copyright = author
extensions = ["myst_nb"]
root_doc = "index"
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["pages.css", "explorer.css", "print.css"]
html_js_files = ["scroll.js"]
html_copy_source = False
html_show_sphinx = False
# The search would fetch the pages for excerpts, which a browser refuses for files that are opened from the disk.
html_show_search_summary = False
highlight_language = "none"  # a block without a language is a picture, or output
pygments_style = "default"
pygments_dark_style = "github-dark"

html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath"]
myst_update_mathjax = False  # MathJax would come from the network
myst_heading_anchors = 4
nb_execution_mode = "off"  # the committed outputs are shown
nb_ipywidgets_js: dict[str, Any] = {}  # no notebook has widgets; the default loads a script from the network
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header"]

repository = os.environ.get("BOOK_REPOSITORY", "")
if repository:
    html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": ""}

PLOT = ("vendor/d3.min.js", "vendor/plot.umd.min.js")  # Observable Plot
# Scripts that only the script of one page needs.
MORE_SCRIPTS = {"will_it_fit": ("planner.js",)}
WITHOUT_SOURCE = ("index", "results/", "genindex", "search")  # pages that no single file in the repository has


def add_page_files(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Load the scripts of a page only on that page, and hide edit links that would lead nowhere.

    Also add the levels of the headings in the sidebar.
    """
    script = page.removeprefix("workshop/site/pages/")
    if script != page:
        for name in ("explorer.js", *PLOT, *MORE_SCRIPTS.get(script, ())):
            app.add_js_file(name)
        app.add_js_file(f"{script}.js")
    if page.startswith(WITHOUT_SOURCE):
        context["theme_source_repository"] = ""
    if "furo_navigation_tree" in context:  # Sphinx's captions have no level, which screen readers need
        navigation = context["furo_navigation_tree"]
        context["furo_navigation_tree"] = navigation.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Any) -> None:
    """Register the hooks of this file and the writer of equations with Sphinx."""
    from workshop.site.equations import register_equations  # latex2mathml is installed by `make book`

    register_equations(app)
    app.connect("html-page-context", add_page_files, priority=900)  # after the theme
