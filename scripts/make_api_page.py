"""Make docs/api.md from the docstrings of the public names.

    python scripts/make_api_page.py            # write it
    python scripts/make_api_page.py --check    # exit code 1 where it is stale

Read from the sources, so that it is the same on every version of Python and of what we depend on.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/api.md"
PACKAGES = ("fsdp_ckpt", "fsdp_ckpt.hf", "fsdp_ckpt.integrations.transformers", "fsdp_ckpt.testing")
INTRO = """# Public names

Made from the docstrings by `scripts/make_api_page.py`; change those, not this page. Shapes, units, which
ranks call it, and the errors are said there.
"""


def main() -> None:
    """Write the page, or say that it is stale."""
    page = make_page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        sys.exit("docs/api.md is stale: run python scripts/make_api_page.py")


def make_page() -> str:
    """Return the page."""
    parts = [INTRO]
    for package in PACKAGES:
        parts.append(f"## {package}\n")
        for name, home in sorted(public_names(package).items(), key=lambda item: item[0].lower()):
            node = find_definition(home, name)
            if node is not None:
                parts += describe(node)
    return "\n".join(parts)


def file_of(module: str) -> Path:
    """Return a module's source file."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(module: str) -> dict[str, str]:
    """Return each name of a module's ``__all__``, with the module that it is imported from."""
    tree = ast.parse(file_of(module).read_text())
    names: list[str] = []
    homes: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            homes.update({alias.name: node.module for alias in node.names})
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    return {name: homes.get(name, module) for name in names}


def find_definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Return where a name is defined, through the rooms that pass it on; ``None`` for a constant."""
    for node in ast.parse(file_of(module).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    home = public_names(module).get(name, module)
    return None if home == module else find_definition(home, name)


def describe(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Return a class with its public methods, or a function."""
    if isinstance(node, ast.FunctionDef):
        return [f"### {node.name}\n", f"```\n{signature(node)}\n```\n", docstring(node)]
    parts = [f"### {node.name}\n", f"```\nclass {constructor(node)}\n```\n", docstring(node)]
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            parts += [f"#### {node.name}.{method.name}\n", f"```\n{signature(method)}\n```\n"]
            parts.append(docstring(method))
    return parts


def constructor(node: ast.ClassDef) -> str:
    """Return how an object is made: by ``__init__``, or by a dataclass's fields; else the bases."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            method.args.args.pop(0)
            method.returns = None
            return signature(method, node.name)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [ast.unparse(field) for field in node.body if isinstance(field, ast.AnnAssign)]
        return f"{node.name}(\n    *,\n" + "".join(f"    {field},\n" for field in fields) + ")"
    return f"{node.name}({', '.join(ast.unparse(base) for base in node.bases)})"


def signature(node: ast.FunctionDef, name: str = "") -> str:
    """Return a function's first line without its ``def``, one argument a line where it is long."""
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
    line = f"{name or node.name}({arguments}){result}"
    if len(line) <= 100:
        return line
    split = re.split(r", (?=\*{0,2}\w+(?::|=|,|$)|\*,|/)", arguments)
    return f"{name or node.name}(\n    " + ",\n    ".join(split) + f",\n){result}"


def docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return a docstring as Markdown: sections as lists, double backticks and roles as code."""
    text = ast.get_docstring(node) or ""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text).replace("``", "`")
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Attributes|Source|Yields):", line):
            lines += [f"**{line[:-1]}**", ""]
            in_list = line[:-1] in ("Args", "Raises", "Attributes")
        elif in_list and (entry := re.fullmatch(r"    (\*{0,2}\w[\w., ]*): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif in_list and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        elif line.startswith("    ") and lines and lines[-1].endswith("::"):
            lines += ["", line]
        elif line.startswith("    ") and not (lines and lines[-1].startswith("    ")):
            lines.append(line.strip())
        else:
            in_list = in_list and line.startswith("    ")
            lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
