"""Try to break the queue: ``python -m tests.chaos --profile smoke --seed 1``."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

from tests.chaos import ledger, soak
from tests.chaos.mutants import MUTANTS
from tests.chaos.profiles import PROFILES
from tests.chaos.report import report
from tests.chaos.run import HarnessTrouble, Options, Run
from tests.chaos.servers import SERVER_KINDS

FINDINGS, TROUBLE, INTERRUPTED = 1, 2, 130
KINDS_OF_ANY_SERVER = 11
"""How many kinds of faults there are, without those of replica sets and of small disks."""


class Console:
    """Prints progress: a line that is replaced at a terminal for counts, plain lines otherwise."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._live = sys.stdout.isatty()
        self._open = False

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        line = f"{time.monotonic() - self._began:7.1f}  {text}"
        passing = self._live and " s: " in text
        if self._open:
            sys.stdout.write("\r\x1b[K")
        sys.stdout.write(line if passing else f"{line}\n")
        sys.stdout.flush()
        self._open = passing


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Run the queue on real servers, with faults, and judge what happened.",
        epilog="Exit status: 0 nothing found, 1 findings, 2 the harness or its arguments failed.",
    )
    parser.add_argument("--profile", choices=PROFILES, default="smoke")
    parser.add_argument("--seed", type=int, default=1, help="the plan follows from it")
    parser.add_argument("--minutes", type=float, help="how long, instead of the profile's time")
    parser.add_argument("--server", choices=SERVER_KINDS, help="instead of the profile's servers")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the ledger and logs there")
    parser.add_argument("--mutant", choices=MUTANTS, help="a deliberate fault in the queue")
    parser.add_argument("--tasks", type=int, help="how many tasks, instead of the profile's number")
    parser.add_argument("--picture", type=Path, help="soak: where to draw the picture")
    parser.add_argument("--mutants", action="store_true", help="run each of them, for a short time")
    options = parser.parse_args(given)
    if options.minutes is not None and not 0 < options.minutes <= 24 * 60:
        parser.error("--minutes: give more than 0")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep: {options.keep} is not empty")
    return options


def judge_memory(folder: Path, picture: Path | None, console: Console) -> bool:
    """Report on a soak run; return whether memory is flat."""
    wrong = soak.report(folder, picture)
    console.say(soak.failures(ledger.read_json(folder, soak.REPORT)))
    console.say("; ".join(wrong) or "memory is flat")
    return not wrong


def main(given: list[str] | None = None) -> int:
    """Run, judge, and return the exit status."""
    options, console = _arguments(given), Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        passed = (_run_mutants if options.mutants else _run_profile)(options, console)
    except KeyboardInterrupt:
        console.say("interrupted; everything was ended")
        return INTERRUPTED
    except HarnessTrouble as exc:
        console.say(f"the harness failed: {exc}")
        return TROUBLE
    except Exception:  # noqa: BLE001 (whatever it is, it is not a finding)
        traceback.print_exc()
        console.say("the harness failed")
        return TROUBLE
    return 0 if passed else FINDINGS


def _run_mutants(options: argparse.Namespace, console: Console) -> bool:
    """Return whether each mutant was caught."""
    from tests.chaos.mutant_runs import run_all  # noqa: PLC0415 (only for this)

    names = [options.mutant] if options.mutant else list(MUTANTS)
    return run_all(names, seed=options.seed, say=console.say)


def _run_profile(options: argparse.Namespace, console: Console) -> bool:
    """Return whether nothing was found; only the folder of such a run is removed."""
    profile = PROFILES[options.profile]
    if options.minutes is not None:
        profile = profile.lasting(options.minutes)
    if options.tasks is not None:
        profile = profile.with_tasks(options.tasks, PROFILES[options.profile].least)
    if options.server not in {None, profile.server}:
        # Other servers have fewer kinds of faults than the profile asks for.
        profile = replace(profile, least_kinds=min(profile.least_kinds, KINDS_OF_ANY_SERVER))
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="microqueue-chaos-run-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    console.say(f"profile {profile.name}, seed {options.seed}, folder {folder}")
    passed = False
    try:
        server = options.server or profile.server
        Run(Options(profile, options.seed, server, folder, options.mutant), console.say).perform()
        passed = report(folder).passed
        if profile.sample_sec:
            passed = judge_memory(folder, options.picture, console) and passed
    finally:
        if options.keep is None and passed:
            shutil.rmtree(folder, ignore_errors=True)
    if not passed:
        console.say(f"what happened is in {folder}")
    return passed


if __name__ == "__main__":
    sys.exit(main())
