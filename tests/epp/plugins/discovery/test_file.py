import msgspec
import pytest

from epp.plugins.discovery import FileDiscovery


def test_a_path_is_required_and_watching_is_off_by_default() -> None:
    made = FileDiscovery("f", msgspec.convert({"path": "e.yaml"}, FileDiscovery.Params))
    assert (made.path, made.watch) == ("e.yaml", False)
    watched = msgspec.convert({"path": "e.yaml", "watchFile": True}, FileDiscovery.Params)
    assert FileDiscovery("f", watched).watch


@pytest.mark.parametrize("params", [{}, {"path": ""}, {"path": "a", "poll": 1}])
def test_missing_empty_and_unknown_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(params, FileDiscovery.Params)
