"""Find out whether a model still computes what a kernel computes.

A kernel replaces code of `nanoGPT/model.py`. If a model has other code in its place, or if you have changed this code,
the kernel would silently compute the original. So each kernel names the methods and modules that it replaces, with a
digest of each method's code.
"""

import ast
import hashlib
import inspect
import textwrap
from typing import Any

from torch import nn

from nanoGPT.model import GPT, MLP, Attention, Block

METHODS: dict[str, tuple[tuple[type[nn.Module], str, str], ...]] = {
    "attention": ((Attention, "attend", "7f17f644"),),
    "embedding": ((GPT, "embed", "cf754a34"),),
    "gelu": ((MLP, "forward", "bbab7411"),),
    "layernorm": ((Block, "forward", "0c310eb6"),),
    "loss": ((GPT, "compute_loss", "4d2850ad"), (GPT, "compute_logits", "93e0bae3")),
}
MODULES: dict[str, dict[str, type[nn.Module]]] = {
    "embedding": {"wte": nn.Embedding, "wpe": nn.Embedding},
    "gelu": {"c_fc": nn.Linear, "gelu": nn.GELU},
    "layernorm": {"ln_1": nn.LayerNorm, "ln_2": nn.LayerNorm, "ln_f": nn.LayerNorm},
    "loss": {"lm_head": nn.Linear},
}


def find_change(model: GPT, kernel: str) -> str | None:
    """Return what a kernel would not compute as the model does, or None."""
    for cls, name, digest in METHODS[kernel]:
        modules = [module for module in model.modules() if isinstance(module, cls)]
        if not modules:
            return f"the model has no {cls.__name__}"
        for module in modules:
            if getattr(type(module), name) is not getattr(cls, name) or name in vars(module):
                return f"a {type(module).__name__} has its own {name}"
        if (actual := hash_method(cls, name)) != digest:
            return f"{cls.__name__}.{name} was changed: {actual} instead of {digest} in phase2_triton/changes.py"
    for path, module in model.named_modules():
        expected = MODULES.get(kernel, {}).get(path.rpartition(".")[2], type(module))
        if type(module) is not expected:
            return f"{path} is a {type(module).__name__}, and not a {expected.__name__}"
        if type(module) in MODULES.get(kernel, {}).values() and has_own_forward(module):
            return f"{path}.forward is not that of torch's {expected.__name__}"
    if kernel == "loss" and model.lm_head.bias is not None:
        return "lm_head has a bias"
    return None


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the `forward` of a torch module is not torch's."""
    code = getattr(type(module).forward, "__globals__", {})
    return "forward" in vars(module) or code.get("__name__") != type(module).__module__


def hash_method(cls: type, name: str) -> str:
    """Return a digest of a method's code, without comments, docstring and layout; "none" if it has no Python code."""
    try:
        code = getattr(cls, name).__code__  # of the method itself: inspect would read the code that a wrapper wraps
        function = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (AttributeError, OSError, SyntaxError):
        return "none"
    if isinstance(function, ast.FunctionDef) and ast.get_docstring(function) is not None:
        del function.body[0]
    return hashlib.sha256(repr(list_nodes(function)).encode()).hexdigest()[:8]


def list_nodes(node: Any) -> Any:
    """Return a syntax tree as nested lists, without the empty fields, which differ between versions of Python."""
    if isinstance(node, ast.AST):
        return [
            type(node).__name__,
            *((name, list_nodes(v)) for name, v in ast.iter_fields(node) if v not in (None, [])),
        ]
    return [list_nodes(item) for item in node] if isinstance(node, list) else node
