import os
from pathlib import Path

import pytest

from vitascope_lessons.checking import check, check_function, equal, inputs_of
from vitascope_lessons.exercises import NAMES, TO_WRITE, exercise_text, path_of, solution_text
from vitascope_lessons.faults import faults
from vitascope_lessons.solutions import SOLUTIONS

CLASS, NO_CLASS = "x_class.expand(B, -1, -1)", "(3, 8, 24), expected (3, 9, 24): the class token is missing"
LAYER_NORM = "__import__('torch').layer_norm"
HALVES = "z = MSA(LN_1(z)) + z\n    return MLP(LN_2(z)) + z"
MUTANTS = [
    # exercise, what of our answer is replaced, by what, and a part of the hint
    ("patches", "permute(0, 2, 4, 1, 3, 5)", "permute(0, 1, 2, 3, 4, 5)", "a reshape alone does not cut"),
    ("patches", "permute(0, 2, 4, 1, 3, 5)", "permute(0, 4, 2, 1, 3, 5)", "numbered column by column"),
    ("patches", "permute(0, 2, 4, 1, 3, 5)", "permute(0, 2, 4, 3, 5, 1)", "the channels come last"),
    ("patches", "permute(0, 2, 4, 1, 3, 5)", "permute(0, 2, 4, 1, 5, 3)", "are transposed"),
    ("patches", "x_p @ E", "x_p", "shape (3, 8, 48), expected (3, 8, 24): these are the patches"),
    ("patches", "x_p @ E", "(x_p @ E).transpose(1, 2)", "swap the axes of patches and channels"),
    ("patches", "reshape(B, -1,", "reshape(B, H // P, W // P,", "join the rows and columns of patches"),
    ("patches", "permute(0, 2, 4, 1, 3, 5)", "permute(0, 1, 2, 4, 3, 5)", "pixels of one channel of several"),
    ("patches", "x_p @ E", "(x_p @ E).mT.unflatten(2, (H // P, W // P))", "`flatten(2).transpose(1, 2)`"),
    ("patches", "x_p @ E", "(x_p @ E).transpose(0, 1)", "the values are right, and the axes are in another"),
    ("patches", "B, -1, C * P * P)", "B, -1, 3 * P * P)", "take all sizes from the inputs"),
    ("patches", "reshape(B, C, H // P, P, W // P,", "view(-1).view(B, C, H // P, P, -1,", "view size is not"),
    ("patches", "reshape(B, -1,", "reshape(B, 8,", "take all sizes from the inputs"),
    ("positions", f"[{CLASS}, embedded]", "[embedded]", "[embedded]"),
    ("positions", f"torch.cat([{CLASS}, embedded], dim=1) + E_pos", "embedded + E_pos[:, 1:]", NO_CLASS),
    ("positions", " + E_pos", "", "position embeddings are missing"),
    ("positions", " + E_pos", " * E_pos", "added, not multiplied"),
    ("positions", "), embedded]", "), embedded + E_pos[:, 1:]]", "position embeddings twice"),
    ("positions", f"[{CLASS}, embedded]", f"[embedded, {CLASS}]", "put it first"),
    ("positions", "x_class.expand", "torch.zeros_like(x_class).expand", "the first token is empty"),
    ("positions", "expand(B", "expand(3", "take all sizes from the inputs"),
    ("attention", " / q.shape[-1] ** 0.5", "", "the scale is missing"),
    ("attention", " ** 0.5", "", "divide them by its square root"),
    ("attention", "/ q.shape[-1]", "/ q.shape[-2]", "the root of the number of tokens"),
    ("attention", "q.shape[-1] ** 0.5", "12**0.5", "take all sizes from the inputs"),
    ("attention", "/ q.shape[-1]", "* q.shape[-1]", "are multiplied by sqrt(D_h)"),
    ("attention", "softmax(dim=-1)", "softmax(dim=-2)", "sum to 1 over the queries, not over the keys"),
    ("attention", "softmax(dim=-1)", "softmax(dim=1)", "sum to 1 over the heads"),
    ("attention", "** 0.5", "* 0.5", "`** 0.5` is the square root"),
    ("attention", ".softmax(dim=-1)", ".exp()", "divide the exponentials by their sum"),
    ("attention", ".softmax(dim=-1)", "", "the softmax is missing"),
    ("attention", "q @ k.mT", "k @ q.mT", "queries and keys are swapped"),
    ("attention", "A @ v", "A", "expected (3, 2, 9, 12): these are the weights A"),
    ("attention", "A @ v", "A.mT @ v", "transposed before the product with the values"),
    ("attention", "A @ v", "A.detach() @ v", "no gradient reaches q"),
    ("multi_head", ".flatten(2) @ U_msa", ".flatten(2)", "the multiplication by U_msa is missing"),
    ("multi_head", "transpose(1, 2).flatten(2)", "reshape(z.shape)", "joined in the wrong order"),
    ("multi_head", "(3, heads, -1)).permute(2, 0, 3,", "(heads, 3, -1)).permute(3, 0, 2,", "by head first"),
    ("multi_head", "transpose(1, 2)", "permute(0, 2, 3, 1)", "interleaved; put them side by side"),
    ("multi_head", "q, k, v = ", "k, q, v = ", "mixed up"),
    ("multi_head", "(3, heads, -1)", "(3, 1, -1)", "one head of width D"),
    ("multi_head", "attention(q, k, v)", "v", "call `attention(q, k, v)`"),
    ("mlp", "F.gelu(z @ W_1)", "F.dropout(F.gelu(z @ W_1))", "draws random numbers"),
    ("mlp", "F.gelu(z @ W_1) @ W_2", "z @ W_1 @ W_2", "the GELU is missing"),
    ("mlp", "F.gelu", "F.relu", "this is a ReLU"),
    ("mlp", "z @ W_1)", 'z @ W_1, approximate="tanh")', "the tanh approximation"),
    ("mlp", "F.gelu(z @ W_1) @ W_2", "F.gelu(z @ W_1 @ W_2)", "comes after the second matrix"),
    ("mlp", "@ W_2", "@ W_2 + z", "do not add z here"),
    ("block", "z = MSA(LN_1(z)) + z", "z = MSA(LN_1(z))", "of the first half is missing"),
    ("block", "return MLP(LN_2(z)) + z", "return MLP(LN_2(z))", "of the second half is missing"),
    ("block", "z = MSA(LN_1(z)) + z", "z = LN_1(MSA(z) + z)", "the first half normalizes the sum"),
    ("block", "MLP(LN_2(z))", "MLP(LN_1(z))", "use LN_2"),
    ("block", "MSA(LN_1(z))", "MSA(z)", "LN_1, is missing"),
    ("block", "z = MSA(LN_1(z)) + z", "z += MSA(LN_1(z))", "changes its input z"),
    ("block", HALVES, "return MLP(LN_2(MSA(LN_1(z)))) + z", "one residual connection spans both halves"),
    ("block", HALVES, "z = LN_1(z); z = LN_2(MSA(z) + z); return MLP(z) + z", "add the normalized tokens"),
    ("block", "z = MSA", "y = MSA", "attention is missing, or its result is lost"),
    ("pool", "LN(z[:, 0])", "LN(z).mean(dim=1)", "the mean of all tokens"),
    ("pool", "LN(z[:, 0])", f"{LAYER_NORM}(z[:, 0], z.shape[-1:])", "without learned weights; call LN"),
    ("pool", "LN(z[:, 0])", "z[:, 0]", "the layer norm is missing"),
    ("pool", "z[:, 0]", "z[:, -1]", "this is the last token"),
    ("pool", "z[:, 0]", "z[0]", "this is the first image"),
    ("pool", "z[:, 0]", "z[:, :1]", "expected (3, 24): remove the axis of tokens"),
    ("loss", "-logits", "logits", "the sign is wrong"),
    ("loss", ".mean()", ".sum()", "this is the sum over the images"),
    ("loss", ".mean()", "", "expected (): take the mean"),
    ("loss", ".mean()", ".sum() / 5 / 3", "divided by the number of classes too"),
    ("loss", ".mean()", ".mean() / torch.tensor(10.0).log()", "to base 10"),
    ("loss", ".mean()", ".square().mean()", "the value is wrong: yours is"),
    ("loss", "log_softmax", "softmax", "the logarithm is missing"),
    ("loss", "log_softmax(dim=-1)", "log_softmax(dim=0)", "over the images, not over the classes"),
    ("loss", "log_softmax(dim=-1)", "softmax(dim=-1).log()", "for logits of 1000 your loss is inf"),
    ("loss", "[images, labels]", "[:, labels]", "takes the labels of all images from every row"),
    ("loss", "return -logits", "with torch.no_grad(): return -logits", "no gradient reaches logits"),
]
"""Small edits of our own answers."""


