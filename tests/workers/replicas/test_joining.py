from collections.abc import Iterator, Mapping

from epp.learning.state import UnusableModel
from tests.workers.replicas.live import Replica
from tests.workers.replicas.messages import message
from workers.replicas.copying import Learned, model_parts, read, take_over
from workers.replicas.joining import AGAIN_S, COPIES_MAX, COPIES_S, COPY_S, Joining
from workers.replicas.reading import decode
from workers.replicas.wire import MESSAGE_BYTES_MAX, ONLY, pool_key

X = "10.0.0.1:8000"


def replica(name: str, *, wants: bool = False, secret: int = 1) -> Replica:
    made = Replica("unix:///none", name, {X: 0}, secret=secret)
    made.exchange.parts.places.refresh()
    made.exchange.joining.wants = wants
    made.exchange.joining.begin(0.0)
    return made


def hears(replica: Replica, data: bytes, now: float = 0.0) -> None:
    """Lets a replica hear another one, and begin a copy for it if it should."""
    if (heard := replica.exchange.others.receive(data, now)) is not None:
        replica.exchange.joining.asked(heard, now, 1)


def sent(joining: Joining) -> list[str]:
    """Returns who gets slices now."""
    names = []
    while (part := joining.next_slice()) is not None:
        names.append(part[0])
    return names


def test_the_first_of_those_that_want_no_copy_sends_one_to_each_that_joins() -> None:
    b, c = replica("b"), replica("c")
    for each, other in ((b, "c"), (c, "b")):
        hears(each, message(other))
        hears(each, message("a1", wants=True))
        hears(each, message("a2", wants=True))
        hears(each, message("a1", 2, wants=True))
    assert sent(b.exchange.joining) == ["a1", "a2"]
    assert sent(c.exchange.joining) == []


def test_a_replica_with_another_secret_neither_gets_nor_blocks_a_copy() -> None:
    b = replica("b")
    hears(b, message("a", secret=2))
    hears(b, message("c", wants=True, secret=2))
    assert sent(b.exchange.joining) == []
    hears(b, message("d", wants=True))
    assert sent(b.exchange.joining) == ["d"]


def test_a_replica_that_wants_a_copy_itself_sends_none() -> None:
    b = replica("b", wants=True)
    hears(b, message("c", wants=True))
    assert sent(b.exchange.joining) == []


def test_a_copy_ends_with_its_last_slice_and_a_replica_wants_one_until_then() -> None:
    giver, joins = replica("b"), replica("c", wants=True)
    giver.teach(X)
    hears(giver, message("c", wants=True))
    part = giver.exchange.joining.next_slice()
    assert part is not None
    cut = part[1][:-1] + b"\xc2"  # msgpack: false
    joins.exchange.joining.take(cut, 0.0, 1)
    assert joins.exchange.joining.wants
    assert joins.holds(X) == giver.holds(X) > 0
    joins.exchange.joining.take(part[1], 0.0, 1)
    assert not joins.exchange.joining.wants
    assert giver.exchange.joining.next_slice() is None


def test_a_replica_to_which_nobody_sends_gives_up() -> None:
    joining = replica("c", wants=True).exchange.joining
    joining.look(COPY_S)
    assert joining.wants
    joining.look(COPY_S + 0.1)
    assert not joining.wants


def test_wishes_for_ever_cause_a_bounded_number_of_copies() -> None:
    b = replica("b")
    copies = 0
    for sequence in range(1, 1000):
        now = sequence * COPIES_S / 1000
        name = f"liar-{sequence % 200}"
        b.exchange.others.expire(now)
        hears(b, message(name, sequence, wants=True), now)
        copies += len(sent(b.exchange.joining))
    assert copies == COPIES_MAX
    assert b.exchange.others.refused["copies"] > 0
    b.exchange.others.expire(2 * COPIES_S)
    hears(b, message("late", 1, wants=True), 2 * COPIES_S)
    assert sent(b.exchange.joining) == ["late"]


def test_one_replica_gets_no_second_copy_at_once() -> None:
    b = replica("b")
    hears(b, message("c", 1, wants=True))
    assert sent(b.exchange.joining) == ["c"]
    hears(b, message("c", 2, wants=True), AGAIN_S - 0.1)
    assert sent(b.exchange.joining) == []
    hears(b, message("c", 3, wants=True), AGAIN_S)
    assert sent(b.exchange.joining) == ["c"]


