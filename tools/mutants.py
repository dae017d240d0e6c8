"""Random mutations of the source, each against the tests of its room: which ones does no test see?

    make mutants                                      # 300 mutations
    make mutants MUTANTS_ARGS='--number 40 --seed 1 --only kv sparse --rows two'

Cosmic Ray makes the mutations, and `Guards` here those of `where`, `clip`, `minimum` and `maximum`. All of them are as
likely, so a room with more places has more of the sample. A mutation is known by its text, so the same seed draws the
same ones after changes elsewhere. It is made in a copy of the tree, of which each worker has one.

First, each test file of the rooms runs once, and tells which lines each of its tests reaches. Then a mutant runs
against the quickest tests that reach its line, the others, and the rest of their files, until one fails. Results are
lines of JSON in runs/mutants/. Started again, mutants that were killed are not run again.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import hashlib
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "runs" / "mutants"
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.txt"
QUICKEST = 40  # tests that run before the others are collected

STEP = "every_optimizer train_step step_* frozen unused local_steps virtual_shards engine_jit definition".split()
STEP += "row_sparse modules shows train_errors".split()
ROOMS = {  # a package, and the tests that are asked, the likeliest first
    "sparse": ["sparse", "kv/test_kv_sparse.py"],
    "parallel": ["parallel", "devices/test_sharing.py", "devices/test_user_mesh.py", "train/test_fsdp.py"],
    "compression": ["compression", "kv/test_kv_compression.py"],
    "updaters": [
        "updaters",
        "kv",
        "train/test_every_optimizer.py",
        "train/test_row_sparse.py",
        "mxnet/test_mxnet_optimizers.py",
        "mxnet/test_mxnet_errors.py",
        "mxnet/test_mxnet_reference.py",
        "checkpoint/test_checkpoint.py",
        "house/test_public_names.py",
    ],
    "checkpoint": [
        "checkpoint",
        "mxnet/test_mxnet_params.py",
        "mxnet/test_mxnet_hostile.py",
        "train/test_frozen.py",
        "train/test_certificate.py",
        "devices/test_user_mesh.py",
    ],
    "data": ["data", "devices/test_user_mesh.py"],
    "viz/_read": ["viz"],
    "kv": ["kv", "checkpoint/test_checkpoint*.py", "devices/test_sharing.py", "train/test_modules.py"],
    "_store": ["kv", "compression/test_owners.py", "train/test_train_step.py", "train/test_step_*.py"],
    "_devices": [
        "devices",
        "parallel",
        "kv/test_layouts.py",
        "kv/test_kv_kinds.py",
        "kv/test_kv_compression.py",
        "data/test_data_batches.py",
        "train/test_virtual_shards.py",
        "train/test_train_step.py",
    ],
    "train/_evaluate": [
        "train/test_evaluate_anything.py",
        "train/test_train_errors.py",
        "train/test_fit_evaluation.py",
        "train/test_own_loop.py",
    ],
    "train/_step": [*(f"train/test_{name}.py" for name in STEP), "checkpoint/test_checkpoint.py"],
    "mxnet": ["mxnet"],
}
ROWS = {
    "one": "not slow and not others and not lab and not release",
    "two": "slow and not lab and not release and not others",
}

CHANGES = {  # of cosmic-ray's operators the ones that a programmer could have meant
    "ReplaceBinaryOperator": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul LShift_RShift "
    "RShift_LShift BitOr_BitAnd BitAnd_BitOr BitXor_BitOr",
    "ReplaceComparisonOperator": "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot "
    "IsNot_Is",
    "ReplaceUnaryOperator": "Delete_USub Delete_Invert Delete_Not",
    "": "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue "
    "ReplaceContinueWithBreak ExceptionReplacer NumberReplacer RemoveDecorator ZeroIterationForLoop",
}


_ARGUMENTS = {"where": (1, 2), "clip": (0,), **dict.fromkeys(("minimum", "maximum", "min", "max"), (0, 1))}
_CALL = re.compile(rf"(?:(?:np|jnp)\.)?({'|'.join(_ARGUMENTS)})\(.*\)", re.DOTALL)


class Guards(Operator):
    """`where(c, a, b)` becomes `a` or `b`, `clip(x, ...)` becomes `x`, `maximum(a, b)` becomes `a` or `b`."""

    def _arguments(self, node: Any) -> list[Any]:
        called = node.type in ("atom_expr", "power") and _CALL.fullmatch(node.get_code(False))
        inner = node.children[-1].children[1] if called else node
        given = [x for x in inner.children if x.type not in ("operator", "argument")] if inner.type == "arglist" else []
        places = _ARGUMENTS[called[1]] if called else ()
        return [given[i] for i in places] if len(given) > max(places, default=0) else []

    def mutation_positions(self, node: Any) -> Any:
        return [(node.start_pos, node.end_pos) for _ in self._arguments(node)]

    def mutate(self, node: Any, index: int) -> Any:
        kept = parso.parse(f"({self._arguments(node)[index].get_code(False)})").children[0]
        kept.get_first_leaf().prefix = node.get_first_leaf().prefix
        return kept

    @classmethod
    def examples(cls) -> Any:
        return ()


def operators() -> dict[str, Operator]:
    names = [f"{kind}_{name}".lstrip("_") for kind, names in CHANGES.items() for name in names.split()]
    return {"Guards": Guards(), **{name: get_operator(f"core/{name}")() for name in names}}


# Where a mutation may be.


def alike(lines: list[str], others: list[str]) -> int:
    """How many lines are the same, from the first one on."""
    pairs = zip(lines, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(lines), len(others)))


class Mutation:
    """The `occurrence`-th change by an operator in a file of a room."""

    def __init__(self, room: str, path: str, line: int, operator: str, occurrence: int):
        self.room, self.path, self.line, self.operator, self.occurrence = room, path, line, operator, occurrence

    def apply(self, text: str, operator: Operator) -> bool:
        """False for what changes nothing, such as 1e30 + 1."""
        changed = mutate_code(text, operator, self.occurrence)
        try:
            if changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
                return False
        except SyntaxError:
            return False
        self.text, old, new = changed, text.splitlines(), changed.splitlines()
        first = alike(old, new)
        same = alike(old[first:][::-1], new[first:][::-1])
        changes = (" ".join(x.strip() for x in lines[first : len(lines) - same]) for lines in (old, new))
        self.before, self.after = changes
        return True

    @property
    def key(self) -> tuple[str, str, str]:
        return self.path, self.before, self.after


def without_tests(tree: ast.AST) -> Any:
    """The parts that no test is asked about: types, words of errors and of the log, `__repr__`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name="__repr__") | ast.Raise() | ast.JoinedStr():
                yield node
            case ast.FunctionDef(body=[ast.Expr(ast.Constant(value))]) if value is ...:  # an overload
                yield node
            case ast.FunctionDef(returns=ast.expr() as annotation):
                yield annotation
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.keyword(arg="strict"):  # of `zip`: the lengths are equal, else the code itself is wrong
                yield node
            case ast.If(test=ast.Name("TYPE_CHECKING")) | ast.Call(func=ast.Name("say") | ast.Attribute(attr="warn")):
                yield node
            case ast.Module(body=body):
                yield from (x for x in body if isinstance(x, ast.Assign) and isinstance(x.value, ast.BinOp))


