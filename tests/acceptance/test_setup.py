"""``scripts/setup`` on machines that lack something: it names what to install.

The scripts are copied to a folder whose name has a space, and find only the commands that a test
puts on their PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "dirname", "env", "grep", "mkdir", "sha256sum", "touch")


@dataclass
class Machine:
    """A machine with few commands, each a stub that a test writes."""

    home: Path

    @property
    def commands(self) -> Path:
        return self.home / "bin"

    def install(self, name: str, script: str) -> None:
        """Put a command on the PATH."""
        command = self.commands / name
        command.write_text(f"#!/bin/bash\n{script}\n")
        command.chmod(0o755)

    def install_python(self, *, version: str, venv: bool, name: str = "python3") -> None:
        """Put a Python on the PATH that has the venv module, or lacks it as Debian's does."""
        major, minor = version.split(".")
        supported = 0 if (int(major), int(minor)) >= (3, 11) else 1
        inner = "#!/bin/bash\\nexit 0\\n"
        self.install(
            name,
            f"""
case "$*" in
*"version_info < (3, 11)"*) exit {supported} ;;
*"import ensurepip"*) exit {0 if venv else 1} ;;
*"sys.version_info[:2]"*) echo {version} ;;
--version) echo Python {version} ;;
"-m venv "*) mkdir -p "$3/bin"; printf '{inner}' >"$3/bin/python"; /bin/chmod +x "$3/bin/python" ;;
esac
""",
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the script as a user who is not root."""
        return subprocess.run(
            [str(self.commands / "bash"), str(self.home / "scripts" / "setup"), *arguments],
            env={"PATH": str(self.commands), "HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path / "a home")
    machine.commands.mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", machine.home / "scripts")
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, machine.home)
    for tool in TOOLS:
        machine.commands.joinpath(tool).symlink_to(str(shutil.which(tool)))
    machine.install("id", "echo 1000")
    return machine


def test_without_a_python_that_is_new_enough(machine: Machine) -> None:
    machine.install_python(version="3.9", venv=True)
    run = machine.run("cli")
    assert run.returncode == 1
    assert "3.11" in run.stderr


def test_newest_tested_python_is_used(machine: Machine) -> None:
    machine.install_python(version="3.11", venv=True)
    machine.install_python(version="3.12", venv=True, name="python3.12")
    pyenv = machine.home / ".pyenv" / "versions" / "3.13.1" / "bin"
    pyenv.mkdir(parents=True)
    machine.install_python(version="3.13", venv=False, name="newest")
    shutil.move(machine.commands / "newest", pyenv / "python")
    assert "python3.13-venv" in machine.run("cli").stderr
    shutil.rmtree(pyenv)
    assert "Python 3.12" in machine.run("cli").stderr


def test_without_venv_and_without_apt(machine: Machine) -> None:
    machine.install_python(version="3.12", venv=False)
    run = machine.run("cli")
    assert run.returncode == 1
    assert "python3.12-venv" in run.stderr


def test_without_venv_and_without_sudo(machine: Machine) -> None:
    machine.install_python(version="3.13", venv=False)
    machine.install("apt-get", "touch apt-was-called")
    run = machine.run("cli")
    assert run.returncode == 1
    assert "apt-get install python3.13-venv" in run.stderr
    assert not (machine.home / "apt-was-called").exists()


def test_with_sudo_the_missing_package_is_installed(machine: Machine) -> None:
    machine.install_python(version="3.12", venv=False)
    machine.install("apt-get", 'echo "$@" >>apt-calls')
    machine.install("sudo", 'exec "$@"')
    run = machine.run("cli")
    assert run.returncode == 0, run.stderr
    last = (machine.home / "apt-calls").read_text().splitlines()[-1]
    assert last.startswith("install")
    assert last.endswith("python3.12-venv")


def test_a_package_that_apt_cannot_install_is_named(machine: Machine) -> None:
    machine.install_python(version="3.12", venv=False)
    machine.install("apt-get", "exit 100")
    machine.install("sudo", 'exec "$@"')
    run = machine.run("cli")
    assert run.returncode == 1
    assert "python3.12-venv" in run.stderr


def test_without_a_mongod_for_this_system(machine: Machine) -> None:
    machine.install_python(version="3.12", venv=True)
    inner = 'case "$*" in *find_mongod*) exit 1 ;; esac'
    (machine.home / ".venv" / "bin").mkdir(parents=True)
    python = machine.home / ".venv" / "bin" / "python"
    python.write_text(f"#!/bin/bash\n{inner}\n")
    python.chmod(0o755)
    run = machine.run("cli,embedded")
    assert run.returncode == 1
    assert "MICROQUEUE_MONGOD" in run.stderr
    assert "MICROQUEUE_URI" in run.stderr


def test_a_path_with_spaces_and_another_environment(machine: Machine) -> None:
    machine.install_python(version="3.12", venv=True)
    run = machine.run("--venv", ".venv 3", "cli")
    assert run.returncode == 0, run.stderr
    assert (machine.home / ".venv 3" / ".installed-cli").exists()


def test_unknown_options_and_missing_extras_are_rejected(machine: Machine) -> None:
    assert "--pyton" in machine.run("--pyton", "x", "cli").stderr
    assert machine.run().returncode == 1


# The lock file


@pytest.mark.parametrize("available", [True, False], ids=["available", "not available"])
def test_locked_versions_are_installed_if_they_are_available(
    machine: Machine, available: bool
) -> None:
    python = machine.home / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/bin/bash
case "$*" in *"pip install"*) echo "$@" >>"$HOME/pip-calls" ;; esac
case "$*" in *--constraint*) exit {0 if available else 1} ;; esac
""")
    python.chmod(0o755)
    run = machine.run("cli")
    assert run.returncode == 0, run.stderr
    calls = (machine.home / "pip-calls").read_text().splitlines()
    locked = ["--constraint requirements.lock" in call for call in calls]
    assert locked == ([True] if available else [True, False])
    assert all(call.endswith("--editable .[cli]") for call in calls)


def test_lock_file_has_a_version_that_fits_for_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [Requirement(line) for lines in [project["dependencies"], *extras] for line in lines]
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    for requirement in [one for one in wanted if one.name != "microqueue"]:
        name = canonicalize_name(requirement.name)
        fitting = [
            pin
            for pin in pins
            if canonicalize_name(pin.name) == name
            and requirement.specifier.contains(str(pin.specifier).removeprefix("=="))
        ]
        assert fitting, f"run scripts/lock: {requirement} is not in requirements.lock"


def test_lock_file_names_versions_only() -> None:
    pin = r"[a-z0-9-]+==[\w.]+( ; [\w.<>=!'\" ]+)?"
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(pin, line), line
