"""What one program hands to the next is received as it was sent, or refused."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.workers.instances import made
from tests.workers.process.handovers import QUEUE, bundle, handover
from workers.process.errors import StartError
from workers.process.handover import FORM, VARIABLE, Handover, received
from workers.process.instance import Instance


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    with made(tmp_path) as created:
        created.begin(bundle(created, QUEUE))
        yield created


def received_from(blob: bytes) -> Handover | None:
    file = os.memfd_create("test")
    os.write(file, blob)
    return received({VARIABLE: str(file)})


def test_a_handover_is_received_once_as_it_was_sent(instance: Instance) -> None:
    sent = handover(instance)
    given = received_from(msgspec.msgpack.encode(sent))
    assert given is not None
    assert msgspec.msgpack.encode(given) == msgspec.msgpack.encode(sent)
    assert received({}) is None


def test_a_handover_of_another_form_is_refused(instance: Instance) -> None:
    other = msgspec.structs.replace(handover(instance), form=FORM + 1)
    with pytest.raises(StartError, match="cannot take over"):
        received_from(msgspec.msgpack.encode(other))
    with pytest.raises(StartError, match="restart the picker"):
        received_from(b"\xc1")