def draw(number: int, seed: int, rooms: list[str], known: dict[str, Operator]) -> list[Mutation]:
    found: list[tuple[float, Mutation]] = []
    for room in rooms:
        for file in sorted((ROOT / "jaxpar" / room).rglob("*.py")):
            text, path = file.read_text(), str(file.relative_to(ROOT))
            lines, parts = text.splitlines(), without_tests(ast.parse(text))
            words = [(x.lineno, x.col_offset, x.end_lineno, x.end_col_offset) for x in parts]
            seen, times = collections.Counter[str](), collections.Counter[str]()
            for node in ast_nodes(get_ast(text)):
                for name, operator in known.items():
                    for (line, column), _ in operator.mutation_positions(node):
                        occurrence, seen[name] = seen[name], seen[name] + 1
                        is_star = node.parent is not None and node.parent.type == "parameters"
                        if is_star or any((a, b) <= (line, column) < (c, d) for a, b, c, d in words):
                            continue
                        place = f"{seed} {path} {name} {lines[line - 1].strip()}"
                        times[place] += 1
                        rank = random.Random(f"{place} {times[place]}").random()
                        found.append((rank, Mutation(room, path, line, name, occurrence)))
    print(f"{len(found)} places for a mutation in {len(rooms)} rooms", file=sys.stderr)
    drawn: list[Mutation] = []
    for _, mutation in sorted(found, key=lambda x: x[0]):
        if len(drawn) < number and mutation.apply((ROOT / mutation.path).read_text(), known[mutation.operator]):
            drawn.append(mutation)
    return drawn


