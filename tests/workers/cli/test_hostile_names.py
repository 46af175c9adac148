"""Names that strangers choose, in the output of each command: escaped, so that they neither control a terminal nor forge a line."""

import ast
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from epp.decision.explain import Cached, Candidate, Explanation, Filtered, Profiled, Scored
from tests.workers.supervisor.pages.state.looks import endpoint, look, of
from workers.cli import main
from workers.cli.doctor import command as doctor
from workers.cli.doctor.running import Running
from workers.cli.top.view import screen
from workers.host.printable import printable, printable_lines
from workers.shared.doctor_report import Finding
from workers.supervisor.pages.decisions import Opened, encoded

FORGED = "error  forged"
# Escape sequences of 7 and of 8 bits, line ends of all kinds, an overriding direction, a hidden character, a lone surrogate, a tag
HOSTILE = f"x\x1b]0;t\x07\x9b2J\r\n{FORGED}\x85\u2028\u202e\u200b\u2066\x7f\ud800\U000e0041y"
SAFE = r"x\u001b]0;t\u0007\u009b2J\r\n" + FORGED + r"\u0085\u2028\u202e\u200b\u2066\u007f\ud800\udb40\udc41y"
NAME = HOSTILE.replace("\ud800", "")  # JSON and YAML have no lone surrogates
SAFE_NAME = SAFE.replace(r"\ud800", "")
CLI = Path(__file__).parents[3] / "workers" / "cli"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def safe(text: str) -> bool:
    """Whether a text has only what a terminal shows, and no line that a name has made."""
    return text.replace("\n", "").isprintable() and not any(line.startswith(FORGED) for line in text.split("\n"))


def test_all_that_a_terminal_obeys_or_hides_is_escaped_and_nothing_else() -> None:
    assert printable(HOSTILE) == SAFE and SAFE.isprintable()
    assert printable(SAFE) == SAFE
    for text in ("", "gpt-4o mini", "Größe 模型 модель 🦊 <b>[red]\\"):
        assert printable(text) == text
    assert printable_lines(f"a\tb\n{NAME}\n") == f"a\\tb\n{SAFE_NAME.split(chr(92) + 'n')[0]}\n" + (
        FORGED + SAFE_NAME.split(FORGED)[1] + "\n"
    )


def test_escapes_in_json_change_no_value() -> None:
    text = msgspec.json.encode({"name": NAME}).decode()
    assert "\u202e" in text and "\x9b" in text
    assert json.loads(printable_lines(text)) == {"name": NAME}


def explanation() -> Explanation:
    score = Scored(NAME, 1.0, 0.5, 0.5)
    candidate = Candidate(
        endpoint=NAME,
        address=NAME,
        state="fresh",
        total=1.0,
        scores=[score],
        values={NAME: 1.0},
        picked=True,
        latency=NAME,
        predicted_tokens=1,
        prefix_cache=NAME,
    )
    profile = Profiled(
        profile=NAME,
        shadow=False,
        considered=1,
        filters=[Filtered(NAME, 1, 1, [NAME])],
        candidates=[candidate],
        more=0,
        picker=NAME,
        picked=[NAME],
        margin=0.5,
        runner_up=NAME,
        tied=1,
    )
    return Explanation(
        worker=0,
        request_id=NAME,
        model=NAME,
        target_model=NAME + "2",
        flow=NAME,
        priority=0,
        body_bytes=1,
        targets=[NAME],
        primary=NAME,
        headers={NAME: NAME},
        profiles=[profile],
        cached=Cached(1, 2, 3),
        left_out=[NAME],
        unscored=[NAME],
    )


