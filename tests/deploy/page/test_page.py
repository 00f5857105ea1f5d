"""`vs.page`: what it rejects, what it proves, and what it keeps."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import vitascope as vs
from tests.browser import needs_browser
from tests.data import noise, write_picture
from tests.models import small_model, small_resnet
from vitascope.cli import main
from vitascope.deploy.page import browser, proof
from vitascope.deploy.page import page as page_module
from vitascope.deploy.page.browser import BrowserError, opened
from vitascope.deploy.page.page import check_page_size
from vitascope.errors import UserError


class FakeTab:
    """A browser's tab that answers as the models do, with `change` added after the first `right` answers."""

    def __init__(
        self,
        asked: list[tuple[Any, Any]],
        change: torch.Tensor | float = 0.0,
        right: int = 0,
        faults: tuple[str, ...] = (),
    ) -> None:
        self.answers = iter(
            [
                {
                    "seconds": 0.1,
                    "familiarity": None,
                    "outputs": list(
                        map(str, (proof.model_outputs(model, [picture])[0] + change * (at >= right)).tolist())
                    ),
                    "pixels": picture.pixels.flatten().tolist(),
                }
                for at, (model, picture) in enumerate(asked)
            ]
        )
        self.faults = list(faults)
        self.name = "Fake 1.0"

    def evaluate(self, function: str, argument: Any) -> Any:
        if function == proof.READY:
            return {"seconds": 0.1, "kernel": "fake"}
        return next(self.answers)


