"""Says where the small recording is that a picker always keeps, for `epp explain`."""

import os
import tempfile
from typing import Final

from workers.host.options import Options

OFF: Final = "none"  # the value of --record-dir without any recording


def recent_folder(options: Options) -> str:
    """Returns the folder of the small recording; "" if --record-dir names another one, or none, or if no folder can be written.

    With --state-dir it is there, and stays after the picker's end. Else it is a temporary folder of the instance.
    """
    if options.record_dir:
        return ""
    if options.state_dir:
        return os.path.join(options.state_dir, "recent")
    try:
        return os.path.join(tempfile.gettempdir(), f"epp-recent-{options.instance}")
    except FileNotFoundError:
        return ""
