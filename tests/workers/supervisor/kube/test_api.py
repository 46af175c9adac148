"""The Kubernetes client against a scripted server on loopback, with credentials of every kind."""

import asyncio
import contextlib
import datetime
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from tests.workers.authority import Authority, write_pair
from workers.supervisor.kube import api as module
from workers.supervisor.kube.api import Api, Resource, kubeconfig_files, ready_to_connect
from workers.supervisor.kube.errors import Access, ApiError, Unreachable, access

pytest.importorskip("kubernetes_asyncio")
from aiohttp import web

from workers.supervisor.kube import session

PODS = Resource("", "v1", "pods", "space").path
Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(answer: Answering, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Runs a server that answers by `answer`. Yields its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def server_tls(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def kubeconfig(folder: Path, server: str, **user: Any) -> dict[str, str]:
    """An environment with a kubeconfig that has this server and user."""
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
    }
    (folder / "config").write_text(json.dumps(config))
    return {"KUBECONFIG": str(folder / "config")}


@contextlib.asynccontextmanager
async def connected(environ: dict[str, str]) -> AsyncIterator[Api]:
    client = await Api.connect(environ)
    try:
        yield client
    finally:
        await client.close()


def scenario(folder: Path, answer: Answering, main: Callable[[Api], Awaitable[None]], **user: Any) -> None:
    async def run() -> None:
        async with serving(answer) as url, connected(kubeconfig(folder, url, **user)) as client:
            await main(client)

    asyncio.run(run())


async def echo(request: web.Request) -> web.Response:
    return web.json_response(
        {
            "method": request.method,
            "path": request.path,
            "query": dict(request.query),
            "body": (await request.read()).decode(),
            "type": request.headers.get("Content-Type", ""),
            "token": request.headers.get("Authorization", ""),
            "coding": request.headers.get("Accept-Encoding", ""),
        }
    )


def test_a_request_carries_the_token_the_query_and_the_body(tmp_path: Path) -> None:
    async def main(client: Api) -> None:
        received = json.loads(await client.request("GET", PODS, query={"labelSelector": "a in (b, c)"}))
        assert received["method"] == "GET"
        assert (received["path"], received["query"]) == (PODS, {"labelSelector": "a in (b, c)"})
        assert (received["token"], received["coding"], received["body"]) == ("Bearer tok", "identity", "")
        patch = "application/merge-patch+json"
        received = json.loads(await client.request("PATCH", PODS + "/x", body=b'{"a":1}', content_type=patch))
        assert (received["method"], received["body"], received["type"]) == ("PATCH", '{"a":1}', patch)
        assert client.host.startswith("http://127.0.0.1:")

    scenario(tmp_path, echo, main, token="tok")


def test_an_error_has_the_request_and_the_answer_of_the_server(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        status = {"kind": "Status", "reason": "TooManyRequests", "message": "slow down"}
        return web.json_response(status, status=429, headers={"Retry-After": "7"})

    async def main(client: Api) -> None:
        with pytest.raises(ApiError, match="the API server refused to list pods in namespace space") as caught:
            await client.request("GET", PODS)
        error = caught.value
        assert (error.status, error.reason, error.message) == (429, "TooManyRequests", "slow down")
        assert (error.verb, error.path, error.retry_after_s) == ("list", PODS, 7.0)

    scenario(tmp_path, answer, main)


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_refusal_by_rbac_names_the_missing_rule(tmp_path: Path, verb: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "reason": "Forbidden", "message": "no"}, status=403)

    async def main(client: Api) -> None:
        with pytest.raises(ApiError) as caught:
            if verb == "watch":
                async for _ in client.lines(PODS, query={"watch": "1"}, idle_s=5):
                    pass
            else:
                await client.request("GET", PODS)
        text = str(caught.value)
        assert f"not allowed to {verb} pods in namespace space; add to a Role in namespace space" in text
        assert f'{{apiGroups: [""], resources: ["pods"], verbs: ["{verb}"]}}' in text

    scenario(tmp_path, answer, main)


@pytest.mark.parametrize("page", [b"<html>bad gateway</html>", b'{"message": "bad gateway \xe9"}'])
def test_an_error_page_of_a_proxy_is_an_api_error(tmp_path: Path, page: bytes) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=page, status=502)

    async def main(client: Api) -> None:
        with pytest.raises(ApiError, match="bad gateway"):
            await client.request("GET", PODS)

    scenario(tmp_path, answer, main)


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 403 Acc\xe8s refus\xe9\r\n", b"Acc\xe8s refus\xe9\r\n", b"HTTP/1.1 200 OK\r\n\xe9 \xe9: \xe9\r\n"]
)
def test_the_text_of_an_error_can_be_shown_whatever_the_bytes_of_the_head(tmp_path: Path, head: bytes) -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head + b"Content-Length: 3\r\n\r\nno\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, connected(kubeconfig(tmp_path, url)) as client:
            with pytest.raises((ApiError, Unreachable)) as failed:
                await client.request("GET", PODS)
            assert str(failed.value).encode()

    asyncio.run(main())


