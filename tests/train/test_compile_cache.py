"""Compiled programs on disk: a second process loads what the first one compiled."""

import os
import textwrap

import jax
import pytest
from launched import python

from jaxpar import train
from jaxpar.train._fit import compile_cache

PROGRAM = textwrap.dedent("""
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jaxpar import train

    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.extend([1] * name.endswith("/cache_hits")))
    print(train.use_compilation_cache())
    slow = jax.jit(lambda x: [jnp.sort(x * i).cumsum().sum() for i in range(20)])
    jax.block_until_ready(slow(np.arange(100.0)))  # of jnp, a program more, that is slow too on a busy machine
    print(len(hits))
""")


def run(tmp_path, **more):
    place, hits = python("-c", PROGRAM, XDG_CACHE_HOME=str(tmp_path), XLA_FLAGS="", **more).stdout.split()
    return place, int(hits)


@pytest.mark.slow
def test_a_second_process_compiles_nothing_anew(tmp_path):
    place, hits = run(tmp_path)
    assert place.startswith(str(tmp_path / "jaxpar"))
    assert hits == 0
    assert run(tmp_path) == (place, 1)
    assert os.stat(place).st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_what_the_user_chose_stays(tmp_path):
    chosen = str(tmp_path / "mine")
    assert run(tmp_path, JAX_COMPILATION_CACHE_DIR=chosen)[0] == chosen
    assert not (tmp_path / "jaxpar").exists()


@pytest.fixture(autouse=True)
def no_cache():
    """The tests have a cache of their own."""
    name = "jax_compilation_cache_dir"
    before = getattr(jax.config, name)
    jax.config.update(name, None)
    yield
    jax.config.update(name, before)


def test_a_place_that_others_can_write_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = train.use_compilation_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    place.chmod(0o777)
    assert train.use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o755])
def test_a_place_that_others_can_replace_is_not_used(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(compile_cache, "_is_own_group", lambda number: False)
    base = tmp_path / "shared" / "caches"
    base.mkdir(parents=True)
    (tmp_path / "link").symlink_to(base)
    (tmp_path / "shared").chmod(mode)
    is_safe = mode in (0o1777, 0o755)  # in a sticky folder nobody can rename what is another's
    for place in (base, tmp_path / "link"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        assert (train.use_compilation_cache() is not None) == is_safe
        jax.config.update("jax_compilation_cache_dir", None)
    assert (base / "jaxpar").stat().st_mode & 0o777 == 0o700


def test_the_group_of_the_user_only():
    import grp
    import pwd

    user = pwd.getpwuid(os.getuid())
    alone = grp.struct_group((user.pw_name, "x", 7, []))
    for group, expected in [
        (alone, True),
        (grp.struct_group((user.pw_name, "x", 7, [user.pw_name])), True),
        (grp.struct_group((user.pw_name, "x", 7, [user.pw_name, "another"])), False),
        (grp.struct_group(("staff", "x", 7, [])), False),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grp, "getgrgid", lambda number, group=group: group)
            assert compile_cache._is_own_group(7) == expected
    assert not compile_cache._is_own_group(2**31 - 5)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        train.use_compilation_cache(tmp_path / "file" / "cache")
    assert jax.config.jax_compilation_cache_dir is None
