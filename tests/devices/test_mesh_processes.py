"""Engine `jit` and the user's mesh in several processes: the numbers of one process, and back after all were killed.

Each topology, processes × devices, is one run of mesh_run.py, which asserts what the processes must agree on.
"""

import pytest
from several_processes import check_same, killed_and_resumed

PHASES = ("in_flight", "trained", "undisturbed", "restored", "loaders", "inside", "killed")
EXACT = ("model across", "some made there", "a state a key")  # each sum has two terms, in any order the same bits


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    others = (("1x4", 1, 4, "trained", "undisturbed", "resumed"), ("2x2 again", 2, 2, "resumed"))
    return killed_and_resumed("mesh_run.py", tmp_path_factory.mktemp("meshes"), "step_00000004", PHASES, others)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trained.npz", "undisturbed.npz"])
def test_the_numbers_of_one_process_with_the_same_mesh(runs, what):
    """A sum over four devices is made in another order by several processes, as scores are."""
    expected, got = runs["1x4"].saved(what), runs["2x2"].saved(what)
    assert got.keys() == expected.keys()
    whole = what == "undisturbed.npz"
    check_same(got, expected, exact=lambda name: (whole and "scores" not in name) or name.startswith(EXACT))


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["2x2 again", "1x4"])
def test_all_killed_and_resumed(runs, topology):
    """Bit for bit on the same mesh; one process on another mesh."""
    expected, got = runs["2x2"].saved("undisturbed.npz"), runs[topology].saved("resumed.npz")
    same = topology == "2x2 again"
    assert got.keys() == expected.keys() or not same
    check_same(got, expected, exact=lambda name: same)