def test_a_server_that_does_not_answer_in_time_or_at_all_is_unreachable(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def main(client: Api) -> None:
        with pytest.raises(Unreachable, match=r"no answer within 0\.05 s to GET /api/v1/namespaces/space/pods"):
            await client.request("GET", PODS, timeout_s=0.05)

    scenario(tmp_path, answer, main)

    async def refused() -> None:
        async with connected(kubeconfig(tmp_path, "http://127.0.0.1:9")) as client:
            with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"):
                await client.request("GET", PODS)
            with pytest.raises(Unreachable):
                async for _ in client.lines(PODS, query={}, idle_s=5):
                    pass

    asyncio.run(refused())


def test_an_endless_answer_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 1000)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 5000)

    async def main(client: Api) -> None:
        with pytest.raises(Unreachable, match="longer than 1000 bytes"):
            await client.request("GET", PODS)

    scenario(tmp_path, answer, main)


def watched(*chunks: bytes | float, end: bool = True) -> Answering:
    """A watch that sends these pieces. A number is a pause in seconds."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            if isinstance(chunk, bytes):
                await response.write(chunk)
            # The pauses between the pieces are the case.
            await asyncio.sleep(chunk if isinstance(chunk, float) else 0)
        if not end:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


def test_a_watch_yields_a_line_per_event_for_any_split_into_chunks(tmp_path: Path) -> None:
    async def main(client: Api) -> None:
        assert [line async for line in client.lines(PODS, query={"watch": "1"}, idle_s=5)] == [
            b"", b'{"a":1}', b'{"b":2}', b'{"c":3}',
        ]  # fmt: skip

    scenario(tmp_path, watched(b'{"a"', 0.01, b':1}\n{"b":2}\n\n{"', 0.01, b'c":3}\n'), main)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (watched(b"{}\n", 30.0), "nothing came for 1 s in a watch of"),
        (watched(b"{}\n", *(200 * (b" ", 0.05))), "nothing came for 1 s in a watch of"),
        (watched(b"{}\n", b"{", end=False), ""),
        (watched(b"{}\n", b"x" * 3000), "is longer than 2000 bytes"),
    ],
    ids=["silence", "blanks", "cut", "long line"],
)
def test_a_watch_that_breaks_raises_unreachable_after_its_events(
    tmp_path: Path, answer: Answering, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE_BYTES_MAX", 2000)

    async def main(client: Api) -> None:
        lines = []
        with pytest.raises(Unreachable) as caught:
            async for line in client.lines(PODS, query={}, idle_s=1.0 if "nothing" in why else 30.0):
                lines.append(line)
        assert lines == [b"", b"{}"]
        assert why in str(caught.value)

    scenario(tmp_path, answer, main)


def test_watches_of_many_namespaces_leave_connections_for_requests(tmp_path: Path) -> None:
    """A watch keeps its connection, and a namespace has up to six of them."""
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if not request.query:
            return web.Response(text="{}")
        response = web.StreamResponse()
        await response.prepare(request)
        await over.wait()
        return response

    async def main(client: Api) -> None:
        async def watch() -> None:
            async with contextlib.aclosing(client.lines(PODS, query={"watch": "1"}, idle_s=60.0)) as lines:
                async for _ in lines:
                    begun.append(1)

        begun: list[int] = []
        watches = [asyncio.create_task(watch()) for _ in range(120)]
        await until(lambda: len(begun) == len(watches))
        assert await client.request("GET", PODS) == b"{}"
        over.set()
        await asyncio.gather(*watches)

    scenario(tmp_path, answer, main)


def test_renewed_credentials_are_used_when_the_server_refuses_the_old_ones(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({}, status=200 if seen[-1] == "Bearer new" else 401)

    async def main(client: Api) -> None:
        with pytest.raises(ApiError) as caught:  # loaded again, and still refused
            await client.request("GET", PODS)
        assert caught.value.status == 401
        token.write_text("new")
        with pytest.raises(ApiError):  # too soon to load them again
            await client.request("GET", PODS)
        client._renewed_at -= 10
        await client.request("GET", PODS)
        await client.request("GET", PODS)
        assert seen == ["Bearer old", "Bearer old", "Bearer old", "Bearer new", "Bearer new"]

    scenario(tmp_path, answer, main, tokenFile=str(token))


def test_the_token_can_come_from_an_exec_plugin(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "fresh"}}
    plugin.write_text(f"print({json.dumps(json.dumps(credential))})")

    async def main(client: Api) -> None:
        assert json.loads(await client.request("GET", PODS))["token"] == "Bearer fresh"

    command = {"apiVersion": credential["apiVersion"], "command": sys.executable, "args": [str(plugin)]}
    scenario(tmp_path, echo, main, exec=command)


def test_an_exec_plugin_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from workers.supervisor.kube import session

    monkeypatch.setattr(session, "LOAD_S_MAX", 1.0)
    plugin, written = tmp_path / "plugin.py", tmp_path / "pid"
    plugin.write_text(f"import os, signal; open({str(written)!r}, 'w').write(str(os.getpid())); signal.pause()")

    async def main(client: Api) -> None:
        with pytest.raises(Unreachable, match="the exec plugin did not end within 1 s"):
            await client.request("GET", PODS)
        await until(lambda: not (written.exists() and os.path.exists(f"/proc/{written.read_text()}")))
        # The loop has to notice the end of the process, and says so only on stderr if it does not.
        await asyncio.sleep(0.1)

    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": [str(plugin)]}
    scenario(tmp_path, echo, main, exec=command)
    assert capfd.readouterr().err == ""


def test_the_output_of_a_failing_exec_plugin_is_in_the_exception_and_not_on_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main(client: Api) -> None:
        with pytest.raises(Unreachable, match=r"process returned 3\. no entry"):
            await client.request("GET", PODS)

    code = "import sys; sys.stderr.write('no entry'); sys.exit(3)"
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": ["-c", code]}
    scenario(tmp_path, echo, main, exec=command)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"current-context": "x", "contexts": [], "clusters": []}'])
def test_a_server_with_a_bad_kubeconfig_is_unreachable_until_the_file_is_good(tmp_path: Path, config: str) -> None:
    async def main() -> None:
        async with serving(echo) as url, connected(kubeconfig(tmp_path, url)) as client:
            good = (tmp_path / "config").read_text()
            (tmp_path / "config").write_text(config)
            with pytest.raises(Unreachable, match="config"):
                await client.request("GET", PODS)
            (tmp_path / "config").write_text(good)
            await client.request("GET", PODS)

    asyncio.run(main())


def test_a_pod_uses_the_token_and_certificate_of_its_service_account_and_reads_the_token_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes_asyncio.config import incluster_config

    token, authority = tmp_path / "token", Authority()
    monkeypatch.setattr(session, "load_incluster_config", partial(
        incluster_config.load_incluster_config, token_filename=str(token), cert_filename=str(tmp_path / "ca.crt")
    ))  # fmt: skip
    monkeypatch.setattr(incluster_config, "TOKEN_REFRESH_PERIOD", datetime.timedelta(0))
    tls = server_tls(write_pair(tmp_path, authority.pair()))

    async def main() -> None:
        async with serving(echo, tls) as url:
            port = url.rpartition(":")[2]
            environ = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": port}
            async with connected(environ) as client:
                with pytest.raises(Unreachable, match="the service account: Service token file does not exist"):
                    await client.request("GET", PODS)
                (tmp_path / "ca.crt").write_bytes(authority.pem)
                for text in ("first", "second\n"):
                    token.write_text(text)
                    received = json.loads(await client.request("GET", PODS))
                    assert received["token"] == f"Bearer {text.strip()}"
                token.write_text("")
                with pytest.raises(Unreachable, match="token cannot be read"):
                    await client.request("GET", PODS)

    asyncio.run(main())


def test_a_server_with_an_unknown_authority_is_unreachable_until_the_new_authority_is_loaded(tmp_path: Path) -> None:
    authority = Authority()
    tls = server_tls(write_pair(tmp_path, authority.pair()))
    (tmp_path / "ca").write_bytes(Authority("another").pem)

    async def main() -> None:
        async with serving(echo, tls) as url:
            server = url.replace("http://127.0.0.1", "https://localhost")
            environ = kubeconfig(tmp_path, server)
            config = json.loads((tmp_path / "config").read_text())
            config["clusters"][0]["cluster"]["certificate-authority"] = str(tmp_path / "ca")
            (tmp_path / "config").write_text(json.dumps(config))
            async with connected(environ) as client:
                with pytest.raises(Unreachable, match="certificate"):
                    await client.request("GET", PODS)
                (tmp_path / "ca").write_bytes(authority.pem)
                client._renewed_at -= 10
                await client.request("GET", PODS)

    asyncio.run(main())


def test_the_server_comes_from_kubeconfig_the_pod_or_the_home_folder(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text("{}")
    (tmp_path / "other").write_text("{}")
    home, pod = {"HOME": str(tmp_path)}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert kubeconfig_files({**home, **pod, "KUBECONFIG": f"/none:{tmp_path}/other"}) == f"/none:{tmp_path}/other"
    assert kubeconfig_files({**home, **pod}) == ""
    assert kubeconfig_files(home) == f"{tmp_path}/.kube/config"
    with pytest.raises(ValueError, match="KUBECONFIG /none: no such file"):
        kubeconfig_files({**pod, "KUBECONFIG": "/none"})
    with pytest.raises(ValueError, match="no Kubernetes API server is known"):
        kubeconfig_files({})


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'endpoint-picker\[k8s\]'"):
        ready_to_connect({"KUBERNETES_SERVICE_HOST": "x"})


@pytest.mark.parametrize(
    ("verb", "path", "expected"),
    [
        ("GET", "/api/v1/namespaces/n/pods", Access("list", "", "pods", "n")),
        ("GET", "/api/v1/namespaces/n/pods/x", Access("get", "", "pods", "n")),
        ("PATCH", "/api/v1/namespaces/n/pods/x/status", Access("patch", "", "pods/status", "n")),
        ("watch", "/apis/g.io/v1/namespaces/n/things", Access("watch", "g.io", "things", "n")),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/n/leases/l", Access("update", "coordination.k8s.io", "leases", "n")),
        ("POST", "/apis/authentication.k8s.io/v1/tokenreviews", Access("create", "authentication.k8s.io", "tokenreviews")),
        ("GET", "/api/v1/namespaces", Access("list", "", "namespaces")),
        ("GET", "/api/v1/namespaces/n", Access("get", "", "namespaces")),
        ("DELETE", "/api", Access("delete", "", "")),
    ],
)
def test_a_request_maps_to_the_access_that_rbac_checks(verb: str, path: str, expected: Access) -> None:
    assert access(verb, path) == expected


def test_cluster_wide_resources_need_a_cluster_role() -> None:
    error = ApiError(403, "Forbidden", "no", "create", "/apis/authentication.k8s.io/v1/tokenreviews")
    assert 'add to a ClusterRole of this service account: {apiGroups: ["authentication.k8s.io"]' in str(error)


def test_a_resource_has_a_path_and_a_name() -> None:
    thing = Resource("example.com", "v2", "things", "space")
    assert (thing.path, str(thing)) == ("/apis/example.com/v2/namespaces/space/things", "things.example.com")
    assert (Resource("", "v1", "pods", "n").path, str(Resource("", "v1", "pods", "n"))) == ("/api/v1/namespaces/n/pods", "pods")


def test_the_client_library_is_not_imported_before_the_first_request() -> None:
    code = (
        "import sys, workers.cli, workers.supervisor.main, workers.worker.main, workers.process.parent, workers.cli.serve\n"
        "found = {'kubernetes_asyncio', 'aiohttp'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_generated_models_of_the_client_library_are_not_loaded_but_can_be_imported_later() -> None:
    code = (
        "import sys, workers.supervisor.kube.session\n"
        "generated = [name for name in sys.modules if name.startswith('kubernetes_asyncio.client.models.')]\n"
        "assert not generated, generated\n"
        "from kubernetes_asyncio.client.models.v1_pod import V1Pod\n"
        "assert V1Pod.__name__ == 'V1Pod'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