def hint_for(folder: Path, name: str, text: str) -> str:
    path_of(folder, name).write_text(text, encoding="utf-8")
    answer = check(folder, name)
    assert answer.state == "wrong"
    return answer.hint


@pytest.mark.parametrize(("name", "old", "new", "hint"), MUTANTS)
def test_mutant_gets_the_hint_that_names_its_fault(name, old, new, hint, tmp_path, monkeypatch) -> None:
    answer = solution_text(name)
    body = answer[exercise_text(name).index(TO_WRITE) :]
    assert body.count(old) == 1, f"{old!r} is not once in {body!r}"
    monkeypatch.chdir(tmp_path)
    found = hint_for(Path(), name, answer[: -len(body)] + body.replace(old, new))
    assert hint in found
    assert len(found) < 380  # three lines of a terminal


@pytest.mark.parametrize(
    ("new", "hint"),
    [
        ("F.gelu(z @ W_1)", "输出的形状是 (3, 9, 36)，应为 (3, 9, 24)：缺少第二个矩阵 W_2"),
        ("F.relu(z @ W_1)", "输出的形状是 (3, 9, 36)，应为 (3, 9, 24)：可能的原因：缺少第二个矩阵 W_2"),
        ("3 * F.gelu(z @ W_1) @ W_2", "数值是应有结果的 3 倍：有一个系数不对"),
        ("F.gelu(z.data @ W_1) @ W_2", "数值正确，但梯度传不到 z，"),
        ("F.gelu(W_1) @ W_2 @ z", "5_mlp.py，第 15 行：return F.gelu(W_1) @ W_2 @ z\nRuntimeError: "),
    ],
)
def test_hints_are_in_the_readers_language(new: str, hint: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    found = hint_for(Path(), "mlp", solution_text("mlp").replace("F.gelu(z @ W_1) @ W_2", new))
    assert found.startswith(hint)


def test_every_answer_of_ours_is_right() -> None:
    for name in NAMES:
        check_function(Path(f"{name}.py"), name, SOLUTIONS[name])


@pytest.mark.parametrize("name", NAMES)
def test_no_fault_computes_the_same_as_ours_or_as_one_of_another_hint(name: str) -> None:
    inputs = inputs_of(name)
    known = [("", SOLUTIONS[name](*inputs))]
    for hint, output in faults(name, inputs):
        assert not [other for other, one in known if other != hint and equal(output, one)]
        known.append((hint, output))


def test_exercise_is_to_do_until_its_function_has_a_statement(tmp_path: Path) -> None:
    path = path_of(tmp_path, "mlp")
    path.write_text(exercise_text("mlp"))
    assert check(tmp_path, "mlp").state == "to do"
    path.write_text(exercise_text("mlp") + "    return F.gelu(z @ W_1) @ W_2\n")
    assert check(tmp_path, "mlp").state == "right"


ERRORS = [
    ("W_1) @ W_2", "W_1 @ W_2", "line {}: return F.gelu(z @ W_1 @ W_2\nSyntaxError:"),
    ("return F.gelu", "return G.gelu", "line {}: return G.gelu(z @ W_1) @ W_2\nNameError:"),
    ("z @ W_1", "W_1 @ z", "return F.gelu(W_1 @ z) @ W_2\nRuntimeError:"),
    ("mlp(z: Tensor, W_1: Tensor, W_2: Tensor)", "mlp(z: Tensor)", "takes 1 positional argument but 3 were"),
    ("def mlp", "def my_mlp", "5_mlp.py has no function `mlp`: keep its name"),
    ("return ", "result = ", "returns nothing: is `return` missing?"),
    ("return ", "return 1, ", "returns a tuple; it should return a tensor of shape (3, 9, 24)"),
    ("@ W_2", "@ W_2 * float('nan')", "contains nan"),
    ("@ W_2", "@ W_2 + 1e-3 * z[:, :, :1]", "the shape is right, the values are not: at ["),
    ("@ W_2", "@ W_2 * (torch.arange(9) != 4)[:, None]", "Only these tokens are wrong: 4"),
    ("@ W_2", "@ W_2 * 3", "3 times the expected ones"),
    ("@ W_2", "@ W_2[:, :7]", "shape (3, 9, 7), expected (3, 9, 24): see the shapes in the docstring"),
    ("z @ W_1", "z.data @ W_1", "no gradient reaches z"),
    ("z @ W_1", "z @ torch.tensor(W_1.numpy())", "@ W_2\nRuntimeError: Can't call numpy()"),
    ("return ", "h = z @ W_1; y = F.gelu(h); h *= 0; return y @ W_2; ", "modified by an inplace operation"),
    ("return ", "return z.to_sparse(); ", "5_mlp.py: RuntimeError: add(sparse, dense) is not supported"),
    ("return ", "raise KeyboardInterrupt; return ", "\nKeyboardInterrupt"),
    ("@ W_2", "@ W_2 * (1 + 0j)", "has the dtype torch.complex64; expected torch.float32"),
    ("return ", "raise SystemExit(3); return ", "\nSystemExit: 3"),
    ("def mlp", "raise SystemExit\ndef mlp", "line 14: raise SystemExit\nSystemExit"),
]


@pytest.mark.parametrize(("old", "new", "hint"), ERRORS)
def test_error_in_a_file_is_shown_with_its_line_and_without_ours(
    old: str, new: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = solution_text("mlp").replace("import torch.nn", "import torch\nimport torch.nn").replace(old, new)
    line = next((place for place, code in enumerate(text.splitlines(), 1) if new in code), 0)
    found = hint_for(Path(), "mlp", text)
    assert hint.format(line) in found
    assert "Traceback" not in found
    assert "vitascope" not in found


def test_file_that_is_not_utf8_gets_a_hint(tmp_path: Path) -> None:
    path_of(tmp_path, "mlp").write_bytes("name = 'é'".encode("latin-1"))
    assert "5_mlp.py, line 1: name = " in check(tmp_path, "mlp").hint


def test_file_that_is_none_gets_a_hint(tmp_path: Path) -> None:
    path_of(tmp_path, "mlp").mkdir()
    path_of(tmp_path, "loss").symlink_to("nothing")
    os.mkfifo(path_of(tmp_path, "pool"))
    for name in ("mlp", "loss", "pool"):
        assert "is a folder, a pipe or a link to nothing" in check(tmp_path, name).hint


def test_output_of_a_function_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = solution_text("mlp").replace("return ", "print(z.shape); return 0 * ")
    path_of(tmp_path, "mlp").write_text(text)
    assert check(tmp_path, "mlp").printed == "torch.Size([3, 9, 24])\n"
    assert capsys.readouterr() == ("", "")
