"""An ObjectsWatch of one pool that reads its directory when it is told to."""

from typing import Any

from tests.reports import Reports
from workers.supervisor.kube.object_files import ANY_POOL, Folder
from workers.supervisor.kube.object_kinds import Found, PoolName
from workers.supervisor.objects_watch import NOTHING, ObjectsWatch


class FolderWatch(ObjectsWatch):
    """Reads the directory in the thread of the test. `folder`: "" without a directory."""

    def __init__(self, folder: str, *documents: Any, report: Reports, pool: PoolName = ANY_POOL, **more: Any) -> None:
        super().__init__(*documents, report=report, **more)
        self._folder = Folder(folder, report, only=pool) if folder else None

    def start(self, *, successor: bool, directory: Found | None = NOTHING) -> None:
        if self._folder is not None:
            found = self._folder.reload() if successor else self._folder.load()
            directory = found[0] if found is not None else None
        super().start(successor=successor, directory=directory)

    def look(self) -> None:
        """Reads the directory again and publishes the changes."""
        if self._folder is None:
            self.look_for_places()
        elif (found := self._folder.reload()) is not None:
            self.use_directory(found[0])
