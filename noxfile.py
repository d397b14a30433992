# SPDX-License-Identifier: Apache-2.0
"""Every check and every way to run this repository, each in an environment of its own.

`nox` runs all that needs no GPU. Sessions share no state, so several may run at once: each installs into and
writes under its own folder of .nox, byte code and caches included. Every installation is bound by
constraints.txt. Sessions that need GPUs fail where there are too few; they never pass by skipping.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools.workspace import Package, layers, load_toml, package, with_dependencies  # noqa: E402

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True

PACKAGES = layers()
TEST_SESSIONS = {f"tests-{each.short_name}": each for each in PACKAGES}
nox.options.sessions = ["lint", "types", "tests", *TEST_SESSIONS, "wheels", "integration", "vllm", "docs"]

CONSTRAINTS = str(ROOT / "constraints.txt")
ON_CPU = "not gpu and not multi_gpu and not multiprocess_cpu and not long and not vllm"


def group(name: str) -> list[str]:
    """The requirements of one dependency group."""
    return list(nox.project.dependency_groups(load_toml(ROOT / "pyproject.toml"), name))


def scratch(session: nox.Session) -> Path:
    """The session's own folder, and an environment in which nothing is written elsewhere."""
    folder = Path(session.create_tmp()).resolve()
    session.env.update(
        HYPOTHESIS_STORAGE_DIRECTORY=str(folder / "hypothesis"),
        MYPY_CACHE_DIR=str(folder / "mypy"),
        RUFF_CACHE_DIR=str(folder / "ruff"),
        DSV4_CACHE_DIR=str(folder / "artefacts"),
        PYTHONPYCACHEPREFIX=str(folder / "pycache"),
        PYTHONDONTWRITEBYTECODE="",
        # Two names for one thing: pip took build environments out of the first in release 25.3.
        PIP_CONSTRAINT=CONSTRAINTS,
        PIP_BUILD_CONSTRAINT=CONSTRAINTS,
    )
    return folder


def install(session: nox.Session, *requirements: str) -> None:
    """Install, leaving byte code to the first import: PyTorch has more modules than anyone loads."""
    session.install("--no-compile", *requirements)


