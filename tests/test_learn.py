"""The pages of docs/learn: their code runs, their numbers hold, and the notebooks are those of the pages."""

import base64
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_walkthrough import blocks, run_block
from vitascope.cli import main
from vitascope_lessons import command as lessons
from vitascope_lessons.exercises import NAMES, path_of, solution_text

LEARN = Path(__file__).parent.parent / "docs" / "learn"
EPOCHS = "epochs, batch = 60, 32"


SCRIPT = SimpleNamespace(**runpy.run_path(str(LEARN / "notebooks.py")))


@pytest.mark.parametrize("page", SCRIPT.PAGES, ids=lambda page: page.name)
def test_notebook_is_that_of_the_page_with_outputs(page: Path) -> None:
    file = page.with_suffix(".ipynb")
    made, bare = json.loads(file.read_text(encoding="utf-8")), SCRIPT.notebook(page)
    cells = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    codes = ["".join(cell["source"]) for cell in cells]
    assert codes == [SCRIPT.INSTALL, *(block.strip() for block in blocks(page, "python"))]
    for code, cell in zip(codes[1:], cells[1:], strict=True):
        prints = bool(re.search(r"^ *print\(", code, re.MULTILINE))
        draws = code.splitlines()[-1].startswith(("panels(", "save("))
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert kinds == ["stream"] * prints + ["execute_result"] * draws
        pictures = [output["data"]["image/png"] for output in cell["outputs"] if "data" in output]
        assert all(0 < len(base64.b64decode(picture)) <= 300_000 for picture in pictures)
        cell |= {"outputs": [], "execution_count": None}
    assert made == bare, "run `python docs/learn/notebooks.py`"
    assert file.stat().st_size <= 2_000_000


def run(
    page: str, capsys: pytest.CaptureFixture[str], replace: tuple[str, str] = ("", "")
) -> tuple[dict[str, Any], str]:
    """Run a page's code, and check its stated shapes: its names and its output."""
    names: dict[str, Any] = {}
    for code in blocks(LEARN / page, "python"):
        run_block(code.replace(*replace) if replace[0] else code, page, names)
    return names, capsys.readouterr().out


def test_built_model_is_bitwise_ours_and_learns_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    """In a sixth of the epochs; the page states the accuracy after all of them."""
    assert "".join(blocks(LEARN / "build.md", "python")).count(EPOCHS) == 1
    names, said = run("build.md", capsys, (EPOCHS, "epochs, batch = 10, 32"))
    assert names["accuracy"](*names["test"]) > 0.75
    assert re.fullmatch(r"[\d.]+% of 142 validation images\n[\d.]+% of 360 test images\n", said)
    # The digits' model and the one in the box, beyond the page's own comparison.
    assert [name for name, _ in names["yours"].named_parameters()] == list(names["theirs"].state_dict())


def test_built_model_has_about_thirty_lines_and_its_loop_twenty() -> None:
    model, *_, loop = blocks(LEARN / "build.md", "python")
    lines = [line for line in model.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 36
    assert len([line for line in loop.split("@torch")[0].splitlines() if line.strip()]) <= 22
    explained = (LEARN / "build.md").read_text(encoding="utf-8")
    for call in (
        "scaled_dot_product_attention",
        "unflatten",
        "permute",
        "flatten(2).transpose(1, 2)",
        "gelu",
    ):
        assert explained.count(call) >= 2, f"{call} is not explained"


def test_heads_on_feature_maps_segment_detect_and_retrieve(capsys: pytest.CaptureFixture[str]) -> None:
    names, said = run("next.md", capsys)
    overlap, found, same = (
        float(number) for number in re.findall(r"(?:digits: |in |for )([\d.]+)%?(?: of|\n)", said + "\n")
    )
    assert overlap > 0.4  # every pixel as digit: below 0.1
    assert found > 80
    assert same > 30
    assert float((names["truth"]).float().mean()) < 0.1


@pytest.mark.parametrize(("page", "locale"), [("README.md", "C.UTF-8"), ("README.zh.md", "zh_CN.UTF-8")])
def test_overview_runs_and_shows_what_the_command_prints(
    page: str,
    locale: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.setattr(lessons, "practice", lambda functions, log: 1.0)
    commands = "".join(blocks(LEARN / page, "sh")).splitlines()
    assert commands[:2] == ["pip install ./lessons", "vitascope learn"]
    for command in commands[1:]:
        assert main(command.split()[1:]) == 0
    path_of(Path("learn"), "patches").write_text(solution_text("patches"))
    tokens = path_of(Path("learn"), "positions")
    whole = "torch.cat([x_class.expand(B, -1, -1), embedded], dim=1) + E_pos"
    tokens.write_text(solution_text("positions").replace(whole, "embedded + E_pos[:, 1:]"))
    capsys.readouterr()
    main(["learn"])
    (shown,) = blocks(LEARN / page, "text")
    assert capsys.readouterr().out.startswith(shown)
    text = (LEARN / page).read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\d_\w+\.py)`", text, re.MULTILINE)
    assert named == [path_of(Path(), name).name for name in NAMES]


@pytest.mark.parametrize(("page", "title"), [("walkthrough.md", "Exercises"), ("walkthrough.zh.md", "练习")])
def test_each_step_of_the_walkthrough_has_three_exercises_with_hidden_answers(page: str, title: str) -> None:
    steps = re.split(r"^## \d\. ", (LEARN.parent / page).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(steps) == 9
    for step in steps:
        asked, hidden = step.split(f"**{title}**")[1].split("<details>")
        for part in (asked, hidden.split("</details>")[0]):
            assert re.findall(r"^(\d)\. ", part, re.MULTILINE) == ["1", "2", "3"]
