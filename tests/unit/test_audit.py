"""``scripts/audit``: findings fail unless they are explained, and no service is no failure."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from microqueue.embedded.probe import any_free_port

SCRIPT = Path(__file__).parents[2] / "scripts" / "audit.py"
VULNERABLE = "jinja2==2.4.1\n"
ID = "GHSA-1111-2222-3333"


class Osv(BaseHTTPRequestHandler):
    """A service that knows one vulnerability, of one release of jinja2."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = query["version"] == "2.4.1" and query["package"]["name"] == "jinja2"
        vulnerability = {
            "id": ID,
            "aliases": ["CVE-2099-1"],
            "modified": "2099-01-01T00:00:00Z",
            "published": "2099-01-01T00:00:00Z",
            "summary": "a summary",
            "details": "details",
            "affected": [
                {
                    "package": {"name": "jinja2", "ecosystem": "PyPI"},
                    "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}],
                    "versions": ["2.4.1"],
                }
            ],
        }
        body = json.dumps({"vulns": [vulnerability]} if known else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def osv_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Osv) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()
        thread.join()


def report(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


VULNERABLE_PACKAGE = {
    "name": "jinja2",
    "version": "2.4.1",
    "vulns": [{"id": ID, "aliases": ["CVE-2099-1"], "fix_versions": ["3"], "description": ""}],
}


@pytest.mark.parametrize(
    ("exceptions", "status"),
    [("", 1), (f"{ID} jinja2 not used with templates of others", 0), ("CVE-2099-1 jinja2 why", 0)],
)
def test_vulnerability_fails_unless_an_exception_explains_it(
    audit: Any, exceptions: str, status: int
) -> None:
    found = audit.read_report(report(VULNERABLE_PACKAGE))
    assert audit.judge(found, audit.read_exceptions(exceptions)) == status


def test_exception_needs_a_reason(audit: Any) -> None:
    assert audit.read_exceptions("# a comment\n\n") == {}
    with pytest.raises(SystemExit):
        audit.read_exceptions(f"{ID} jinja2")


def test_report_that_looked_nothing_up_is_a_failure(audit: Any) -> None:
    skipped = {"name": "jinja2", "skip_reason": "not found"}
    fine = {"name": "rich", "version": "15", "vulns": []}
    assert audit.judge(audit.read_report(report(skipped)), {}) == 1
    assert audit.judge(audit.read_report(report(skipped, fine)), {}) == 0


@pytest.mark.parametrize(("options", "status"), [([], 0), (["--require"], 1)])
def test_without_a_service_nothing_is_audited_and_that_is_said(
    audit: Any, capsys: pytest.CaptureFixture[str], options: list[str], status: int
) -> None:
    url = f"http://127.0.0.1:{any_free_port()}/v1/query"
    assert audit.main(["--osv-url", url, *options]) == status
    (line,) = capsys.readouterr().out.splitlines()
    assert url in line


def test_service_that_knows_nothing_counts_as_none(
    audit: Any, osv_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audit.probe(osv_url) is None
    monkeypatch.setattr(audit, "VULNERABLE", ("rich", "15.0.0"))
    assert audit.probe(osv_url) is not None


def test_versions_are_looked_up_by_pip_audit(audit: Any, osv_url: str, tmp_path: Path) -> None:
    pytest.importorskip("pip_audit", reason="scripts/setup dev installs it")
    lock, exceptions = tmp_path / "lock", tmp_path / "exceptions"
    exceptions.write_text("")
    given = ["--osv-url", osv_url, "--requirements", str(lock), "--exceptions", str(exceptions)]
    for line, status in (("rich==15.0.0\n", 0), (VULNERABLE, 1)):
        marker = "; python_version < '3'"
        lock.write_text(f"{line}typer==0.1{marker}\ntyper==0.29.1\n")
        assert audit.main(given) == status
