"""Who may ask, and what every answer carries."""

import hmac

import pytest

from tests.deploy.server.served import (
    NAMES,
    HeldEngine,
    grey,
    picture,
    play,
    refusal,
    serving,
    until,
)
from vitascope.deploy.engine import TorchEngine
from vitascope.deploy.server.settings import Settings


def test_token_is_asked_for_and_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, kept: bytes) -> bool:
        compared.append((given, kept))
        return given == kept

    monkeypatch.setattr(hmac, "compare_digest", compare)

    async def story() -> None:
        async with serving(HeldEngine(), token="s3cret") as client:
            for header in (None, "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret-and-more"):
                headers = {} if header is None else {"Authorization": header}
                answer = await client.predict(grey(1), headers=headers)
                assert "bearer token" in refusal(answer, 401)
                assert answer.headers["www-authenticate"] == "Bearer"
            right = {"Authorization": "Bearer s3cret"}
            assert (await client.predict(grey(1), headers=right)).status_code == 200
            for path in ("/v1/model", "/metrics", "/docs", "/openapi.json", "/nothing"):
                assert (await client.get(path)).status_code == 401
            for path in ("/livez", "/readyz"):
                assert (await client.get(path)).status_code == 200

    play(story())
    assert (b"wrong", b"s3cret") in compared
    assert (b"s3cret", b"s3cret") in compared


def test_pages_of_other_sites_may_not_use_the_server() -> None:
    async def story() -> None:
        async with serving(HeldEngine()) as client:
            other = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
            answers = [
                await client.predict(grey(1), headers=other),
                await client.options(
                    "/v1/predict", headers={**other, "Access-Control-Request-Method": "POST"}
                ),
                await client.get("/v1/model", headers=other),
            ]
            assert [answer.status_code for answer in answers] == [403, 403, 200]
            for answer in answers:
                assert not [name for name in answer.headers if name.startswith("access-control")]
                assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            same = await client.predict(grey(1), headers={"Sec-Fetch-Site": "same-origin"})
            assert same.status_code == 200

    play(story())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:8000", "my.name"])
def test_own_names_are_answered(host: str) -> None:
    async def story() -> None:
        async with serving(HeldEngine(), allowed_hosts=("my.name",)) as client:
            assert (await client.get("/livez", headers={"Host": host})).status_code == 200

    play(story())


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]"])
def test_name_of_another_site_that_points_here_is_refused(host: str) -> None:
    async def story() -> None:
        async with serving(HeldEngine()) as client:
            assert "--allowed-hosts" in refusal(await client.get("/v1/model", headers={"Host": host}), 421)

    play(story())


def test_server_of_a_network_answers_to_any_name_unless_told() -> None:
    assert Settings().host == "127.0.0.1"
    assert Settings(host="0.0.0.0").hosts == ()
    assert Settings(host="0.0.0.0", allowed_hosts=("a.example",)).hosts == ("a.example",)


def test_every_answer_says_what_a_browser_may_make_of_it(engine: TorchEngine) -> None:
    async def story() -> None:
        async with serving(engine) as client:
            await until(lambda: client.app.state.service.why_not_ready() == "")
            answers = [
                await client.predict(picture()),
                await client.predict(b"x"),
                *[
                    await client.get(path)
                    for path in ("/livez", "/docs", "/docs.css", "/nothing", "/v1/model")
                ],
            ]
        for answer in answers:
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert NAMES[-1] in answers[0].text  # a class may be called anything, in JSON
        assert answers[0].headers["content-type"] == "application/json"

    play(story())
