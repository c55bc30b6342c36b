"""Look up known vulnerabilities of the versions in requirements.lock.

It asks the OSV database. Where that cannot be reached, as on a machine that reaches a mirror of
packages only, it prints why nothing was looked up, and exits with 0, or with 1 if --require is
given. It exits with 1 if a version has a vulnerability that .ci/audit-exceptions does not explain,
or if pip-audit fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TIMEOUT_SEC = 3
OSV = "https://api.osv.dev/v1/query"
VULNERABLE = ("jinja2", "2.4.1")
"""A release with known vulnerabilities. A service that reports none for it does not know any."""


class Finding(NamedTuple):
    """A known vulnerability of one version."""

    id: str
    package: str
    version: str
    aliases: frozenset[str]
    fixed_in: tuple[str, ...]

    @property
    def line(self) -> str:
        """The finding, for people."""
        fixed = ", ".join(self.fixed_in) or "none"
        return f"{self.package} {self.version}: {self.id}; fixed in: {fixed}"


class Report(NamedTuple):
    """What pip-audit reported: vulnerabilities, and packages that it could not look up."""

    findings: list[Finding]
    skipped: dict[str, str]
    audited: int


def probe(url: str) -> str | None:
    """Ask the service for a release with known vulnerabilities; return why it cannot be used."""
    package, version = VULNERABLE
    query = {"package": {"name": package, "ecosystem": "PyPI"}, "version": version}
    body, headers = json.dumps(query).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SEC) as reply:
            known = json.load(reply).get("vulns")
    except (OSError, ValueError, AttributeError) as exc:
        return f"{url}: {exc}"
    return None if known else f"{url}: it knows no vulnerabilities"


def read_exceptions(text: str) -> dict[str, str]:
    """Return the reason of each exception by its id; reject one without a reason."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split(maxsplit=2)
        if len(parts) < len(("id", "package", "reason")):
            raise SystemExit(f"scripts/audit: give an id, a package and a reason: {line!r}")
        found[parts[0]] = parts[2]
    return found


def read_report(text: str) -> Report:
    """Read what pip-audit printed with --format json."""
    found: list[Finding] = []
    skipped: dict[str, str] = {}
    packages: list[dict[str, Any]] = json.loads(text)["dependencies"]
    for package in packages:
        if "skip_reason" in package:
            skipped[package["name"]] = package["skip_reason"]
            continue
        found += [
            Finding(
                id=one["id"],
                package=package["name"],
                version=package["version"],
                aliases=frozenset(one.get("aliases", ())),
                fixed_in=tuple(one.get("fix_versions", ())),
            )
            for one in package["vulns"]
        ]
    return Report(found, skipped, len(packages) - len(skipped))


def judge(report: Report, exceptions: dict[str, str]) -> int:
    """Print the result; return the exit status."""
    names = {name for one in report.findings for name in (one.id, *one.aliases)}
    for name in sorted(set(exceptions) - names):
        print(f"scripts/audit: the exception {name} is out of date: nothing has it")
    for package, reason in sorted(report.skipped.items()):
        print(f"scripts/audit: {package} was not looked up: {reason}")
    status = 0
    for one in report.findings:
        reasons = [exceptions[name] for name in (one.id, *one.aliases) if name in exceptions]
        print(f"{one.line}; {f'accepted: {reasons[0]}' if reasons else 'not accepted'}")
        status = status if reasons else 1
    print(f"scripts/audit: {report.audited} packages, {len(report.findings)} vulnerabilities")
    return status if report.audited else 1


def run(requirements: Path, osv_url: str) -> Report:
    """Run pip-audit."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip_audit", "--requirement", str(requirements)),
                *("--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"),
                *("--timeout", "15", "--cache-dir", cache),
                *("--vulnerability-service", "osv", "--osv-url", osv_url),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        return read_report(done.stdout)
    except (ValueError, KeyError) as exc:
        reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise SystemExit(f"scripts/audit: pip-audit failed: {reason[0]}") from exc


def main(arguments: Sequence[str] | None = None) -> int:
    """Look up the versions, and return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/audit", description=__doc__)
    parser.add_argument("--requirements", type=Path, default=ROOT / "requirements.lock")
    parser.add_argument("--exceptions", type=Path, default=ROOT / ".ci" / "audit-exceptions")
    parser.add_argument("--osv-url", default=OSV, help="another OSV service, such as a mirror")
    parser.add_argument("--require", action="store_true", help="fail if nothing can be looked up")
    given = parser.parse_args(arguments)
    exceptions = read_exceptions(given.exceptions.read_text())
    problem = probe(given.osv_url)
    if problem is not None:
        print(f"scripts/audit: not audited, as the service does not answer ({problem})")
        return 1 if given.require else 0
    return judge(run(given.requirements, given.osv_url), exceptions)


if __name__ == "__main__":
    sys.exit(main())