@pytest.fixture
def picker() -> Iterator[str]:
    """The address of a metrics port with hostile decisions. Its other pages are refusals with a hostile text."""
    opened = Opened(
        at=0,
        worker=0,
        configuration=1,
        reason=NAME,
        target=NAME,
        runner_up=NAME,
        margin=0.1,
        cached_tokens=None,
        first_token_s=None,
        explanation=explanation(),
    )
    pages = {"/debug/decisions": encoded([explanation()]), "/debug/receipt": msgspec.json.encode(opened)}

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            self.send_response(200 if page else 403)
            self.end_headers()
            self.wfile.write(page or NAME.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_explain_shows_names_escaped_in_text_and_unchanged_in_json(picker: str) -> None:
    done = run("explain", f"--url={picker}")
    assert done.exit_code == 0 and safe(done.output), done.output
    assert done.output.count(SAFE_NAME) > 10
    table = [line for line in done.output.split("\n") if "→" in line or "total" in line.split()]
    assert len({line.rindex(" ") for line in table}) <= 2, "escaped cells keep the columns"
    done = run("explain", f"--url={picker}", "--json")
    assert safe(done.output)
    assert json.loads(done.output)["decisions"][0]["model"] == NAME


def test_explain_shows_a_receipt_escaped(picker: str) -> None:
    done = run("explain", f"--url={picker}", "receipt")
    assert done.exit_code == 0 and safe(done.output) and f"sent to {SAFE_NAME}: {SAFE_NAME}" in done.output
    done = run("explain", f"--url={picker}", "receipt", "--json")
    assert safe(done.output) and json.loads(done.output)["target"] == NAME


def test_explain_escapes_offline_too(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"model": NAME, "prompt": "x"}))
    servers = [{"name": NAME, "address": "10.0.0.1", "port": "80"}]
    (tmp_path / "endpoints.yaml").write_text(yaml.safe_dump({"endpoints": servers}))
    files = (f"--request={tmp_path / 'request.json'}", f"--endpoints-file={tmp_path / 'endpoints.yaml'}")
    done = run("explain", *files, f"--header=x-request-id: {NAME}")
    assert safe(done.output), done.output
    assert f"model {SAFE_NAME}" in done.output
    assert safe(run("explain", f"--header={HOSTILE}", *files).output)


def test_top_shows_names_escaped() -> None:
    figures = of(look(endpoints=[endpoint(NAME)]))
    console = Console(file=io.StringIO(), width=400, highlight=False)
    console.print(screen(figures, 400, None))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert safe(shown) and SAFE_NAME in shown


def test_doctor_shows_findings_escaped_and_no_line_of_a_name_looks_like_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding("rule", "error", f"one {NAME}", f"{NAME}\nfix: run evil", f"look {NAME}")
    state: dict[str, Any] = {"version": 1, "endpoints": {}, "settings": {"flags": {}}}
    monkeypatch.setattr(doctor, "running", lambda *_: Running(None, "http://x", state, [found]))
    done = run("doctor")
    assert safe(done.output)
    assert [line for line in done.output.split("\n") if line.startswith("         fix:")] == [f"         fix: look {SAFE_NAME}"]
    done = run("doctor", "--json")
    assert safe(done.output) and json.loads(done.output)["findings"][0]["title"] == found.title


def test_doctor_shows_the_refusal_of_a_picker_escaped(picker: str) -> None:
    done = run("doctor", f"--url={picker}")
    assert safe(done.output) and "metrics-port" in done.output


CONFIG = {
    "apiVersion": "llm-d.ai/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [{"type": "queue-scorer", "name": NAME}, {"type": "random-picker"}],
    "schedulingProfiles": [{"name": NAME, "plugins": [{"pluginRef": NAME, "weight": 0}]}],
}


def test_check_shows_findings_and_the_effective_configuration_escaped(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    done = run("config", "check", str(tmp_path / "config.yaml"))
    assert done.exit_code == 0 and safe(done.output), done.output
    assert f"scorer '{SAFE_NAME}' has weight 0" in done.stderr
    assert yaml.safe_load(done.stdout)["schedulingProfiles"][0]["name"] == NAME
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({**CONFIG, NAME: 1}))
    done = run("config", "check", str(tmp_path / "bad.yaml"))
    assert done.exit_code == 78 and safe(done.output) and SAFE_NAME in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "plugins", NAME),
        ("record", "start", f"--run-dir={NAME}"),
        ("record", "export", "--jsonl=-", NAME),
        ("record", "replay", NAME),
        ("top", "--once", f"--run-dir={NAME}"),
        ("doctor", f"--run-dir={NAME}"),
        ("doctor", f"--kv-events={NAME}"),
        ("doctor", f"--gateway-config={NAME}"),
        ("config", "reload", f"--run-dir={NAME}"),
        ("size", f"--trace={NAME}"),
        (NAME,),
        ("explain", f"--{NAME}"),
    ],
    ids=lambda arguments: " ".join(arguments[:2])[:20],
)
def test_errors_name_the_culprit_escaped(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.exit_code != 0 and done.output and safe(done.output), done.output


def test_commands_print_through_one_module() -> None:
    """`click.echo` and `print` do not escape."""
    found = []
    for file in CLI.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if name in ("click.echo", "click.secho", "print") and file.name != "output.py":
                found.append(f"{file.relative_to(CLI)}:{call.lineno}: use echo of workers.cli.output instead of {name}")
    assert not found
