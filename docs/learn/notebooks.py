"""Make the notebooks of the lessons from their pages: `python docs/learn/notebooks.py`.

A block of Python becomes a cell of code, everything between two blocks a cell of text.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
LESSONS = (HERE / "build", HERE.parent / "walkthrough", HERE / "next")
PAGES = tuple(lesson.with_suffix(suffix) for lesson in LESSONS for suffix in (".md", ".zh.md"))


def notebook(page: str) -> str:
    """The notebook of a page, as JSON."""
    cells = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page, flags=re.MULTILINE | re.DOTALL)):
        if text := part.strip():
            code = {"execution_count": None, "outputs": []} if number % 2 else {}
            kind = "code" if number % 2 else "markdown"
            lines = text.splitlines(keepends=True)
            cells.append({"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines, **code})
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    for path in PAGES:
        path.with_suffix(".ipynb").write_text(notebook(path.read_text(encoding="utf-8")), encoding="utf-8")
