"""A pools file: what it means, and every mistake in it (invalid_pools.txt), with the places of both pools."""

from textwrap import dedent

import pytest

from epp.config.findings import FINDINGS_MAX, ConfigErrors
from epp.config.pools_file import PATTERNS_MAX, POOLS_MAX, KubePool, PoolsFile, read
from tests.cases import cases
from tests.epp.config.loading import invalid

TEXT = """\
pools:
- name: llama
  port: 9102
  configFile: llama.yaml
  endpoints: ["10.0.0.1:8000", "[fd00::1]:8000"]
- name: qwen
  authorities: ["Qwen-EPP.*"]
  config: |
    plugins: [{type: queue-scorer}]
- name: small-models
  models: ["phi-*", "gemma-2b"]
  maxEndpoints: 8
defaults:
  configFile: default.yaml
  maxEndpoints: 64
"""


def ok(text: str) -> PoolsFile:
    return read(dedent(text), "pools.yaml")


def errors(text: str) -> list[str]:
    with pytest.raises(ConfigErrors) as refused:
        ok(text)
    return [str(error) for error in refused.value.errors]


def test_pools_have_the_defaults_of_their_file() -> None:
    file = ok(TEXT)
    llama, qwen, small = file.pools
    assert (llama.port, llama.config_file, llama.endpoints) == (9102, "llama.yaml", ("10.0.0.1:8000", "[fd00::1]:8000"))
    assert (qwen.authorities, qwen.config, qwen.config_file) == (("qwen-epp.*",), "plugins: [{type: queue-scorer}]\n", "")
    assert (small.models, small.config, small.config_file) == (("phi-*", "gemma-2b"), None, "default.yaml")
    assert [pool.max_endpoints for pool in file.pools] == [64, 64, 8]
    assert [pool.place.line for pool in file.pools] == [2, 6, 10]
    assert (llama.config_place.line, qwen.config_place.line, small.config_place.line) == (4, 8, 14)
    assert file.warnings == ()


def test_a_pool_in_kubernetes_names_an_inference_pool_or_selects_pods() -> None:
    file = ok("""
        pools:
        - {name: a, port: 9102, poolName: llama, namespace: models}
        - {name: b, port: 9103, selector: "app in (x, y)", targetPorts: [8000, 8001, 8000]}
        - {name: c, port: 9104}
    """)
    assert [pool.kube for pool in file.pools] == [
        KubePool("models", "llama", own_port=9102),
        KubePool("", "", "app in (x, y)", (8000, 8001), 9103),
        None,
    ]


def test_the_choice_numbers_pools_in_the_order_of_the_file() -> None:
    choice = ok(TEXT).choice()
    assert (choice.of_stream(9102, ""), choice.of_stream(1, "qwen-epp.svc"), choice.of_model("phi-4")) == (0, 1, 2)


def test_a_file_in_json_means_the_same() -> None:
    assert ok('{"pools": [{"name": "a", "port": 9102}]}').pools[0].port == 9102


@pytest.mark.parametrize(
    ("pools", "shares"),
    [
        ("{name: a, port: 1}, {name: b, port: 2}", False),
        ("{name: a, port: 1}, {name: b, port: 2, models: [m]}", True),
        ("{name: a, port: 1}, {name: b, authorities: [x]}", True),
        ("{name: a, port: 1}, {name: b}", True),
    ],
)
def test_only_pools_that_are_not_found_by_their_port_need_another_one(pools: str, shares: bool) -> None:
    assert ok(f"pools: [{pools}]").shares_port is shares


@cases(("text", "expected"), invalid("invalid_pools.txt"))
def test_a_mistake_is_an_error_that_names_its_place_and_that_of_the_other_pool(text: str, expected: list[str]) -> None:
    assert [error.removeprefix("pools.yaml:") for error in errors(text)] == expected


def test_a_file_without_a_document_is_an_error() -> None:
    assert errors("") == ["pools.yaml: error[no-document]: there is no document: the text is empty or has only comments"]


def listing(count: int) -> str:
    return "pools:\n" + "\n".join(f"- {{name: p{number}, models: [m{number}]}}" for number in range(count))


def test_as_many_pools_as_a_picker_serves_are_accepted_and_a_thousand_more_are_refused() -> None:
    assert len(ok(listing(POOLS_MAX)).pools) == POOLS_MAX
    assert errors(listing(2 * POOLS_MAX)) == [
        f"pools.yaml:{POOLS_MAX + 2}:3: error[too-many-pools]: pools: {2 * POOLS_MAX} pools; a picker serves at most {POOLS_MAX} "
        "(give the others to another picker)"
    ]


def test_matchers_with_a_star_are_limited_because_new_names_are_compared_with_each() -> None:
    text = "pools: [{name: a, models: [%s]}]"
    assert ok(text % ", ".join(f"m{number}-*" for number in range(PATTERNS_MAX))).pools
    (error,) = errors(text % ", ".join(f"m{number}-*" for number in range(PATTERNS_MAX + 1)))
    assert f"error[too-many-pools]: more than {PATTERNS_MAX} of kind model have a '*'" in error


def test_very_many_mistakes_end_soon() -> None:
    assert len(errors("pools:\n" + "- {name: a, port: 1, models: [x]}\n" * POOLS_MAX)) == FINDINGS_MAX


@pytest.mark.parametrize(
    ("pools", "warning"),
    [
        ("{name: a, models: [phi-3-*]}, {name: b, models: [phi-*]}", ""),  # the special case first is meant so
        ("{name: a, models: [phi-*, '*-mini']}", ""),  # within one pool it does not matter
        ("{name: a, models: [phi-*]}, {name: b, models: [phi-3]}", ""),  # an exact one counts first
        ("{name: a, models: [phi-*]}, {name: b, models: [qwen-*]}", ""),
        (
            "{name: a, models: [phi-*]}, {name: b, models: ['*-mini']}",
            "pools.yaml:1:56: warning[two-matchers]: the model '*-mini' of pool 'b' can match what 'phi-*' of pool 'a' in line 1 matches; "
            "pool 'a' then gets the request, because it is listed first",
        ),
        (
            "{name: a, port: 1}, {name: b}",
            "pools.yaml:1:36: warning[only-metadata]: pool 'b' has no port, authority or model: only requests with the metadata "
            "llm-d.ai/pool: b reach it (give it one, unless the gateway sets these metadata)",
        ),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(pools: str, warning: str) -> None:
    assert [str(each) for each in ok(f"pools: [{pools}]").warnings] == ([warning] if warning else [])


def test_a_pool_cannot_have_a_port_that_the_picker_needs_itself() -> None:
    file = ok("pools:\n- {name: a, port: 9002}\n- {name: b, port: 9003}\n- {name: c, models: [m]}")
    file.check_ports({9090: "--metrics-port"})
    with pytest.raises(ConfigErrors) as refused:
        file.check_ports({9002: "--grpc-port", 9003: "--grpc-health-port"})
    assert [str(error) for error in refused.value.errors] == [
        "pools.yaml:2:19: error[two-pools]: pool 'a': port 9002 is that of --grpc-port, too (give the pool or --grpc-port another port)",
        "pools.yaml:3:19: error[two-pools]: pool 'b': port 9003 is that of --grpc-health-port, too "
        "(give the pool or --grpc-health-port another port)",
    ]
