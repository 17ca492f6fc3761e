"""The matrix is complete: whoever adds a state, a machine or a path has to say how to come there, and what happens then."""

from __future__ import annotations

import pytest
from fault_cells import BETWEEN_NODES, PATHS, UNREACHABLE, Cell, Incident, Process, all_cells, all_states, state_enums
from fault_gates import TWISTS
from fault_incidents import INCIDENTS
from fault_matrix import chosen
from fault_pure import STOPS, pure_cells, run_pure
from fault_recipes import RECIPES, NoRecipe, recipe_for
from machines_kinds import KINDS


def test_every_state_of_every_machine_has_a_recipe() -> None:
    missing = []
    for machine, state in all_states():
        try:
            recipe_for(machine, state)
        except NoRecipe as error:
            missing.append(str(error))
    assert missing == []


def test_recipes_are_for_states_that_exist() -> None:
    assert {(machine, state) for machine, states in RECIPES.items() for state in states} == set(all_states())


def test_every_process_incident_machine_and_state_has_a_cell() -> None:
    found = {(cell.process, cell.incident, cell.machine, cell.state) for cell in all_cells()}
    wanted = {
        (process, incident, *at)
        for process in Process
        for incident in process.incidents
        for at in all_states()
        if process.paths(at[0])
    }
    assert found == wanted
    assert len({cell.name for cell in all_cells(all_paths=True)}) == len(all_cells(all_paths=True))
    assert set(INCIDENTS) == set(Incident)


def test_every_state_meets_every_path_unless_it_is_said_why_not() -> None:
    for machine in BETWEEN_NODES:
        for state in state_enums()[machine]:
            paths = {cell.path for cell in all_cells() if (cell.machine, cell.state) == (machine, state.name)}
            assert paths == {path for path in PATHS if (machine, state.name, path) not in UNREACHABLE}


def test_a_new_state_has_cells_before_anyone_has_said_how_to_reach_it() -> None:
    with pytest.raises(NoRecipe, match=r"^no recipe for state TELEPORTING of stream$"):
        recipe_for("stream", "TELEPORTING")


def test_the_pure_machines_are_all_there_with_all_their_states() -> None:
    machines = state_enums()
    del machines["move"]
    assert {kind.name: kind.states for kind in KINDS} == machines
    found = {(cell.kind.name, cell.state, cell.stop, cell.fault) for cell in pure_cells()}
    assert found == {
        (*state, stop, fault) for state in all_states() if state[0] != "move" for stop in STOPS for fault in TWISTS
    }


def test_seeded_faults_of_completions_close_the_books_of_every_machine() -> None:
    assert run_pure(pure_cells()) == []


def test_a_sample_depends_on_its_seed_alone() -> None:
    assert chosen("", 5, 1, all_paths=False) == chosen("", 5, 1, all_paths=False)
    assert chosen("", 5, 1, all_paths=False) != chosen("", 5, 2, all_paths=False)
    only = chosen("DE engine/SIGKILL/store", 0, 0, all_paths=False)
    assert {(cell.process, cell.incident, cell.machine) for cell in only} == {
        (Process.DE_ENGINE, Incident.KILL, "store")
    }
    assert isinstance(only[0], Cell) and len(only) == len(state_enums()["store"])
