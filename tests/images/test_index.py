"""The package index of this machine, as the build is told of it."""

from __future__ import annotations

from pathlib import Path

from tests.images.index import secrets, settings


def test_what_pip_is_told_uv_is_told_too() -> None:
    found = settings({}, {"index-url": "https://index.example/simple"})
    assert found == {
        "PIP_INDEX_URL": "https://index.example/simple",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
    }


def test_the_environment_wins_over_pips_files() -> None:
    found = settings({"PIP_INDEX_URL": "https://a.example"}, {"index-url": "https://b.example"})
    assert found["UV_DEFAULT_INDEX"] == found["PIP_INDEX_URL"] == "https://a.example"


def test_uvs_own_setting_reaches_both() -> None:
    found = settings({"UV_DEFAULT_INDEX": "https://u.example"}, {})
    assert found == {"UV_DEFAULT_INDEX": "https://u.example", "PIP_INDEX_URL": "https://u.example"}


def test_certificates_and_proxies_go_along(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("x")
    found = settings({"SSL_CERT_FILE": str(bundle), "https_proxy": "http://proxy.example"}, {})
    assert found["https_proxy"] == "http://proxy.example"
    assert found["PIP_CERT"] == found["SSL_CERT_FILE"] == "/run/secrets/certificates"


def test_the_secrets_are_private_files_that_a_shell_can_read(tmp_path: Path) -> None:
    arguments = secrets(tmp_path / "s", {"PIP_INDEX_URL": "https://u:p'w@index.example/$x"})
    assert arguments[:2] == ["--secret", f"id=package-index,src={tmp_path / 's' / 'package-index'}"]
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0
    assert "PIP_INDEX_URL='https://u:p'\"'\"'w@index.example/$x'" in (tmp_path / "s" / "package-index").read_text()
