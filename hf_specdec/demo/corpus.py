"""The training text: Python's documentation, and the docstrings of the standard library."""

import ast
import json
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path


HELD_OUT_EVERY = 50
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__"}
Document = tuple[str, str]


def read_docs(path: Path) -> Iterator[Document]:
    """Yields `(id, text)` of a JSON-lines file with the fields `id` and `text`."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield record["id"], record["text"]


def read_docstrings(folder: Path | None = None) -> Iterator[Document]:
    """Yields `(module, text)` for each module of the standard library that has docstrings.

    A docstring stands below the line that it documents, so that a model may be asked for it.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        text = "\n\n".join(docstrings_of(path.read_text(encoding="utf-8", errors="replace")))
        if text:
            yield f"lib/{relative.as_posix()}", text


def docstrings_of(source: str) -> Iterator[str]:
    """Yields the module's docstring, then each class and function header with its docstring."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        docstring = ast.get_docstring(node)
        if docstring:
            yield header_of(node) + docstring_block(docstring, isinstance(node, ast.Module))


def header_of(node: ast.AST) -> str:
    """The `class` or `def` line of a node; empty for a module."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):\n" if bases else f"class {node.name}:\n"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"def {node.name}({ast.unparse(node.args)}):\n"
    return ""


def docstring_block(docstring: str, is_module: bool) -> str:
    """The docstring in its quotes, indented below a header."""
    quoted = f'"""{docstring}"""' if "\n" not in docstring else f'"""{docstring}\n"""'
    if is_module:
        return quoted
    return "\n".join("    " + line if line.strip() else "" for line in quoted.split("\n"))


def load(docs: Path, library: Path | None = None) -> tuple[list[str], list[str]]:
    """Returns the `(training, held_out)` documents.

    One document in `HELD_OUT_EVERY` is held out, by a hash of its name, so the split never moves.
    """
    training: list[str] = []
    held_out: list[str] = []
    for name, text in [*read_docs(docs), *read_docstrings(library)]:
        side = held_out if zlib.crc32(name.encode()) % HELD_OUT_EVERY == 0 else training
        side.append(text.strip() + "\n")
    return training, held_out or training[-1:]
