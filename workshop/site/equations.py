"""Show equations as MathML, which browsers draw without scripts and screen readers read.

A document contains LaTeX between dollar signs: `$a$` in a sentence, `$$a$$` on a separate line. GitHub shows it too.
"""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert


def visit_math(writer: Any, node: nodes.math) -> None:
    """Write an equation in a sentence."""
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_displayed_math(writer: Any, node: nodes.math_block) -> None:
    """Write an equation on a separate line. A wide one scrolls."""
    writer.body.append(f'<div class="math scroll">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def register_equations(app: Any) -> None:
    """Let Sphinx write MathML."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displayed_math, None))
