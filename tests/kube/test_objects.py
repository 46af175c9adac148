"""InferenceObjectives of the API server in both API groups: names, priorities and bands."""

from tests.e2e.cluster import Picker
from tests.kube.objects import LEGACY, NEW_DEFINITIONS, install, objective, uninstall
from tests.kube.table import Table
from tests.kube.world import World, until


def followed(world: World) -> tuple[Picker, Table]:
    world.pool()
    picker = world.picker()
    return picker, world.table(picker)


def bands(picker: Picker) -> set[int]:
    """The priorities for which the metrics page shows a band."""
    name = "llm_d_epp_flow_control_capacity_utilization_requests{"
    lines = [line for line in picker.page().splitlines() if line.startswith(name)]
    return {int(line.split('priority="')[1].split('"')[0]) for line in lines}


def test_objectives_have_their_priority_and_a_band_as_long_as_they_exist(world: World) -> None:
    picker, table = followed(world)
    high = world.kube.create(objective(world.space, "high", 10))
    low = world.kube.create(objective(world.space, "low", -5))
    world.kube.create(objective(world.space, "foreign", 7, of="other"))
    took = until(lambda: (table.priority("high"), table.priority("low")) == (10, -5), "both are known")
    print(f"objectives are known after {1000 * took:.0f} ms")
    until(lambda: bands(picker) >= {10, -5}, "both have a band")
    world.kube.patch(high, {"spec": {"priority": 20}})
    until(lambda: table.priority("high") == 20, "the new priority")
    until(lambda: 20 in bands(picker), "the new band")
    world.kube.delete(low)
    until(lambda: table.priority("low") is None, "it is gone")
    assert table.priority("foreign") is None
    assert 7 not in bands(picker)


def test_an_objective_of_the_older_group_counts_until_the_newer_group_has_its_name(world: World) -> None:
    world.kube.create(objective(world.space, "both", 1, group=LEGACY))
    world.kube.create(objective(world.space, "old", 2, group=LEGACY))
    _, table = followed(world)
    assert (table.priority("both"), table.priority("old")) == (1, 2), "ready means that objects are known"
    new = world.kube.create(objective(world.space, "both", 3))
    until(lambda: table.priority("both") == 3, "the newer group counts")
    assert table.priority("old") == 2
    world.kube.delete(new)
    until(lambda: table.priority("both") == 1, "the older group counts again")


def test_objectives_are_followed_if_their_definitions_are_installed_while_the_picker_runs(world: World) -> None:
    uninstall(world.kube, NEW_DEFINITIONS)
    try:
        world.kube.create(objective(world.space, "old", 2, group=LEGACY))
        _, table = followed(world)
        assert table.priority("old") == 2
        install(world.kube, NEW_DEFINITIONS)
        world.kube.create(objective(world.space, "late", 4))
        took = until(lambda: table.priority("late") == 4, "the late kind")
        print(f"a kind that is installed late is followed after {took:.1f} s")
        assert table.priority("old") == 2
    finally:
        install(world.kube, NEW_DEFINITIONS)
