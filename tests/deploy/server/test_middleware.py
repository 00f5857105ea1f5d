"""Access control, and the headers of every response."""

import hmac
import logging
import re

import pytest

from tests.deploy.server.served import POISON, HeldEngine, Sender, chunks_of, grey, picture, refusal, serving
from vitascope.deploy.server.settings import Settings
from vitascope.models.engines.engine import TorchEngine


async def test_token_is_required_and_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, kept: bytes) -> bool:
        compared.append((given, kept))
        return given == kept

    monkeypatch.setattr(hmac, "compare_digest", compare)
    async with serving(HeldEngine(), token="s3cret") as client:
        for header in (None, "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret-and-more"):
            headers = {} if header is None else {"Authorization": header}
            answer = await client.predict(grey(1), headers=headers)
            assert "bearer token" in refusal(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer s3cret"}
        assert (await client.predict(grey(1), headers=right)).status_code == 200
        for path in ("/v1/model", "/metrics", "/docs", "/openapi.json"):  # which name the models
            assert (await client.get(path)).status_code == 401
            assert (await client.head(path)).status_code == 401
            assert (await client.get(path, headers=right)).status_code == 200
        assert (await client.get("/nothing")).status_code == 401
        for path in ("/livez", "/readyz", "/", "/web/docs.css"):
            assert (await client.get(path)).status_code == 200
    assert (b"wrong", b"s3cret") in compared
    assert (b"s3cret", b"s3cret") in compared


async def test_token_that_is_not_ascii_is_accepted_in_both_encodings() -> None:
    for token, code in (("Schlüssel", "utf-8"), ("Schlüssel", "latin-1"), ("ключ", "utf-8")):
        async with serving(HeldEngine(), token=token) as client:
            sent = b"Bearer " + token.encode(code)
            for header, status in ((sent, 200), (sent[:-1], 401)):
                answer = await client.get("/v1/model", headers={b"Authorization": header})
                assert answer.status_code == status


async def test_origin_of_a_post_must_be_its_host() -> None:
    """Browsers send no Sec-Fetch-Site to plain http at an address that is not loopback's."""
    async with serving(HeldEngine(), host="0.0.0.0") as client:
        for origin, host, status in (
            (None, "10.0.0.5:8000", 200),
            ("http://10.0.0.5:8000", "10.0.0.5:8000", 200),
            ("https://Vit.Example", "vit.example", 200),  # behind a proxy that speaks TLS
            ("https://vit.example", "vit.example:443", 200),
            ("http://vit.example:80", "vit.example", 200),
            ("http://[fd00::5]:8000", "[fd00::5]:8000", 200),
            ("https://named.example", "10.0.0.5:8000", 403),
            ("http://10.0.0.5", "10.0.0.5:8000", 403),
            ("http://10.0.0.5:9000", "10.0.0.5:8000", 403),
            ("http://10.0.0.5:8000.evil.example", "10.0.0.5:8000", 403),
            ("https://vit.example:80", "vit.example", 403),
            ("null", "10.0.0.5:8000", 403),
            ("", "", 403),
        ):
            headers = {"Host": host} if origin is None else {"Host": host, "Origin": origin}
            answer = await client.predict(grey(1), headers=headers)
            assert answer.status_code == status, origin
            if status == 403:
                assert f"Origin {origin!r} is not this Host" in refusal(answer, 403)
            assert (await client.get("/v1/model", headers=headers)).status_code == 200


async def test_every_response_has_a_unique_request_id_that_is_logged(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="vitascope.access"):
        async with serving(HeldEngine(), token="s3cret", access_log=True, queue=1) as client:
            right = {"Authorization": "Bearer s3cret"}
            answers = [
                await client.get("/livez"),
                await client.get("/nothing", headers=right),
                await client.get("/v1/model"),
                await client.predict(grey(1), headers=right),
                await client.predict(grey(POISON), headers=right),
                *[
                    await client.get("/livez", headers={b"X-Request-ID": given})
                    for given in (b"", b"a b", b"x" * 129, b"\xc3\xa9", b'"quoted"')
                ],
            ]
            assert [answer.status_code for answer in answers[:5]] == [200, 404, 401, 200, 500]
            for answer in answers:
                policy = answer.headers["content-security-policy"]
                assert ("default-src 'self'" in policy, "unsafe" in policy) == (True, False)
                assert answer.headers["x-content-type-options"] == "nosniff"
            for given in ("abc-1", "Root=1-67891233-abcdef", "x" * 128):
                for path in ("/livez", "/nothing", "/v1/predict"):
                    answer = await client.get(path, headers={"X-Request-ID": given})
                    assert answer.headers["x-request-id"] == given
            named = [answer.headers["x-request-id"] for answer in answers]
            assert len(set(named)) == len(named)
            assert all(re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]+", name) for name in named)
            logged = [record.getMessage().split()[-1] for record in caplog.records]
            assert [name for name in logged if name in named] == named


async def test_head_matches_get_without_the_body(engine: TorchEngine) -> None:
    async with serving(engine) as client:
        for path in ("/", "/livez", "/readyz", "/metrics", "/docs", "/v1/model", "/web/main.js", "/nothing"):
            head, get = await client.head(path), await client.get(path)
            assert head.status_code == get.status_code
            assert head.content == b""
            assert head.headers["content-type"] == get.headers["content-type"]
            if path != "/metrics":  # it counts these requests
                assert head.headers["content-length"] == get.headers["content-length"]
        assert (await client.head("/v1/predict")).status_code == 405


async def test_unknown_or_repeated_query_parameter_is_rejected(engine: TorchEngine) -> None:
    async with serving(engine) as client:
        for path, message in (
            ("predict?topk=1", "nearest: top_k; this path takes coverage, familiar, threshold, top_k"),
            ("predict?top_k=1&x", "parameter 'x'; this path takes coverage, familiar, threshold, top_k"),
            ("explain?form=png", "nearest: format; this path takes format, method, target"),
            ("embed?top_k=1", "this path takes none"),
            ("predict?top_k=2&top_k=3", "query parameter 'top_k' is given 2 times; give it once"),
            ("predict?" + "&".join(200 * ["top_k=1"]), "more than 100 query parameters"),
        ):
            assert message in refusal(await client.post(f"/v1/{path}", content=picture()), 422)
        assert (await client.get("/livez?probe=1")).status_code == 200
        assert (await client.get("/?token=1")).status_code == 200


@pytest.mark.parametrize("prefix", ["", "/apps/vit"])
async def test_proxy_may_keep_or_strip_its_prefix(prefix: str) -> None:
    async with serving(HeldEngine(), root_path="/apps/vit", token="s3cret") as client:
        right = {"Authorization": "Bearer s3cret"}
        answer = await client.post(f"{prefix}/v1/predict", content=grey(1), headers=right)
        assert answer.status_code == 200
        assert (await client.post(f"{prefix}/v1/predict", content=grey(1))).status_code == 401
        for path in ("/", "/web/docs.css", "/web/main.js"):
            assert (await client.get(prefix + path)).status_code == 200
        assert (await client.get(f"{prefix}/docs")).status_code == 401
        assert (await client.get(f"{prefix}/docs", headers=right)).status_code == 200
        assert (await client.get("/apps/vit")).status_code == 200
        assert (await client.get("/apps/vitx/livez", headers=right)).status_code == 404


async def test_pages_of_other_sites_may_not_use_the_server() -> None:
    async with serving(HeldEngine()) as client:
        other = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
        answers = [
            await client.predict(grey(1), headers=other),
            await client.options("/v1/predict", headers={**other, "Access-Control-Request-Method": "POST"}),
            await client.get("/v1/model", headers=other),
        ]
        assert [answer.status_code for answer in answers] == [403, 403, 200]
        for answer in answers:
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        same = await client.predict(grey(1), headers={"Sec-Fetch-Site": "same-origin"})
        assert same.status_code == 200


async def test_request_names_one_host() -> None:
    """RFC 9112, section 3.2; HTTP/1.0 had no such header."""
    async with serving(HeldEngine(), host="0.0.0.0") as client:
        for version, hosts, status in (("1.1", 2, 400), ("1.1", 0, 400), ("1.0", 0, 200), ("1.0", 2, 400)):
            sender = Sender(client.app, path="/livez")
            sender.scope |= {"method": "GET", "http_version": version}
            sender.scope |= {"headers": [(b"host", b"localhost")] * hosts}
            assert await sender.send(chunks_of(b"", 0)) == status


async def test_own_host_names_are_accepted_and_foreign_ones_rejected() -> None:
    assert Settings(host="0.0.0.0").hosts == ()  # by default, any name on a network
    async with serving(HeldEngine(), allowed_hosts=("my.name",)) as client:
        for host in ("127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:8000", "my.name"):
            assert (await client.get("/v1/model", headers={"Host": host})).status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "", "[::2]"):
            answer = await client.get("/v1/model", headers={"Host": host})
            assert "--allowed-hosts" in refusal(answer, 421)
