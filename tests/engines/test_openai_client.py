"""OpenAI's Python client, unchanged, against a tenant's budget. It needs no engine, but is installed with vLLM."""

import json
import subprocess
from typing import Any

from tests.e2e.cluster import COMPLETIONS, Cluster
from tests.e2e.test_budgets import entrances
from tests.engines import setup

CALLS = 8
CLIENT = """
import json, sys, time, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", default_headers={"x-tenant": sys.argv[2]}, max_retries=2)
for _ in range(int(sys.argv[3])):
    begun = time.monotonic()
    try:
        answer = client.completions.with_raw_response.create(model="m", prompt="x" * 200, max_tokens=1)
        found = {"status": answer.status_code, "retries": answer.retries_taken}
    except openai.RateLimitError as refused:
        found = {"status": refused.status_code, "text": str(refused), "left": refused.response.headers["x-ratelimit-remaining-tokens"]}
    print(json.dumps(found | {"seconds": time.monotonic() - begun}))
"""


def calls(port: int, tenant: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}{COMPLETIONS.removesuffix('/completions')}"
    command = [setup.PYTHON, "-c", CLIENT, url, tenant, str(CALLS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_the_client_waits_as_long_as_a_refusal_says_and_is_then_served(cluster: Cluster) -> None:
    with entrances(cluster) as (port,):
        waited = calls(port, "quick")
        assert [each["status"] for each in waited] == [200] * CALLS
        assert any(each["retries"] == 1 and each["seconds"] > 0.9 for each in waited)
        *_, last = calls(port, "acme")  # it would have to wait for longer than it is willing to
        assert last["status"] == 429 and last["seconds"] < 0.5
        assert "the budget of this tenant is used up: tokens per minute" in last["text"] and int(last["left"]) < 100
