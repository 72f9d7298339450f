"""Web pages of other origins: which may use the server, and the headers that their browsers look for."""

from typing import Any

import pytest

APP = "https://app.example:8443"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang"}


def preflight(scene: Any, origin: str, path: str = "/v1/chat/completions", **more: str) -> Any:
    return scene.http.request("OPTIONS", path, headers={"Origin": origin, **ASKS, **more})


@pytest.mark.parametrize("allowed", [[APP], ["http://localhost:3000", APP.upper()], ["*"]])
@pytest.mark.parametrize("api_key", ["", "key"])
def test_a_page_of_an_allowed_origin(stage: Any, allowed: list[str], api_key: str) -> None:
    stage.configure("server", allow_origins=tuple(allowed), api_key=api_key)

    async def test(scene: Any) -> None:
        asked = await preflight(scene, APP)
        assert asked.status_code == 204 and asked.headers["Access-Control-Allow-Origin"] == APP
        assert asked.headers["Access-Control-Allow-Headers"] == ASKS["Access-Control-Request-Headers"]
        assert "POST" in asked.headers["Access-Control-Allow-Methods"] and "Access-Control-Allow-Private-Network" not in asked.headers
        local = await preflight(scene, APP, **{"Access-Control-Request-Private-Network": "true"})
        assert local.headers["Access-Control-Allow-Private-Network"] == "true"
        headers = {"Origin": APP, "Authorization": "Bearer key"}
        for body in (scene.chat(), scene.chat(stream=True)):
            answer = await scene.post(body, headers=headers)
            assert answer.status_code == 200 and answer.headers["Access-Control-Allow-Origin"] == APP
            assert answer.headers["Vary"] == "Origin" and "Retry-After" in answer.headers["Access-Control-Expose-Headers"]
        bad = await scene.post({"messages": 3}, headers=headers)
        assert bad.status_code == 400 and bad.headers["Access-Control-Allow-Origin"] == APP, "a page can read errors"
        if api_key:
            refused = await scene.post(scene.chat(), headers={"Origin": APP})
            assert refused.status_code == 401 and refused.headers["Access-Control-Allow-Origin"] == APP

    stage.run(test)


@pytest.mark.parametrize(
    "origin", ["https://app.example", "http://app.example:8443", "https://evil.example", "null", f"{APP}.evil.example"]
)
def test_other_pages_are_told_nothing(stage: Any, origin: str) -> None:
    stage.configure("server", allow_origins=(APP,))

    async def test(scene: Any) -> None:
        for answer in (await preflight(scene, origin), await scene.post(scene.chat(), headers={"Origin": origin})):
            assert answer.status_code == 403 and "Access-Control-Allow-Origin" not in answer.headers
            assert answer.headers["Vary"] == "Origin"
            assert f"({origin!r}) may not use this server" in answer.json()["error"]["message"]

    stage.run(test)


def test_without_allowed_origins_nothing_changes(stage: Any) -> None:
    async def test(scene: Any) -> None:
        answer = await scene.post(scene.chat())
        assert answer.status_code == 200 and not {"Vary", "Access-Control-Allow-Origin"} & {*answer.headers}
        assert (await scene.http.request("OPTIONS", "/v1/chat/completions")).status_code == 405

    stage.run(test)