@pytest.fixture
def in_fake_browser(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Proofs in a browser that does as `how` says, which are arguments of `FakeTab`."""
    how: dict[str, Any] = {}
    asked: list[tuple[Any, Any]] = []
    made = proof.compared_picture

    def kept(model: Any, source: Any) -> Any:
        asked.append((model, made(model, source)))
        return asked[-1][1]

    @contextmanager
    def opened(program: str | None, address: str, patience: float) -> Iterator[FakeTab]:
        assert address.startswith("file:///")
        yield FakeTab(asked, **how)

    monkeypatch.setattr(page_module, "compared_picture", kept)
    monkeypatch.setattr(proof, "opened", opened)
    return how


def test_page_is_kept_if_the_browser_agrees(in_fake_browser: dict[str, Any], tmp_path: Path) -> None:
    done = vs.page(small_model(), tmp_path / "a.html", weights="fp32", images=[noise(40, 50), noise(30, 30)])
    assert done.proof.agreement.images == 2
    assert done.proof.computed.pixels == 0
    assert done.size == (tmp_path / "a.html").stat().st_size > 0
    assert done.beside is None


def other_model() -> vs.VisionTransformer:
    return small_model(image_size=24, in_channels=1, num_classes=7)


def test_both_models_of_a_page_are_proved(in_fake_browser: dict[str, Any], tmp_path: Path) -> None:
    done = vs.page(small_model(), tmp_path / "a.html", beside=other_model(), images=noise(40, 50))
    assert done.proof.computed.outputs.shape == (1, 5)
    assert done.beside.proof.computed.outputs.shape == (1, 7)
    assert done.beside.rounding != done.rounding
    assert repr(done).endswith(
        f"{done.proof.agreement.summary}; beside: {done.beside.proof.agreement.summary})"
    )


def test_second_model_that_a_page_cannot_hold_is_named(tmp_path: Path) -> None:
    broken = other_model()
    with torch.no_grad():
        broken.norm.bias[0] = torch.nan
    given = {"path": tmp_path / "a.html", "unproved": True, "images": noise(9, 9)}
    with pytest.raises(UserError, match=r"^beside: a page holds one Vision Transformer, not a ResNet"):
        vs.page(small_model(), beside=small_resnet(), **given)
    with pytest.raises(UserError, match=r"^beside: norm\.bias has NaN or infinity"):
        vs.page(small_model(), beside=broken, **given)
    vs.save_pretrained(broken, tmp_path / "broken")
    with pytest.raises(UserError, match=r"/broken: norm\.bias has NaN or infinity"):
        vs.page(small_model(), beside=tmp_path / "broken", **given)
    assert not (tmp_path / "a.html").exists()


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"change": torch.tensor([3.0, 0, 0, 0, 0])}, r"a\.html is not kept, because its outputs differ"),
        ({"change": float("nan")}, r"a\.html is not kept, because its outputs differ"),
        ({"faults": ("request of http://example.org/",)}, "request of http://example.org/"),
    ],
)
def test_page_that_does_not_do_what_torch_does_is_not_kept(how, complaint, in_fake_browser, tmp_path) -> None:
    in_fake_browser |= how
    with pytest.raises(UserError, match=complaint):
        vs.page(small_model(), tmp_path / "a.html", images=noise(40, 50))
    assert list(tmp_path.iterdir()) == []


def test_page_of_a_model_whose_outputs_are_all_zero_is_kept(in_fake_browser, tmp_path) -> None:
    model = small_model()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.zero_()
    done = vs.page(model, tmp_path / "a.html", images=noise(40, 50))
    assert done.proof.probabilities == 0


def test_existing_file_another_suffix_and_a_folder_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("mine")
    with pytest.raises(UserError, match="exists and is not overwritten"):
        vs.page(small_model(), tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == "mine"
    for path in (tmp_path / "a.onnx", tmp_path):
        with pytest.raises(UserError, match=r"files of this format end in \.html: "):
            vs.page(small_model(), path)


def test_page_that_cannot_be_proved_is_written_and_the_way_to_prove_it_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "playwright.sync_api", None)
        done = vs.page(small_model(), tmp_path / "a.html", images=noise(9, 9))
    assert (done.proof, done.path.is_file()) == (None, True)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "a.html is written, but not proved in a browser: install Playwright: pip install" in message
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (vitascope[page])")
    monkeypatch.setattr(browser, "NAMES", ())
    monkeypatch.setattr(browser, "CHANNELS", ("chrome-canary",))
    assert vs.page(small_model(), tmp_path / "b.html", images=noise(9, 9)).proof is None
    assert "install Chromium, Chrome or Edge, or run `playwright install chromium`" in caplog.text


@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexit 3\n"])
def test_browser_that_does_not_start_is_one_line_and_no_page_is_kept(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (vitascope[page])")
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / "browser").write_text(content)
        (tmp_path / "browser").chmod(0o755)
    vs.save_pretrained(small_model(), tmp_path / "small")
    picture = write_picture(tmp_path / "a.png")
    assert main(["page", "small", "--out", "a.html", "--data", str(picture), "--browser", "./browser"]) == 2
    error = capsys.readouterr().err
    assert "the page failed in the browser: BrowserType.launch: " in error
    assert error.count("\n") == 1
    assert not (tmp_path / "a.html").exists()


@needs_browser
def test_tab_reports_what_goes_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        "<script>console.error('one'); fetch('http://example.org/').catch(() => 0);"
        "setTimeout(() => { throw new Error('two') })</script>"
    )
    with opened(None, (tmp_path / "a.html").as_uri(), 20) as tab:
        assert tab.evaluate("async (value) => value + 1", 1) == 2
    assert tab.faults[0] == "one"
    assert {"two", "request of http://example.org/"} < {*tab.faults}
    with pytest.raises(BrowserError, match="Error: three"), opened(None, "about:blank", 20) as tab:
        tab.evaluate("() => { throw new Error('three') }", None)
    with pytest.raises(BrowserError, match="no answer in 1 s"), opened(None, "about:blank", 1) as tab:
        tab.evaluate("() => new Promise(() => 0)", None)


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        ({"embed_dim": 1024, "depth": 8}, "in fp16 has 274 MB; the limit is 256 MB: use weights int8"),
        ({"embed_dim": 2048, "depth": 12}, "in fp16 has .* MB; the limit is 256 MB: `vitascope serve`"),
    ],
)
def test_model_that_is_too_large_is_rejected_with_its_size(size: dict[str, int], complaint: str) -> None:
    with torch.device("meta"):
        model = vs.VisionTransformer(vs.ViTConfig(num_heads=8, **size))
    with pytest.raises(UserError, match=complaint):
        check_page_size([model], "fp16")


def test_unproved_page_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vs.save_pretrained(small_model(), tmp_path / "small")
    out, picture = tmp_path / "small.html", write_picture(tmp_path / "a.png")
    asked = ["page", str(tmp_path / "small"), "--out", str(out), "--data", str(picture), "--weights", "int8"]
    assert main([*asked, "--unproved"]) == 0
    printed = capsys.readouterr().out
    assert f"{out.stat().st_size:,} bytes, int8 weights" in printed
    assert f"int8 against the model, on images of {picture}: " in printed
    assert "unproved: not tried in a browser" in printed


def test_command_describes_both_models(in_fake_browser: dict[str, Any], tmp_path: Path, capsys) -> None:
    other, picture = tmp_path / "other", write_picture(tmp_path / "a.png")
    vs.save_pretrained(small_model(), tmp_path / "small")
    vs.save_pretrained(other_model(), other)
    asked = ["page", str(tmp_path / "small"), "--data", str(picture), "--out", str(tmp_path / "a.html")]
    assert main([*asked, "--beside", str(other)]) == 0
    first, _, second = capsys.readouterr().out.partition(f"beside it, {other}:\n")
    for printed in (first, second):
        assert f"fp16 against the model, on images of {picture}: " in printed
        assert "proved in Fake 1.0, fake, against torch" in printed
    assert "after it is opened" in first
    assert "after it is asked for" in second
    assert "<title>small and other – vitascope</title>" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stop_during_the_proof_leaves_nothing(signum, status, tmp_path, monkeypatch, capsys) -> None:
    def prove(*_: Any) -> Any:
        assert callable(signal.getsignal(signum))  # else it would end the tests
        signal.raise_signal(signum)

    monkeypatch.setattr(page_module, "prove", prove)
    vs.save_pretrained(small_model(), tmp_path / "small")
    picture, out = write_picture(tmp_path / "a.png"), tmp_path / "out" / "a.html"
    with pytest.raises(SystemExit) as exit_info:
        main(["page", str(tmp_path / "small"), "--out", str(out), "--data", str(picture)])
    assert exit_info.value.code == status
    assert f"stopped by {signal.Signals(signum).name}; no page is kept" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []
