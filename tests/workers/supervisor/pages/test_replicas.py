from epp.metrics import Metric
from epp.metrics import replicas as names
from tests.workers.replicas.live import Replica
from tests.workers.replicas.messages import message
from workers.supervisor.pages.sections import replica_figures

SHOWN = [metric for metric in vars(names).values() if isinstance(metric, Metric)]


def test_every_metric_of_replicas_is_shown_with_its_labels() -> None:
    replica = Replica("unix:///none", "a", {"10.0.0.1:8000": 0}, secret=2)
    now = 100.0
    replica.exchange.others.receive(message("b", 2, {1: (3, 0), 2: (4, 0)}), now)
    replica.exchange.others.receive(message("b", 1), now)
    replica.exchange.failures["slow"] += 1
    rows = {metric: dict(rows) for metric, labels, rows in replica_figures(replica.exchange, now + 0.5)}
    assert set(rows) == set(SHOWN)
    assert rows[names.FOREIGN] == {(): 1.0}
    assert rows[names.REPLICAS] == {(): 2.0}
    assert rows[names.AGE] == {("b",): 0.5}
    assert rows[names.REQUESTS] == {("b",): 7.0}
    assert rows[names.DROPPED][("old",)] == 1.0
    assert rows[names.STORE_ERRORS] == {("slow",): 1.0}
    assert rows[names.CONNECTED] == {(): 0.0}
    assert rows[names.MESSAGES] == {("sent",): 0.0, ("received",): 1.0}
