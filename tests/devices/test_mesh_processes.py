"""Engine `jit` and the user's mesh in several processes: the numbers of one process, and back after all were killed.

Each topology, processes × devices, is one run of mesh_run.py, which asserts what the processes must agree on.
"""

import functools
import shutil

import numpy as np
import pytest
import several_processes

Run = functools.partial(several_processes.Run, "mesh_run.py")
PHASES = ("in_flight", "trained", "undisturbed", "restored", "loaders", "inside", "killed")
EXACT = ("model across", "some made there", "a state a key")  # each sum has two terms, in any order the same bits


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each topology found. 2 × 2 is then killed in the midst of a run, which each of them resumes."""
    folder = tmp_path_factory.mktemp("meshes")
    first = Run(folder / "first", 2, 2, *PHASES)
    saved = first.folder / "run" / "step_00000004"
    with first:
        first.wait(until=saved.exists)
    assert [process.returncode for process in first.processes] == [-9, -9]
    found = {"2x2": first}
    for name, *what in (("1x4", 1, 4, "trained", "undisturbed", "resumed"), ("2x2 again", 2, 2, "resumed")):
        (folder / name).mkdir()
        shutil.copytree(first.folder / "run", folder / name / "run")
        with Run(folder / name, *what) as found[name]:
            found[name].wait()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trained.npz", "undisturbed.npz"])
def test_the_numbers_of_one_process_with_the_same_mesh(runs, what):
    """A sum over four devices is made in another order by several processes, as scores are."""
    expected, got = runs["1x4"].saved(what), runs["2x2"].saved(what)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
        if (what == "undisturbed.npz" and "scores" not in name) or name.startswith(EXACT):
            assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.slow
def test_all_killed_and_resumed_bit_for_bit(runs):
    expected, got = runs["2x2"].saved("undisturbed.npz"), runs["2x2 again"].saved("resumed.npz")
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.slow
def test_all_killed_and_resumed_by_one_process_on_another_mesh(runs):
    expected, got = runs["2x2"].saved("undisturbed.npz"), runs["1x4"].saved("resumed.npz")
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
