"""The files in deploy/ equal the ones that the tests use, and they load."""

import subprocess
from pathlib import Path

import pytest
import yaml

from epp.config.load import DEFAULT_TEXT, load
from loadtest.demo import envoy_config
from loadtest.demo.children import python
from loadtest.demo.envoy_config import PickerTls
from loadtest.demo.stack import PICKER_CONFIG, envoy_path, picker_config
from tests.e2e.cluster import run

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_the_shipped_envoy_files_equal_the_tested_configuration() -> None:
    assert yaml.safe_load((DEPLOY / "envoy.yaml").read_text()) == envoy_config.bootstrap(tls=PickerTls())
    listed = [("10.0.0.1", 8000), ("10.0.0.2", 8000)]
    assert yaml.safe_load((DEPLOY / "envoy-retry.yaml").read_text()) == envoy_config.bootstrap(listed=listed, tls=PickerTls())


@pytest.mark.parametrize("tls", [None, PickerTls()])
def test_envoy_accepts_the_configuration(tmp_path: Path, tls: PickerTls | None) -> None:
    file = tmp_path / "envoy.yaml"
    servers = [("127.0.0.1", 8000), ("127.0.0.1", 8001)]
    file.write_text(envoy_config.to_yaml(envoy_config.bootstrap(tls=tls, round_robin=(("127.0.0.1", 8081), servers))))
    done = subprocess.run([envoy_path(), "--mode", "validate", "-c", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_envoys_message_timeout_is_longer_than_the_longest_queue_time() -> None:
    assert envoy_config.MESSAGE_TIMEOUT_S > 60


def test_tls_to_the_picker_uses_http2_and_verifies_with_a_given_ca() -> None:
    config = envoy_config.bootstrap(tls=PickerTls("/ca.crt", "picker"))
    picker = next(c for c in config["static_resources"]["clusters"] if c["name"] == envoy_config.PICKER_CLUSTER)
    context = picker["transport_socket"]["typed_config"]
    assert context["sni"] == "picker"
    assert context["common_tls_context"]["alpn_protocols"] == ["h2"]
    assert context["common_tls_context"]["validation_context"] == {"trusted_ca": {"filename": "/ca.crt"}}


def test_the_default_configuration_is_the_built_in_one_with_a_file() -> None:
    shipped = load((DEPLOY / "config" / "default.yaml").read_text(), "default.yaml").document
    built_in = load(DEFAULT_TEXT, "built in").document
    assert [p for p in shipped["plugins"] if p["type"] != "file-discovery"] == built_in["plugins"]
    assert shipped["schedulingProfiles"] == built_in["schedulingProfiles"]


def test_epp_check_accepts_the_default_configuration() -> None:
    done = run(python("workers", "check", "--quiet", str(DEPLOY / "config" / "default.yaml")))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_demo_uses_the_built_in_configuration(tmp_path: Path) -> None:
    used = load(picker_config(tmp_path / "endpoints.yaml"), "demo").document
    built_in = load(DEFAULT_TEXT, "built in").document
    assert used["schedulingProfiles"] == built_in["schedulingProfiles"]
    assert PICKER_CONFIG["kind"] == "EndpointPickerConfig"
