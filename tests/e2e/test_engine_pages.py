"""Where requests go by the pages that engines send, and what the picker says of a page with a value that cannot be read."""

import json
from pathlib import Path
from typing import Any

from loadtest.demo.stack import get
from tests.e2e.cluster import COMPLETIONS, Cluster, ask, completion, eventually
from tests.e2e.echo import gateway, picker_for, servers

PAGES = Path(__file__).parents[1] / "epp" / "plugins" / "extractors" / "pages"
IDLE = PAGES.joinpath("vllm-dp2-idle.txt").read_bytes()
LOADED = PAGES.joinpath("vllm-dp2-load.txt").read_bytes()
# The second of two data-parallel ranks has 6 waiting requests; and one value is not a number.
BUSY = LOADED.replace(b'num_requests_waiting{engine="1",model_name="tiny"} 0.0', b'num_requests_waiting{engine="1"} 6.0')
PARTLY = BUSY.replace(b'num_requests_running{engine="0",model_name="tiny"} 0.0', b'num_requests_running{engine="0"} NaN')


def test_requests_go_to_the_idle_data_parallel_server_and_a_bad_value_is_named_once(cluster: Cluster) -> None:
    with servers(3) as started:
        for server, page in zip(started, (BUSY, IDLE, PARTLY), strict=True):
            server.page = page
        picker = picker_for(cluster, started)
        port = gateway(cluster, picker.grpc)

        def state() -> dict[str, Any]:
            return json.loads(get(picker.metrics, "/debug/state") or b"{}")

        assert eventually(lambda: [each["state"] for each in state().get("endpoints", {}).values()] == ["fresh"] * 3)
        assert [ask(port, COMPLETIONS, completion(f"{n} a")).status for n in range(12)] == [200] * 12
        assert [server.requests for server in started] == [0, 12, 0]
        scraped = {each["address"]: each["scraped"] for each in state()["endpoints"].values()}
        waiting = [scraped[server.address]["waiting_requests"] for server in started]
        assert waiting == [6, 0, 6]
        assert "running_requests" not in scraped[started[2].address]
        (found,) = [finding for finding in state()["findings"] if "metrics" in finding["rule"]]
        assert (found["rule"], found["severity"]) == ("metrics-absent", "warning")
        assert "vllm:num_requests_running: nan is not a count of 0 or more" in found["evidence"]
        assert eventually(lambda: picker.counter("scrapes_total") > 10)
        assert picker.counter("datalayer_extract_errors_total") == 1.0
