"""How this machine reaches its package index, as build secrets: files that a build step sees and no layer keeps."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_CERTIFICATES = "/run/secrets/certificates"
# As pip and uv name the same settings. What is set for one tool is told to both.
_SETTINGS = {
    "index-url": ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"),
    "extra-index-url": ("PIP_EXTRA_INDEX_URL", "UV_INDEX"),
    "trusted-host": ("PIP_TRUSTED_HOST", "UV_INSECURE_HOST"),
}
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_BUNDLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")


def settings(environment: Mapping[str, str], pip_configuration: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for pip and uv. The environment wins over pip's files; uv's own names win for uv."""
    found = {name: environment[name] for name in _PROXIES if environment.get(name)}
    for setting, (for_pip, for_uv) in _SETTINGS.items():
        value = environment.get(for_pip) or pip_configuration.get(setting) or environment.get(for_uv)
        if value:
            found[for_pip] = value
            found[for_uv] = environment.get(for_uv) or value
    if certificates(environment):
        found |= dict.fromkeys(_BUNDLES, _CERTIFICATES)
    return found


def certificates(environment: Mapping[str, str]) -> Path | None:
    """The bundle of certificates that this machine's clients are told to trust."""
    paths = [Path(environment[name]) for name in _BUNDLES if environment.get(name)]
    return next((path for path in paths if path.is_file()), None)


def secrets(folder: Path, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Writes the secrets into `folder` (private) and returns buildah's arguments for them."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    file = folder / "package-index"
    values = settings(environment, _pip_configuration())
    file.write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items()))
    arguments = ["--secret", f"id=package-index,src={file}"]
    if bundle := certificates(environment):
        arguments += ["--secret", f"id=certificates,src={bundle}"]
    return arguments


def _pip_configuration() -> dict[str, str]:
    """pip's merged files, e.g. {"index-url": ...}; without pip there is nothing to read."""
    if not shutil.which("pip"):
        return {}
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    found = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, setting = name.rpartition(".")
        if section in ("global", "install"):
            found[setting] = value.strip("'\"")
    return found
