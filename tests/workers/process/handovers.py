"""What an instance of a test passes on to the next program."""

import os

import msgspec

from epp.config.load import load
from workers.process.generations import Bundle
from workers.process.handover import Handover, gathered
from workers.process.instance import Instance
from workers.process.layout import Layout

QUEUE = "plugins: [{type: queue-scorer}]\n"


def bundle(instance: Instance, text: str) -> Bundle:
    return Bundle(7, "c.yaml", text, "", {}, instance.layout.names, 1.0)


def handover(instance: Instance, *, slot: int = -1) -> Handover:
    """The handover with descriptors of its own, as an exec would give them."""
    names = instance.layout.names
    layout = Layout(instance.options, load(QUEUE, "test"), names)
    found = gathered(instance, layout.described(), kept=[(7, 0)], highest=9, names=names, workers=2, slot=slot)
    return msgspec.structs.replace(
        found,
        words=os.dup(found.words),
        roll=os.dup(found.roll),
        lock=os.dup(found.lock),
        sockets=[os.dup(number) for number in found.sockets],
        files=[os.dup(number) for number in found.files],
    )
