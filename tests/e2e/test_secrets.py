"""The content of requests and answers is private: no part of it appears in the log, on a page or in a segment's name, even after errors."""

import os
from pathlib import Path

from loadtest.demo.stack import get
from tests.e2e.cluster import CHAT, COMPLETIONS, Cluster, ask, chat, completion

SECRET = "xyzzy-the-merger-is-off"
LEAKY = """
import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import DataProducer, Profile, ResponseReceived, Scorer, plugin
from epp.request import Request


def chokes(text: str) -> None:
    how = text.partition("by ")[2][:5]
    if how == "float":
        float(text)
    elif how == "table":
        {}[text]
    elif how == "utf-8":
        (text.encode() + b"\\xff").decode()


@plugin("leaky-scorer")
class Leaky(Scorer):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        chokes(request.prompt.canonical.decode("latin-1"))
        return np.zeros(len(candidates))


@plugin("leaky-listener")
class Listener(ResponseReceived):
    def response_received(self, request, decision, response) -> None:
        chokes(request.headers.get("authorization", ""))
"""
CONFIG = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: leaky-scorer
- type: leaky-listener
- {type: file-discovery, parameters: {path: FILE}}
dataLayer: {discovery: {pluginRef: file-discovery}}
"""


def test_no_word_of_a_request_leaves_the_picker_except_to_its_server(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(LEAKY)
    fleet = cluster.fleet(1, "--prefill-us-per-token", "1", "--decode-ms", "1")
    config = CONFIG.replace("FILE", str(fleet.file))
    picker = cluster.picker(fleet.file, f"--plugin-path={tmp_path}", "--log-level=debug", workers=1, config_text=config)
    port = cluster.envoy(picker, threads=1)

    def status_of(path: str, body: bytes, **headers: str) -> int:
        return ask(port, path, body, {"authorization": f"Bearer {SECRET}", **headers}).status

    texts = [f"{SECRET} by {how}" for how in ("heart", "float", "table", "utf-8")]
    assert [status_of(COMPLETIONS, completion(text, max_tokens=1)) for text in texts] == [200] * 4
    assert [status_of(CHAT, chat(texts[0], max_tokens=1), authorization=text) for text in texts] == [200] * 4
    wrong = f'{{"model": "m", "prompt": ["{SECRET}", 7, {{"{SECRET}": 1}}]'.encode()
    assert [status_of(COMPLETIONS, body) for body in (wrong, wrong + b"}", b"\xff" + wrong)] == [400] * 3
    decisions = get(picker.metrics, "/debug/decisions")
    assert decisions is not None and b'"refused":"invalid-body' in decisions
    log = picker.child.text()
    assert log.count('"event": "decision"') > 5 and log.count("fault") >= 6
    assert SECRET not in log + picker.page() + decisions.decode() + " ".join(os.listdir("/dev/shm"))