def build_wheels(session: nox.Session, packages: Sequence[Package], folder: Path) -> list[str]:
    """Build `packages` into `folder` and return the wheels' paths, in the same order."""
    shutil.rmtree(folder, ignore_errors=True)
    roots = [str(each.root) for each in packages]
    session.run("python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), *roots, silent=True)
    return [str(next(folder.glob(f"{each.import_name}-*.whl"))) for each in packages]


def install_everything(session: nox.Session, *requirements: str) -> None:
    """Install every package from this tree, editable, and `requirements`."""
    editable = [argument for each in PACKAGES for argument in ("--editable", str(each.root))]
    install(session, *editable, *requirements)


def pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest; its cache goes to the session's folder."""
    cache = Path(session.create_tmp()).resolve() / "pytest"
    session.run("python", "-m", "pytest", "-o", f"cache_dir={cache}", *arguments)


def pytest_on_cpu(session: nox.Session, *arguments: str) -> None:
    """Run the CPU tests, one single-threaded worker per core."""
    session.env["OMP_NUM_THREADS"] = "1"
    workers = ["-n", "auto", "--maxprocesses", "8"]
    pytest(session, *workers, "-m", ON_CPU, *arguments, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, formatting, spelling, licence tags, workflow files."""
    scratch(session)
    install(session, *group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("typos")
    session.run("python", "-m", "tools.check_spdx")
    workflows = [str(path) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    if shutil.which("actionlint"):
        session.run("actionlint", *workflows, external=True)
    else:
        session.log("actionlint is not on PATH; the ci workflow runs it")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, on sources, tests and scripts."""
    scratch(session)
    install(session, *group("types"))
    session.run("python", "-m", "tools.typecheck", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Every package's CPU tests and the repository's, in one environment."""
    scratch(session)
    install_everything(session, *group("repository"))
    pytest_on_cpu(session)


def isolated_tests(session: nox.Session) -> None:
    """One package's CPU tests, with its wheel and what that declares, and nothing else of ours.

    An extra `test` of the package is what its tests need beyond that.
    """
    folder = scratch(session)
    tested = TEST_SESSIONS[session.name]
    wheels = build_wheels(session, with_dependencies(tested), folder / "wheels")
    if "test" in tested.project.get("optional-dependencies", {}):
        wheels[-1] += "[test]"
    install(session, *wheels, *group("test"))
    pytest_on_cpu(session, str(tested.tests))


for _name in TEST_SESSIONS:
    nox.session(name=_name)(isolated_tests)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the named packages (all by default) and try each wheel alone. They stay in tmp/dist."""
    folder = scratch(session)
    install(session, "build", "virtualenv")
    dist = folder / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for tested in [package(name) for name in session.posargs] or PACKAGES:
        session.run("python", "-m", "build", "--outdir", str(dist), str(tested.root), silent=True)
        below = with_dependencies(tested)[:-1]
        needed = build_wheels(session, below, folder / "dependencies") if below else []
        wheel = next(dist.glob(f"{tested.import_name}-*.whl"))
        fresh = folder / f"fresh-{tested.short_name}"
        session.run("python", "-m", "virtualenv", "--clear", str(fresh), silent=True)
        python = str(fresh / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--no-compile", *needed, str(wheel)]
        session.run(*pip, silent=True, external=True)
        smoke = [python, "-I", str(ROOT / "tools" / "smoke.py"), tested.name, tested.version]
        session.run(*smoke, external=True)


def torchrun(session: nox.Session, ranks: int, *arguments: str) -> None:
    """Run the multi-process suites with one process per rank; rank 0 prints, the others only if one fails."""
    logs = Path(session.create_tmp()).resolve() / "ranks"
    shutil.rmtree(logs, ignore_errors=True)
    suites = [str(folder) for each in PACKAGES if (folder := each.tests / "multiprocess").is_dir()]
    quiet = [f"--redirects={','.join(f'{rank}:3' for rank in range(1, ranks))}"] if ranks > 1 else []
    launcher = ["--standalone", f"--nproc-per-node={ranks}", f"--log-dir={logs}", *quiet]
    session.env["OMP_NUM_THREADS"] = "1"
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider", "-p", "tools.require_pass"]
    try:
        session.run("torchrun", *launcher, "-m", "pytest", *plugins, *suites, *arguments)
    except CommandFailed:
        for log in sorted(logs.rglob("std*.log")):
            if text := log.read_text(encoding="utf-8", errors="replace").strip():
                session.log(f"rank {log.parent.name}, {log.stem}:\n{text}")
        raise


@nox.session
def vllm(session: nox.Session) -> None:
    """The plugin against the real vLLM, on the CPU: plugin loading, model functions, benchmark client."""
    scratch(session)
    tested = package("dsv4-vllm-integration")
    install_everything(session, *group("test"), "-r", str(tested.tests / "requirements-vllm.txt"))
    # Their own requirements hold PyTorch 2.14 and GPU libraries.
    install(session, "--no-deps", "vllm==0.33.0", "compressed-tensors==0.17.0")
    session.env["OMP_NUM_THREADS"] = "1"
    pytest(session, "-p", "tools.require_pass", "-m", "vllm", str(tested.tests), *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """All wheels together: the commands, and two processes that exchange over the CPU."""
    folder = scratch(session)
    install(session, *build_wheels(session, PACKAGES, folder / "wheels"), *group("test"))
    for command in (["doctor"], ["demo", "--tokens", "33", "--n", "256", "--k", "512"]):
        answer = session.run("dsv4-gemm-rs", *command, "--json", silent=True, stderr=None)
        session.log(f"{command[0]} answers {', '.join(json.loads(str(answer)))}")
    torchrun(session, 2, "-m", "multiprocess_cpu", *session.posargs)


def require_gpus(session: nox.Session, count: int) -> None:
    """End the session with one line unless the driver lists `count` GPUs; costs no installation."""
    listing = ""
    if program := shutil.which("nvidia-smi"):
        listing = subprocess.run([program, "-L"], check=False, capture_output=True, text=True).stdout
    found = sum(line.startswith("GPU ") for line in listing.splitlines())
    if found < count:
        session.error(f"needs {count} GPU(s), nvidia-smi lists {found}")


def require_devices(session: nox.Session, count: int) -> None:
    """End the session with one line unless PyTorch, as installed here, can use `count` devices."""
    program = "import torch; print(torch.cuda.device_count())"
    found = int(str(session.run("python", "-c", program, silent=True, stderr=None, log=False)))
    if found < count:
        session.error(f"needs {count} GPU(s), PyTorch can use {found} of those that nvidia-smi lists")


@nox.session
def gpu(session: nox.Session) -> None:
    """Tests for one GPU, with virtual ranks."""
    require_gpus(session, 1)
    scratch(session)
    install_everything(session, *group("repository"))
    require_devices(session, 1)
    pytest(session, "-p", "tools.require_pass", "-m", "gpu", *session.posargs)


def tensor_parallel(session: nox.Session) -> None:
    """The multi-process suites with one GPU per rank, then the benchmark, into results/gpu_tp*.json.

    Arguments go to pytest.
    """
    ranks = int(session.name.removeprefix("gpu_tp"))
    require_gpus(session, ranks)
    scratch(session)
    plots = package("dsv4-gemm-rs").project["optional-dependencies"]["plot"]
    install_everything(session, *group("test"), *plots)
    require_devices(session, ranks)
    torchrun(session, ranks, "-m", "multi_gpu", *session.posargs)
    # Tests that start and lose processes of their own, on all devices.
    alone = [str(path) for each in PACKAGES for path in sorted(each.tests.glob("test_lost_gpu*.py"))]
    pytest(session, "-p", "tools.require_pass", "-m", "multi_gpu", *alone)
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", "-m", "dsv4_gemm_rs.cli.main"]
    session.run(*launcher, "bench", "--output", f"results/{session.name}.json")


for _ranks in (2, 4, 8):
    nox.session(name=f"gpu_tp{_ranks}")(tensor_parallel)


@nox.session
def demo(session: nox.Session) -> None:
    """The operation itself, on whatever this machine has; arguments go to the command."""
    scratch(session)
    install_everything(session)
    session.run("dsv4-gemm-rs", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks; arguments go to the command."""
    scratch(session)
    install_everything(session, *package("dsv4-gemm-rs").project["optional-dependencies"]["plot"])
    session.run("dsv4-gemm-rs", "bench", *session.posargs)


MUTATED = {
    "mutants_sm90_gemm_rs": (
        "GemmReduceScatter",
        "emulated_scenarios",
        ("fused_lost_token", "fused_lost", "fused_rings", "fused_trio", "fused_and_unfused"),
    ),
    "mutants_sm100_gemm_rs": (
        "GemmReduceScatter",
        "emulated_scenarios",
        ("sm100_lost_token", "sm100_lost", "sm100_banks", "sm100_rings"),
    ),
    "mutants_sm100_pair": (
        "GemmReduceScatter",
        "emulated_scenarios",
        ("sm100_pair_lost_token", "sm100_pair_lost", "sm100_pair", "sm100_pair_rings"),
    ),
    "mutants_sm100_multicast": (
        "GemmReduceScatter",
        "multicast_scenarios",
        (
            "multicast_lost_alone",
            "multicast_lost_token",
            "multicast_lost",
            "multicast_banks",
            "multicast_rings",
        ),
    ),
    "mutants_reduce_scatter": (
        "reduce_scatter",
        "collective_scenarios",
        ("reduce_scatter_lost_token", "reduce_scatter_lost", "reduce_scatter_pair", "reduce_scatter_trio"),
    ),
    "mutants_all_gather": (
        "all_gather",
        "collective_scenarios",
        ("all_gather_lost_token", "all_gather_lost_mismatch", "all_gather_lost", "all_gather_trio"),
    ),
}
"""By result: part of the kernel's name, and the module and names of the scenarios that it has to pass."""


@nox.session
def emulate_long(session: nox.Session) -> None:
    """200 schedules of each scenario and every mutant of the kernels in the emulator; takes two core-hours.

    Writes docs/results/mutants_*.json and docs/emulator_mutants.md. Arguments go to the command, such as
    --jobs. Interrupted, it goes on where it was with the next call. Tests marked `long` come first.
    """
    scratch(session)
    install_everything(session, *group("test"))
    session.env["OMP_NUM_THREADS"] = "1"
    tests = Path("packages/dsv4-gemm-rs/tests")
    pytest(session, "-n", "auto", "--maxprocesses", "8", "-m", "long", str(tests))
    failed = []
    for name, (kernel, module, scenarios) in MUTATED.items():
        targets = [f"{module}:{scenario}" for scenario in scenarios]
        options = ["--path", str(tests / "support"), "--kernel", kernel, "--name", name]
        options += ["--arguments", str(tests / "data" / f"{name}.toml")]
        output = ["--output", f"docs/results/{name}.json"]
        try:
            session.run("dsv4-emulate", "mutate", *targets, *options, *output, *session.posargs)
        except CommandFailed:
            failed.append(name)
    session.run("python", "-m", "tools.mutants_page")
    if failed:
        session.error(f"checks fail for {', '.join(failed)}")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, built strictly into tmp/site."""
    folder = scratch(session)
    install(session, *group("docs"))
    session.run("mkdocs", "build", "--strict", "--site-dir", str(folder / "site"), *session.posargs)