def test_a_replica_that_is_gone_gets_no_further_slice() -> None:
    b = replica("b")
    hears(b, message("c", 1, wants=True))
    b.exchange.others.expire(10.0)
    assert sent(b.exchange.joining) == []


def test_parts_beyond_the_size_of_a_copy_are_not_read() -> None:
    joins = replica("c", wants=True)
    for _ in range(9):
        joins.exchange.joining.take(b"garbage", 0.0, 1)
    assert joins.exchange.others.refused == {"malformed": 4}, "a model and the index's one slice: two senders may begin"


def test_messages_say_whether_a_copy_is_wanted() -> None:
    joins = replica("c", wants=True)
    data = joins.exchange._message(0.0)
    assert data is not None and decode(data).wants
    joins.exchange.joining.wants = False
    data = joins.exchange._message(1.0)
    assert data is not None and not decode(data).wants


class Learning:
    """Stands in for the keeper of the latency model."""

    def __init__(self, state: bytes = b"") -> None:
        self.state = state
        self.adopted: list[tuple[bytes, dict[int, int]]] = []

    def learned(self) -> bytes:
        return self.state

    def adopt(self, data: bytes, slots: Mapping[int, int]) -> bool:
        if data == b"damaged":
            raise UnusableModel("the test says so")
        self.adopted.append((data, dict(slots)))
        return True


class OneModel:
    """The model of the only pool."""

    def __init__(self, learned: Learned) -> None:
        self._learned = learned

    def all(self) -> Iterator[tuple[int, Learned]]:
        yield ONLY, self._learned

    def of(self, pool: int) -> Learned | None:
        return self._learned if pool == ONLY else None


def model_copy(state: bytes, here: dict[str, int]) -> tuple[Replica, Learning, list[bytes]]:
    """Copies from a replica with this model to one with these endpoints. Returns the latter, its model, and the parts of the copy."""
    giver, joins = replica("b"), Replica("unix:///none", "c", here)
    joins.exchange.parts.places.refresh()
    taker = Learning()
    joins.exchange.joining.models, giver.exchange.joining.models = OneModel(taker), OneModel(Learning(state))
    hears(giver, message("c", wants=True))
    parts = []
    while (part := giver.exchange.joining.next_slice()) is not None:
        parts.append(part[1])
        joins.exchange.joining.take(part[1], 0.0, 1)
    assert not joins.exchange.joining.wants
    return joins, taker, parts


def test_a_replica_that_joins_gets_the_latency_model_with_its_own_slots() -> None:
    joins, taker, _ = model_copy(b"model", {X: 5})
    assert taker.adopted == [(b"model", {0: 5})]
    assert joins.exchange.joining.adopted == 1
    _, taker, _ = model_copy(b"model", {"10.0.0.9:8000": 5})
    assert taker.adopted == [(b"model", {})], "endpoints that it does not know are left out"


def test_a_replica_that_has_learned_nothing_gives_no_model() -> None:
    _, taker, parts = model_copy(b"", {X: 5})
    assert (len(parts), taker.adopted) == (1, [])


def test_a_damaged_or_enormous_model_changes_nothing() -> None:
    joins, taker, _ = model_copy(b"damaged", {X: 5})
    assert joins.exchange.others.refused == {"malformed": 1}
    assert taker.adopted == []
    _, taker, parts = model_copy(bytes(MESSAGE_BYTES_MAX), {X: 5})
    assert (len(parts), taker.adopted) == (1, [])


class Models:
    """Stands in for the models of several pools."""

    def __init__(self, **models: Learning) -> None:
        self._models = {pool_key(name): model for name, model in models.items()}

    def all(self) -> Iterator[tuple[int, Learned]]:
        yield from self._models.items()

    def of(self, pool: int) -> Learned | None:
        return self._models.get(pool)


def test_each_pool_gets_its_own_model_and_pools_that_only_one_replica_knows_do_no_harm() -> None:
    giver, joins = replica("b"), Replica("unix:///none", "c", {X: 5})
    there, here = giver.exchange.parts.places, joins.exchange.parts.places
    for places, names in ((there, ("one", "two")), (here, ("one", "three"))):
        places.refresh()
        places.of_pool = {pool_key(name): places.slots for name in names}
    one, three = Learning(), Learning()
    parts = list(model_parts(Models(one=Learning(b"first"), two=Learning(b"second"), quiet=Learning()), there))
    assert [take_over(read(part), Models(one=one, three=three), here) for part in parts] == [True, False]  # type: ignore[arg-type]
    assert one.adopted == [(b"first", {0: 5})] and three.adopted == []
