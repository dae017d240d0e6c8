"""Cut and garbled files of every kind: read, or refused by one of jaxpar's errors, soon, and with little memory."""

import sys
import time
import tracemalloc

import numpy as np
import pytest
from records import write as write_records
from symbols import CASES, parts_of, save, write

from jaxpar import mxnet

RUNS_CODE = {"exec", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"}
SYMBOLS = ("lenet 1", "normalized 1", "gluon lstm", "rnn lstm 1", "shape slice", "shape arange")
PIECES = (b"0", b"-1", b"9999999999", b"1e308", b"nan", b"None", b"(0, 0)", b"()", b"__import__('os')", b"\xff", b"[[")


class _Watch:
    """Says which events of Python run code while it is on. Hooks of audit cannot be taken away."""

    def __init__(self):
        self.on, self.found = False, []
        sys.addaudithook(self.event)

    def event(self, name, _):
        if self.on and name in RUNS_CODE:
            self.found.append(name)


WATCH = _Watch()


def garbled(content, random):
    """A file that is cut, or of which some bytes are changed, left out, doubled, or other numbers."""
    found = bytearray(content)
    for at in random.randint(0, max(len(found), 1), random.randint(1, 6)):
        match random.randint(6):
            case 0:
                found[at : at + 1] = bytes([random.randint(256)])
            case 1:
                del found[at:]
            case 2:
                del found[at : at + random.randint(1, 9)]
            case 3:
                found[at:at] = found[at : at + random.randint(1, 60)]
            case 4:
                found[at : at + random.randint(5)] = PIECES[random.randint(len(PIECES))]
            case 5:  # eight bytes of a number
                found[at : at + 8] = random.randint(-(2**63), 2**63 - 1, dtype=np.int64).tobytes()
    return bytes(found)


def digits(content, random):
    """A text in which some numbers are others."""
    found = bytearray(content)
    places = [i for i, byte in enumerate(found) if 48 <= byte < 58]
    for at in sorted(random.choice(places, min(len(places), random.randint(1, 6))), reverse=True):
        found[at : at + 1] = PIECES[random.randint(8)] if random.randint(2) else b"%d" % random.randint(10)
    return bytes(found)


def attack(read, path, content, changes, seed):
    """How many of the changed files are read. Each other one ends in a ValueError of jaxpar, in a second and 64 MiB."""
    random, outcomes = np.random.RandomState(seed), []
    path.write_bytes(content)
    read(path)  # what is imported and compiled once
    for number in range(200):
        path.write_bytes(changes[number % len(changes)](content, random))
        tracemalloc.start()
        WATCH.on, WATCH.found, start = True, [], time.monotonic()
        try:
            read(path)
            outcomes.append("read")
        except ValueError:  # CheckpointError is one
            outcomes.append("refused")
        finally:
            WATCH.on, seconds = False, time.monotonic() - start
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert WATCH.found == [], number
        assert seconds < 10, number  # on a busy machine; most take milliseconds
        assert most < (64 << 20) + 20 * len(content), number
    assert min(map(outcomes.count, ("read", "refused"))) > 2, outcomes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*SYMBOLS, pytest.param("zoo squeezenet1_1", marks=pytest.mark.slow)])
def test_symbol_files(name, tmp_path):
    path = write(tmp_path, name)
    attack(mxnet.load_symbol, path, path.read_bytes(), (garbled, digits), 1)


def test_params_files(tmp_path):
    name = "normalized 1"
    symbol, file = save(tmp_path, name)
    content, (params, state, _) = file.read_bytes(), parts_of(name)
    head = len(content) - sum(array.nbytes for array in (params | state).values())

    def headers(content, random):
        """Damage where it is not an array's numbers."""
        at = head if random.randint(2) else len(content) - head
        first, last = content[:at], content[at:]
        return garbled(first, random) + last if at == head else first + garbled(last, random)

    attack(lambda path: mxnet.load_symbol(symbol, path), tmp_path / "x.params", content, (garbled, headers), 2)
    attack(mxnet.load_params, tmp_path / "x.params", content, (garbled, headers), 3)


def test_record_files_and_their_indices(tmp_path):
    write_records(tmp_path)

    def read_all(path):
        records = mxnet.RecordFile(path, tmp_path / "x.idx" if path.suffix == ".idx" else None)
        for number in range(len(records)):
            records.unpack(number)

    attack(read_all, tmp_path / "x.rec", (tmp_path / "labels.rec").read_bytes(), (garbled,), 4)

    def read_by_index(path):
        records = mxnet.RecordFile(tmp_path / "parts.rec", path)
        list(records)

    attack(read_by_index, tmp_path / "x.idx", (tmp_path / "parts.idx").read_bytes(), (garbled, digits), 5)


def test_lists(tmp_path):
    content = b"".join(b"%d\t%d.5\t-0.25\tcats/%d.jpg\n" % (i, i % 7, i) for i in range(40))
    attack(mxnet.load_list, tmp_path / "x.lst", content, (garbled, digits), 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["shape slice", SYMBOLS[0], *(pytest.param(n, marks=pytest.mark.release) for n in SYMBOLS[1:4])]
)
def test_shapes_and_modules_of_changed_networks(name, tmp_path):
    """A file that is whole but says other numbers ends in an error too, not in a program that asks for all memory."""
    path = write(tmp_path, name)
    shapes = {n: shape for n, (shape, _) in CASES[name]["arrays"].items()}
    if name != "gluon lstm":  # its weights are packed by reshapes, so their shapes must be given too
        shapes = {n: shape for n, shape in shapes.items() if n in CASES[name]["inputs"]}

    def read(path):
        mxnet.load_symbol(path).shapes(**shapes)
        mxnet.port(path, shapes=shapes)

    attack(read, path, path.read_bytes(), (digits,), 7)
