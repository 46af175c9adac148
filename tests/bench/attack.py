"""How often an attacker tells which of two requests another tenant has sent: `make bench-attack` [ARGS="--tries 10000 --only prefix"].

The first rows attack the picker's code in this process, without a clock (`tests.attacker`): what servers are chosen and what answers say.
The rows `times` go through Envoy and a picker with the built-in configuration to simulated servers, whose times of answers tell what they
have cached. There the attacker also sees times, and sends its two requests in either order, by lot.

`own`: the attacker has the victim's own tenant, which shows that the attack works. `no salts`: it has another tenant, without
`cacheSalt`. `salts`: with `cacheSalt: tenant`. A rate of 0.5 is chance. The interval is the 95 % one of Wilson. Exit status 1: with
salts, a rate is more than SIGMAS standard deviations above chance.
"""

import argparse
import functools
import http.client
import json
import math
import random
import sys
import time
from typing import Final

from epp.request.tenants import Salts
from loadtest.demo.stack import LOOPBACK, PICKER_CONFIG, picker_config
from tests.attacker import ATTACKER, KINDS, VICTIM, Features, attack, guessed, interval, picker, plan
from tests.e2e.cluster import COMPLETIONS, Cluster
from tests.e2e.echo import gateway

TIMES: Final = "times"
SIGMAS: Final = 3.0
STEP: Final = 12  # tries come in multiples of it
SERVERS: Final = 4
WORDS: Final = "word " * 4000
ENGINE: Final = ("--prefill-us-per-token", "2", "--decode-ms", "1", "--kv-blocks", "200000")


class Client:
    """Sends requests of one tenant through a gateway, one after the other."""

    def __init__(self, port: int, tenant: str) -> None:
        self._connection = http.client.HTTPConnection(LOOPBACK, port, timeout=30)
        self._headers = {"content-type": "application/json", "x-tenant": tenant}

    def send(self, prompt: str) -> tuple[float, str]:
        """Returns the time until the answer, and what it says besides ids, times and what it counts as cached."""
        body = json.dumps({"model": "sim-model", "prompt": prompt, "max_tokens": 1})
        begun = time.perf_counter()
        self._connection.request("POST", COMPLETIONS, body, self._headers)
        answer = self._connection.getresponse()
        took_s, content = time.perf_counter() - begun, answer.read()
        usage = json.loads(content).get("usage")
        return took_s, f"{answer.status} {len(content)} {usage} {sorted(name for name, _ in answer.getheaders())}"


def timed(attacker: Client, victim: Client, number: int, secret: int, rng: random.Random) -> Features:
    """Makes one try. Returns what the attacker sees of it."""
    prompts = [f"{number}-{which} {WORDS}" for which in range(2)]
    victim.send(prompts[secret])
    order = [0, 1]
    rng.shuffle(order)
    seen = {which: attacker.send(prompts[which]) for which in order}
    (first_s, first), (second_s, second) = seen[0], seen[1]
    ratio = round(2 * math.log2(first_s / second_s))
    times = {f"time {which}": f"{round(2 * math.log2(seen[which][0]))} {order}" for which in order}
    answers = {"first": first, "second": second, "alike": f"{first == second}"}
    return {"faster": f"{first_s < second_s}", "ratio": f"{ratio}", "ordered ratio": f"{ratio} {order}"} | times | answers


def through_envoy(tries: int, salted: bool, attacker: str, seed: int) -> float:
    """Returns how many guesses are right."""
    rng = random.Random(seed)
    with Cluster() as cluster:
        fleet = cluster.fleet(SERVERS, *ENGINE)
        secret_file = cluster.directory / "secret"
        secret_file.write_text("a secret of this benchmark")
        tenants = {"from": [{"header": "x-tenant", "trusted": True}], "cacheSalt": "tenant" if salted else "none"}
        config = picker_config(fleet.file, {**PICKER_CONFIG, "tenants": tenants})
        chosen = cluster.picker(fleet.file, f"--prefix-secret-file={secret_file}", workers=1, config_text=config)
        port = gateway(cluster, chosen.grpc)
        clients = Client(port, attacker), Client(port, VICTIM)
        return guessed([(timed(*clients, number, secret, rng), secret) for number, (_, secret) in enumerate(plan(tries, rng))])


def in_process(name: str, tries: int, salted: bool, attacker: str, seed: int) -> float:
    """Returns how many guesses are right."""
    return attack(picker(KINDS[name], Salts(seed) if salted else None), KINDS[name], tries, attacker, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=10_000, help="of each row with salts; the others have a tenth")
    parser.add_argument("--only", nargs="*", choices=[*KINDS, TIMES], default=[*KINDS, TIMES], help="which rows")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    leaks = False
    print("request     tenants     rate  95 % interval")
    for name in given.only:
        for how, salted, attacker in (("own", True, VICTIM), ("no salts", False, ATTACKER), ("salts", True, ATTACKER)):
            tries = -(-(given.tries if how == "salts" else given.tries // 10) // STEP) * STEP
            run = through_envoy if name == TIMES else functools.partial(in_process, name)
            right = run(tries, salted, attacker, given.seed)
            low, high = interval(right, tries)
            leak = how == "salts" and right / tries > 0.5 + SIGMAS * 0.5 / math.sqrt(tries)
            print(f"{name:11} {how:9} {right / tries:6.4f}  {low:.4f} to {high:.4f}  {tries} tries{'  LEAK' if leak else ''}", flush=True)
            leaks |= leak
    return int(leaks)


if __name__ == "__main__":
    sys.exit(main())