def statement(path: str, line: int) -> set[int]:
    """The lines of the statement at a line, or of its head if it has a body."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])
            body = getattr(node, "body", None)
            last = max(body[0].lineno - 1 if body else node.end_lineno or first, node.lineno)
            if first <= line <= last:
                best = range(first, last + 1)  # of nested ones the innermost comes last
    return set(best)


# The tests.


class Worker:
    """A copy of the tree, and a process that runs tests in it."""

    def __init__(self, folder: str, number: int, python: str):
        self.tree, self.writes = Path(folder, f"copy{number}"), 0
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in filter(os.path.isfile, (ROOT / x for x in listed.stdout.splitlines())):
            (self.tree / Path(name).relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, self.tree / Path(name).relative_to(ROOT))
        # Programs of the unchanged source are compiled once. Those of mutants are not kept.
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "JAX_COMPILATION_CACHE_DIR": str(KEPT / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [python, "-W", "ignore", str(ROOT / "tools" / "mutants_run.py")]
        self.process = subprocess.Popen(
            command, cwd=self.tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, files: list[str], tests: list[str] | None, marks: str, seconds: float) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        job = {"files": files, "tests": tests, "marks": marks, "seconds": seconds}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        if not (answer := self.process.stdout.readline()):
            raise RuntimeError("the process that runs the tests ended")
        return json.loads(answer)

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Any:
        path, self.writes = self.tree / mutation.path, self.writes + 1
        before, times = path.read_text(), path.stat()
        path.write_text(mutation.text)
        os.utime(path, (10**9 + self.writes,) * 2)  # Python compiles it again, whatever the second
        try:
            yield
        finally:
            path.write_text(before)
            os.utime(path, (times.st_atime, times.st_mtime))


def files_of(room: str) -> list[str]:
    found = [x for name in ROOMS[room] for x in sorted((ROOT / "tests").glob(name))]
    files = [y for x in found for y in (sorted(x.glob("test_*.py")) if x.is_dir() else [x])]
    return list(dict.fromkeys(str(x.relative_to(ROOT)) for x in files))


def recorded(worker: Worker, file: str, row: str, source: str) -> dict[str, Any]:
    """What the tests of a file reach: from an earlier run, if neither it nor the source has changed."""
    mark = hashlib.sha256(f"{source} {row} {(ROOT / file).read_text()}".encode()).hexdigest()[:16]
    kept = KEPT / "reach" / f"{Path(file).stem}-{mark}.json"
    if not kept.exists():
        answer = worker.run([file], None, ROWS[row], 3600)
        if "tests" not in answer:
            raise RuntimeError(f"{file} could not be recorded: {answer['code']}\n{answer['output']}")
        for name in [name for name, test in answer["tests"].items() if not test["passed"]]:
            print(f"left out, since it fails without a mutation: {name}", file=sys.stderr)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(answer))
        print(f"recorded {file}: {len(answer['tests'])} tests, {answer['spent']:.0f} s", file=sys.stderr, flush=True)
    return json.loads(kept.read_text())


def stages(mutation: Mutation, reach: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The tests of a mutant: the quickest that reach it, the other ones that do, and the rest of their files."""
    lines, path = statement(mutation.path, mutation.line), mutation.path
    first: dict[str, float] = {}
    rest: dict[str, float] = {}
    for file in files_of(mutation.room):
        tests = {name: test for name, test in reach[file]["tests"].items() if test["passed"]}
        # What runs at import is used by those tests that run other lines of the module.
        at_import = lines & set(reach[file]["imported"].get(path, ()))
        near = {
            k for k, t in tests.items() if (t["lines"].get(path) if at_import else lines & {*t["lines"].get(path, ())})
        }
        first |= {name: tests[name]["seconds"] for name in near}
        rest |= {name: test["seconds"] for name, test in tests.items() if name not in near and (near or test["starts"])}
    quickest = sorted(first, key=first.__getitem__)[:QUICKEST]
    others = [name for name in first if name not in set(quickest)]
    in_files = lambda names: sorted(names, key=lambda name: (name.split("::")[0], ({**first, **rest})[name]))  # noqa: E731
    return [names for names in (in_files(quickest), in_files(others), in_files(rest)) if names]


def judged(worker: Worker, mutation: Mutation, rows: list[str], reach: dict[str, dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"result": "unreached", "row": None, "by": None, "spent": 0.0}
    with worker.mutated(mutation):
        for row in rows:
            for tests in stages(mutation, reach[row]):
                files = list(dict.fromkeys(name.split("::")[0] for name in tests))
                usual = sum(reach[row][name.split("::")[0]]["tests"][name]["seconds"] for name in tests)
                answer = worker.run(files, tests, ROWS[row], 120 + 5 * usual)
                result["spent"] += answer["spent"]
                if answer["code"] != 0:
                    kinds = {1: "killed", 2: "import", 4: "import", "late": "late", "crash": "crash"}
                    result |= {"result": kinds[answer["code"]], "row": row, "by": answer.get("failed")}
                    return result
                result["result"] = "survived"
    return result


# The sample.


def equivalents() -> dict[tuple[str, str, str], str]:
    """Lines of `path | before | after | because ...`."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    return {(path, before, after): why for path, before, after, why in (line.split(" | ", 3) for line in lines)}


def table(results: list[dict[str, Any]], rows: list[str]) -> str:
    head = [
        "package",
        "drawn",
        "equivalent",
        "at import",
        "by the first row",
        "by the second row",
        "survived",
        "killed",
    ]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for room in [*ROOMS, "all"]:
        of_room = [x for x in results if room in (x["room"], "all")]
        equal = [x for x in of_room if x["result"] == "equivalent"]
        killed = [x for x in of_room if x["result"] not in ("equivalent", "survived", "unreached")]
        at_import = [x for x in killed if x["result"] == "import"]
        first = [x for x in killed if x["row"] == "one" and x["result"] != "import"]
        second = [x for x in killed if x["row"] == "two" and x["result"] != "import"]
        counted = len(of_room) - len(equal)
        share = f"{100 * len(killed) / counted:.0f} %" if counted else ""
        survived = counted - len(killed)
        counts = [len(of_room), len(equal), len(at_import), len(first), len(second) if "two" in rows else "", survived]
        if of_room:
            lines.append([room, *map(str, counts), share])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300, help="how many mutations are drawn (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", choices=["one", "two"], default="one", help="two: survivors meet the slow tests too")
    parser.add_argument("--only", nargs="+", choices=ROOMS, default=list(ROOMS), metavar="ROOM")
    parser.add_argument("--operators", nargs="+", choices=operators(), metavar="OPERATOR", help="such as Guards")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--python", default=str(ROOT / ".venv" / "bin" / "python"), help="that of the tests, 3.12 or later"
    )
    parser.add_argument("--list", action="store_true", help="show the mutations and run none")
    options = parser.parse_args()
    chosen = {k: v for k, v in operators().items() if not options.operators or k in options.operators}
    drawn = draw(options.number, options.seed, options.only, chosen)
    if options.list:
        print("\n".join(f"{x.path}:{x.line} {x.before}  ->  {x.after}" for x in drawn))
        return

    rows, known = ["one", "two"][: 1 + (options.rows == "two")], equivalents()
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = KEPT / f"seed{options.seed}.jsonl"
    earlier = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    killed = {(*x["key"],): x for x in earlier if x["result"] not in ("survived", "unreached")}
    reach: dict[str, dict[str, Any]] = {row: {} for row in rows}
    results: list[dict[str, Any]] = []
    source = hashlib.sha256(b"".join(x.read_bytes() for x in sorted((ROOT / "jaxpar").rglob("*.py")))).hexdigest()
    started, workers = time.monotonic(), queue.Queue[Worker]()

    def with_worker(work: Any) -> Any:
        worker = workers.get()
        try:
            return work(worker)
        finally:
            workers.put(worker)

    def record(wanted: tuple[str, str]) -> dict[str, Any]:
        return with_worker(lambda worker: recorded(worker, *wanted, source))

    def one(mutation: Mutation) -> dict[str, Any]:
        if mutation.key in killed:
            return killed[mutation.key]
        result: dict[str, Any] = {"key": mutation.key, "room": mutation.room, "line": mutation.line}
        if mutation.key in known:
            return {**result, "result": "equivalent"}
        result |= with_worker(lambda worker: judged(worker, mutation, rows, reach))
        with kept.open("a") as out:
            print(json.dumps(result), file=out)
        shown = f"{mutation.path}:{mutation.line} {mutation.before}  ->  {mutation.after}"
        print(f"{result['result']:9} {result['spent']:5.0f} s  {shown}", file=sys.stderr, flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for number in range(options.workers):
            workers.put(Worker(folder, number, options.python))
        try:
            for room in ROOMS:
                of_room = [mutation for mutation in drawn if mutation.room == room]
                wanted = [(file, row) for file in files_of(room) for row in rows if of_room and file not in reach[row]]
                for (file, row), found in zip(wanted, pool.map(record, wanted), strict=True):
                    reach[row][file] = found
                results += pool.map(one, of_room)
        finally:
            for worker in [workers.get() for _ in range(options.workers)]:
                worker.process.communicate()

    print(table(results, rows))
    for x in results:
        if x["result"] in ("survived", "unreached"):
            print(f"\n{x['result']}: {x['key'][0]}:{x['line']}\n  {x['key'][1]}\n  {x['key'][2]}")
    ran = [x["spent"] for x in results if "spent" in x]
    print(f"\n{len(ran)} mutants took {sum(ran):.0f} processor seconds; {time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
